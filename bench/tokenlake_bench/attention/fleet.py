"""The daemons of `bench attention` with their query engines, the segments stored at each node, and engine processes
that keep the query engines busy."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.attention import AttentionShape, from_float32
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench.attention.echo import Echo
from tokenlake_client import Pool
from tokenlake_client.queries import View
from tokenlake_query.kernels import kernel_for
from tokenlake_testing.children import end_with_parent
from tokenlake_testing.cluster import Cluster

Q_HEADS: Final = 32
LAYERS: Final = 2
SEGMENTS: Final = 16
"""Maximum number of segments of one node over which one query computes attention: 16 segments, which have 4,096
tokens."""
NODES: Final = 5
STORED: Final = 10 * SEGMENTS
"""Number of segments stored at all nodes together: enough that each node owns as many as one query reads at it."""
EACH: Final = 4
"""Number of consecutive segments of the prompt that are stored at one node before the next node's turn."""
START_S: Final = 60.0
STEP_S: Final = 10.0
LOAD_SEGMENTS: Final = 4


class Fleet:
    """Five daemons with query engines; an engine at the first node sends queries to the others, and each node owns the
    segments with the keys `keys[node]`. A context manager: starts all processes and ends them."""

    reader: Final = 0
    others: Final = tuple(range(1, NODES))

    def __init__(self) -> None:
        self.layout = Layout(
            model_id="bench",
            weights_digest="00",
            dtype="bfloat16",
            layers=LAYERS,
            kv_heads=8,
            key_dim=128,
            value_dim=128,
            position="none",
        )
        self.shape = AttentionShape.of(self.layout, Q_HEADS)
        self.kernel = kernel_for(self.layout, self.shape)
        memory = STORED * self.layout.segment_bytes
        self._cluster = Cluster(NODES, str(memory), str(memory), query_engine="true", suspect_ms="5000")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            # The comparison in this process must use as many torch threads as a query engine does.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
            self.echo = stack.enter_context(contextlib.closing(Echo()))
            stack.enter_context(self._cluster)
            self._pools = [stack.enter_context(self._cluster.connect(node, self.layout)) for node in range(NODES)]
            self.keys = self._spread()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def pool(self) -> Pool:
        """Client of the daemon at the first node, from which the queries are sent."""
        return self._pools[self.reader]

    def slots(self, node: int, count: int) -> list[NDArray[np.uint8]]:
        """The slots, in shared memory, of the first segments that a node owns."""
        with self._pools[node].match(self.keys[node][:count], deadline_s=STEP_S) as lease:
            return lease.fetch()

    def open_view(self, nodes: Sequence[int], each: int) -> View:
        """Open a view over `each` segments of each of `nodes`, for queries of an engine at the first node. Waits for
        query engines that are still starting."""
        keys = [key for node in nodes for key in self.keys[node][:each]]
        names = {self._cluster.nodes[node].name for node in nodes}
        return _open_view(self.pool, keys, self.shape, names)

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Context in which one engine process per node sends queries to the query engine of its node, over segments of
        that node, without a pause."""
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        busy = [context.Event() for _ in range(NODES)]
        engines = [
            context.Process(
                target=_query_repeatedly,
                args=(self._cluster.nodes[node].socket, self.layout.encode(), self.keys[node][-LOAD_SEGMENTS:], stop,
                      busy[node]),
                daemon=True,
            )
            for node in range(NODES)
        ]  # fmt: skip
        for process in engines:
            process.start()
        try:
            for started in busy:
                if not started.wait(START_S):
                    raise Unreachable("an engine process of the load did not start in time")
            yield
        finally:
            stop.set()
            for process in engines:
                process.join()

    def _spread(self) -> list[list[SegmentKey]]:
        """Store the segments of one long prompt, a few at each node in rotation. Returns by node the keys of the
        segments that it owns."""
        tokens = np.random.default_rng(0).integers(0, 1 << 17, STORED * self.layout.segment_tokens)
        keys = self._pools[0].prefix(tokens).keys
        draw = np.random.default_rng(1)

        def fill(_: int, slot: NDArray[np.uint8]) -> None:
            slot[:] = from_float32(draw.standard_normal(len(slot) // 2, np.float32), "bfloat16").view(np.uint8)

        for start in range(0, STORED, EACH):
            writer = self._pools[start // EACH % NODES]
            codes = writer.store_all(keys[start : start + EACH], fill, start, patience=START_S)
            if set(codes) != {Code.COMMITTED}:
                raise TokenLakeError(f"segments could not be stored: {[Code(code).name for code in set(codes)]}")
        until = time.monotonic() + START_S
        while True:
            found = self._where(keys)
            if all(len(at_node) >= SEGMENTS + LOAD_SEGMENTS for at_node in found):
                return found
            if time.monotonic() > until:
                raise Unreachable(f"the nodes own {[len(at_node) for at_node in found]} segments, too few for a view")
            time.sleep(0.1)

    def _where(self, keys: Sequence[SegmentKey]) -> list[list[SegmentKey]]:
        """By node, the keys of the segments that it owns, as a match by an engine of the first node finds them."""
        found: dict[str, list[SegmentKey]] = {node.name: [] for node in self._cluster.nodes}
        # The keys are matched in batches, because one session may not lease all segments at a time.
        for start in range(0, len(keys), SEGMENTS):
            with self.pool.match(keys[start : start + SEGMENTS], deadline_s=STEP_S) as lease:
                for key, node in zip(lease.keys, lease.nodes(), strict=False):
                    found[node].append(key)
        return list(found.values())


def _open_view(pool: Pool, keys: Sequence[SegmentKey], shape: AttentionShape, nodes: set[str]) -> View:
    until = time.monotonic() + START_S
    while True:
        lease = pool.match(keys, deadline_s=STEP_S)
        try:
            view = pool.open_view(lease, shape.q_heads, shape.scale)
            # If an owner answers a lookup late, the match may have found another node's copy; then the match is
            # repeated.
            if view.hits == len(keys) and set(lease.nodes()) == nodes:
                return view
            view.close()
        except TokenLakeError:
            lease.release()
        if time.monotonic() > until:
            raise Unreachable(f"no view of {len(keys)} segments could be opened in time")
        time.sleep(0.05)


def _query_repeatedly(path: Path, layout: bytes, keys: Sequence[SegmentKey], stop: Event, started: Event) -> None:
    """The main function of an engine process that keeps a query engine busy: it sends queries over the segments `keys`
    until `stop` is set."""
    end_with_parent()
    shape = AttentionShape.of(Layout.decode(layout), Q_HEADS)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool.connect(path, Layout.decode(layout)))
        view = stack.enter_context(_open_view(pool, keys, shape, {pool.node}))
        buffer = stack.enter_context(pool.init_query([(view, 1)]))
        buffer.queries[...] = 0
        started.set()
        layer = 0
        while not stop.is_set():
            pool.query(buffer, layer, deadline_s=STEP_S).wait()
            layer = (layer + 1) % LAYERS
