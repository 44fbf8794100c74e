"""A pool in this process: the client's interface over a dictionary of real bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, Salt, TokenIds, root_key
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client.engines.common.pool import CacheLease, CachePool
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions

SECRET = b"secret of the test's tenant"


class MemoryPool:
    """Holds every committed segment. `broken` names calls that raise; `lose_after` makes each fetch return at most so
    many segments; `refuse` is the code of every segment of a store but the first."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.node = "memory"
        self.segments: dict[SegmentKey, NDArray[np.uint8]] = {}
        self.broken: set[str] = set()
        self.error: type[Exception] = Unreachable
        self.lose_after: int | None = None
        self.refuse: Code | None = None
        self.lock = threading.Lock()
        self.asked: list[tuple[str | None, Hints | None, int]] = []
        self.patience: list[float] = []
        """The in-flight wait of each match."""
        self.limits: list[float] = []
        """The limit in seconds of each fetch; 0: none."""
        self.marked: dict[SegmentKey, float] = {}
        """The lifetime of each in-flight marker, as set last."""
        self.stored: list[tuple[str | None, Hints | None]] = []
        self.hinted: list[tuple[int, Hints]] = []
        self.leases: list[MemoryLease] = []

    @property
    def leased(self) -> int:
        """The number of leased segments that were not released, over all leases."""
        return sum(len(lease.held) for lease in self.leases)

    def fail(self, call: str) -> None:
        if call in self.broken:
            raise self.error(f"{call} is broken")

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: Salt = None) -> Prefix:
        self.fail("prefix")
        prefix = Prefix(root_key(SECRET, self.layout.fingerprint(), adapter, salt), self.layout.segment_tokens)
        prefix.extend(tokens)
        return prefix

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH) -> CacheLease:
        self.fail("match")
        self.asked.append((options.request, options.hints, options.prompt_tokens))
        with self.lock:
            hits = next((i for i, key in enumerate(keys) if key not in self.segments), len(keys))
        missing = len(keys) - hits
        self.patience.append(min(options.in_flight_wait_s, options.in_flight_wait_per_segment_s * missing))
        return MemoryLease(self, keys, hits)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, NDArray[np.uint8]], None],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> bytes:
        self.fail("store")
        self.stored.append((request, hints))
        filled = {}
        given = len(keys) if self.refuse is None else 1
        for index, key in enumerate(keys[:given]):
            if key not in self.segments:
                # All bits are ones, so that a place that the engine does not write shows as a NaN.
                filled[key] = np.full(self.layout.segment_bytes, 0xFF, np.uint8)
                fill(index, filled[key])
        self.fail("commit")
        with self.lock:
            self.segments.update(filled)
        codes = [Code.COMMITTED if key in filled else Code.EXISTS for key in keys[:given]]
        return bytes(codes + [self.refuse or Code.EXISTS] * (len(keys) - given))

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        self.fail("mark_in_flight")
        for key in keys:
            self.marked[key] = seconds

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        self.fail("hint")
        self.hinted.append((len(keys), hints))

    def close(self) -> None:
        self.fail("close")

    def flip(self) -> None:
        """Change the bytes of every stored segment; the numbers stay finite."""
        for key, segment in self.segments.items():
            changed = segment.view(np.uint16).copy()
            changed ^= 0x0180
            self.segments[key] = changed.view(np.uint8)


class MemoryLease:
    """Hands out read-only arrays, as the client does."""

    def __init__(self, pool: MemoryPool, keys: Sequence[SegmentKey], hits: int) -> None:
        self.pool, self.keys, self.hits = pool, keys, hits
        self.local_hits = hits
        self.held = set(range(hits))
        pool.leases.append(self)

    def nodes(self) -> list[str]:
        self.pool.fail("nodes")
        return [self.pool.node] * self.hits

    def sources(self) -> tuple[list[str], list[float]]:
        return self.nodes(), [0.0] * self.hits

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        self.pool.fail("fetch")
        self.pool.limits.append(at_most_s)
        if start > 0:
            self.pool.fail("second fetch")
        if self.pool.lose_after is not None:
            stop = min(stop, start + self.pool.lose_after)
        views = [self.pool.segments[key].view() for key in self.keys[start:stop]]
        for view in views:
            view.flags.writeable = False
        return views

    @property
    def unreleased(self) -> int:
        return next((at for at in range(self.hits) if at not in self.held), self.hits)

    def used(self, start: int, stop: int) -> None: ...

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None: ...

    def release(self, start: int = 0, stop: int | None = None, *, counted: bool = True) -> None:
        self.pool.fail("release")
        self.held -= set(range(start, self.hits if stop is None else stop))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def as_pool(pool: MemoryPool) -> CachePool:
    """Checks the interface statically."""
    return pool
