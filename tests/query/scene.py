"""Helpers of the query engine's tests: daemons with query engines, prompts with known caches, and the attention over
them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.robustness.live import LAYOUT as LAYOUT
from tests.robustness.live import LIMIT_S, PATIENT, SEGMENT_TOKENS, daemons, outcomes, wait_told, wait_until
from tokenlake.attention import AttentionShape, Partial, SlotMap, Stored, as_float32, attend, from_float32
from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client import Lease, Pool
from tokenlake_client.queries import View
from tokenlake_testing.cluster import Cluster, Node

HEADS = 4
SCALE = 0.2
DEADLINE_S = 10.0
"""The deadline of queries in tests that are not about deadlines."""
START_S = 60.0
"""Time until a query engine serves: its process imports torch, which takes long on a busy machine."""


def layout_of(dtype: str) -> Layout:
    """`LAYOUT` in another dtype."""
    return msgspec.structs.replace(LAYOUT, dtype=dtype)


class Text:
    """Tokens and their cache: random numbers, seeded with all tokens up to the end of the segment."""

    def __init__(self, seed: int, segments: int, shared: Text | None = None, layout: Layout = LAYOUT) -> None:
        """`shared`: a text whose tokens this one begins with."""
        draw = random.Random(seed)
        head = shared.tokens if shared is not None else []
        self.layout = layout
        self.tokens: list[int] = head + [draw.randrange(1 << 17) for _ in range(segments * SEGMENT_TOKENS)]
        self.segments = len(self.tokens) // SEGMENT_TOKENS

    def content(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one segment."""
        prefix = self.tokens[: (index + 1) * SEGMENT_TOKENS]
        draw = np.random.default_rng(prefix)
        values = draw.standard_normal(SlotMap.of(self.layout).nbytes // self._item, dtype=np.float32)
        return np.ascontiguousarray(from_float32(values, self.layout.dtype)).view(np.uint8)

    def store(self, pool: Pool, start: int = 0, stop: int | None = None) -> None:
        """Store the segments from `start` to `stop`, by default all, and wait until the node has them. A segment is
        PENDING while the node receives it from another one, where the same text was stored a moment ago."""
        keys = pool.prefix(self.tokens).keys[start:stop]

        def fill(index: int, array: NDArray[np.uint8]) -> None:
            self._fill(start + index, array)

        def stored() -> bool:
            codes = outcomes(pool.store_all(keys, fill, start, patience=LIMIT_S))
            assert codes <= {Code.COMMITTED, Code.EXISTS, Code.PENDING}, codes
            return Code.PENDING not in codes

        wait_until(stored, "the text is stored")

    def match(self, pool: Pool) -> Lease:
        """A lease of all segments."""
        lease = pool.match(pool.prefix(self.tokens).keys, deadline_s=DEADLINE_S)
        assert lease.hits == self.segments, outcomes(lease.codes)
        return lease

    def attention(self, queries: Stored, layer: int, segments: int | None = None) -> Partial:
        """The expected result of `queries` `[tokens, heads, key dim]`: `out` `[tokens, heads, value dim]`, `lse`."""
        places = SlotMap.of(self.layout)
        parts = [places.views(self.content(index), layer) for index in range(segments or self.segments)]
        keys, values = (
            np.concatenate([as_float32(part[which], self.layout.dtype).reshape(-1, *part[which].shape[2:])
                            for part in parts], axis=1)
            for which in (0, 1)
        )  # fmt: skip
        rows = as_float32(queries, self.layout.dtype).swapaxes(0, 1)
        out, lse = attend(rows, keys, values, AttentionShape.of(self.layout, queries.shape[1], SCALE).scale)
        return Partial(out.swapaxes(0, 1), lse.swapaxes(0, 1))

    def _fill(self, index: int, array: NDArray[np.uint8]) -> None:
        array[:] = self.content(index)

    @property
    def _item(self) -> int:
        return 4 if self.layout.dtype == "float32" else 2


@contextlib.contextmanager
def serving(nodes: int = 1, memory: str = "8MiB", credential: str | None = None, **settings: str) -> Iterator[Cluster]:
    """A cluster whose query engines serve."""
    with daemons(nodes, memory, query_engine="true", **settings) as cluster:
        try:
            for number in range(nodes):
                wait_serving(cluster, number, credential=credential)
            yield cluster
        finally:
            # pytest shows the output of failed tests.
            for node in cluster.nodes:
                print(node.log.read_text())


def wait_serving(cluster: Cluster, number: int, other_than: int = 0, credential: str | None = None) -> None:
    """Wait until the query engine of a node opens views, in another process than `other_than`."""
    node = cluster.nodes[number]
    text = Text(1000, 1)
    with Pool.connect(node.socket, LAYOUT, credential, deadlines=PATIENT) as pool:

        def opens() -> bool:
            if engine_of(node) in (0, other_than):
                return False
            try:
                text.store(pool)
                with pool.match(pool.prefix(text.tokens).keys, deadline_s=DEADLINE_S) as lease:
                    # A miss while the owner is overdue, which it may be on a busy machine.
                    if lease.hits < text.segments:
                        return False
                    with pool.queries.open_view(lease, HEADS, SCALE):
                        return True
            except TokenLakeError:
                return False

        wait_until(opens, f"the query engine of {node.name} serves", START_S)


def query_engine_file(socket: Path) -> Path:
    """Where the daemon that listens at `socket` writes the process id of its query engine if that was forked."""
    return socket.with_suffix(".query-engine")


def engine_of(node: Node) -> int:
    """Process id of a daemon's query engine; 0 while it has none. The process is a child of the daemon, or was forked
    for it (`tests.warm_daemon`)."""
    assert node.process is not None
    forked = query_engine_file(node.socket)
    if forked.exists():
        pid = int(forked.read_text() or 0)
        return pid if Path(f"/proc/{pid}/stat").exists() else 0
    threads = Path(f"/proc/{node.process.pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return children[0] if len(children) == 1 else 0


def spread(cluster: Cluster, texts: Sequence[Text]) -> None:
    """Store the segments of each text at the nodes in turn, from the second node on, where they stay."""
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(cluster.connect(node, texts[0].layout)) for node in range(len(cluster.nodes))]
        for text in texts:
            for index in range(text.segments):
                text.store(pools[(index + 1) % len(pools)], index, index + 1)
    wait_told(cluster)


def open_view(pool: Pool, text: Text, heads: int = HEADS, scale: float = SCALE) -> View:
    """A view of all segments of a text, retried until `LIMIT_S`."""
    views: list[View] = []

    def opened() -> bool:
        lease = text.match(pool)
        try:
            views.append(pool.queries.open_view(lease, heads, scale, deadline_s=DEADLINE_S))
        except TokenLakeError:
            lease.release()
            return False
        if views[-1].hits == text.segments:
            return True
        views.pop().close()
        return False

    wait_until(opened, "a view of the whole text")
    return views[0]


def draw_queries(seed: int, tokens: int, layout: Layout = LAYOUT, heads: int = HEADS) -> Stored:
    """`[tokens, heads, key dim]`."""
    values = np.random.default_rng(seed).standard_normal((tokens, heads, layout.key_dim), dtype=np.float32)
    return from_float32(values, layout.dtype)


def close_to(got: Partial, expected: Partial, tolerance: float) -> None:
    """AssertionError naming the largest difference."""
    for name, one, other in zip(("out", "lse"), got, expected, strict=True):
        worst = float(np.abs(one - other).max())
        assert worst <= tolerance, f"{name} differs by {worst}"
