"""Attention over segments of other nodes: a query engine queries one, two or four others, over loopback.

The ceiling is the time of the same kernel over the same segments in one process plus that of a bare transfer of as many
bytes there and back. All processes share this machine's processors: the nodes of a row compute concurrently only where
there are enough processors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tokenlake.attention import Stored, from_float32
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake_bench.attention.fleet import LAYERS, Q_HEADS, SEGMENTS, Fleet
from tokenlake_client.queries import QueryBuffer, View

PATIENT_S: Final = 10.0
TOLERANCE: Final = 3e-2
"""Largest absolute difference between two attention results in bfloat16 that counts as equal."""
ITEM_BYTES: Final = 2


class RemoteCase:
    """Measurement of attention of `tokens` query tokens over `each` segments of each of the given nodes, by queries to
    their query engines."""

    def __init__(self, fleet: Fleet, nodes: Sequence[int], each: int, tokens: int, name: str) -> None:
        self.name = name
        remote = [node for node in nodes if node != fleet.reader]
        self.bytes_formula = len(remote) * tokens * fleet.shape.query_bytes(ITEM_BYTES, ITEM_BYTES)
        self._fleet = fleet
        self._sent = self._received = 0
        self._slots = [slot for node in nodes for slot in fleet.slots(node, each)]
        self._view: View = fleet.open_view(nodes, each)
        self._buffer: QueryBuffer = fleet.pool.init_query([(self._view, tokens)])
        drawn = np.random.default_rng(tokens).standard_normal((tokens, Q_HEADS, fleet.layout.key_dim), np.float32)
        self._queries: Stored = from_float32(drawn, fleet.layout.dtype)
        self._buffer.queries[...] = self._queries
        self._compare()

    def sample(self, turn: int) -> float:
        """Seconds of one query, from the engine's call until it has the merged attention over all segments. Raises
        `Unreachable` when the query was lost."""
        began = time.perf_counter()
        answer = self._fleet.pool.query(self._buffer, turn % LAYERS, deadline_s=PATIENT_S).wait()
        taken = time.perf_counter() - began
        if answer.lost:
            raise Unreachable(f"{self.name}: the query was lost")
        self._sent, self._received = answer.sent_bytes, answer.received_bytes
        return taken

    def ceiling(self, turn: int) -> float:
        """Seconds of the same kernel over the same segments in this process, plus the seconds of a bare TCP transfer of
        as many bytes as the last query moved there and back."""
        began = time.perf_counter()
        self._fleet.kernel.attend(self._queries, self._slots, turn % LAYERS)
        if self._sent:
            self._fleet.echo.exchange(self._sent, self._received)
        return time.perf_counter() - began

    def bytes(self) -> int:
        """Bytes that the last query moved over the network in both directions, headers of the frames included."""
        return self._sent + self._received

    def close(self) -> None:
        """Close the query buffer and the view over the segments."""
        self._buffer.close()
        self._view.close()

    def _compare(self) -> None:
        self.sample(1)
        expected = self._fleet.kernel.attend(self._queries, self._slots, 1)
        worst = float(np.abs(self._buffer.output - expected.out).max())
        if not worst <= TOLERANCE:
            raise TokenLakeError(f"{self.name}: differs by {worst} from the kernel over the same segments")


def remote_cases(counts: Sequence[int], queries: Sequence[int]) -> Iterator[RemoteCase]:
    """Measurements over segments of the reader's own node, then of 1, 2 or 4 other nodes: first with idle query
    engines, then while an engine at every node queries the query engine of its node without a pause. With one segment
    the round trip is most of the time. The daemons run until the iteration ends."""
    with Fleet() as fleet:
        for busy in (False, True):
            with fleet.load() if busy else contextlib.nullcontext():
                for segments in (1, SEGMENTS):
                    for tokens in queries:
                        for count in [0, *counts]:
                            if count <= segments:
                                with contextlib.closing(_case(fleet, count, segments, tokens, busy)) as case:
                                    yield case


def _case(fleet: Fleet, count: int, segments: int, tokens: int, busy: bool) -> RemoteCase:
    where = f"remote{count}" if count else "here"
    name = f"query_{where}_{segments * fleet.layout.segment_tokens}_q{tokens}{'_busy' if busy else ''}"
    nodes = fleet.others[:count] or [fleet.reader]
    return RemoteCase(fleet, nodes, segments // len(nodes), tokens, name)
