"""A memory pool that records the calls of an engine and lets them fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake_client import Lease, MatchOptions
from tokenlake_client.engine_calls import EngineCalls
from tokenlake_client.testing import MemoryPool

opened: list[MemoryPool] = []
"""The pools of the test that runs, which are closed at its end."""
INDEPENDENT = MatchOptions(independent=True)


class FaultyPool(MemoryPool):
    """`broken` names calls that raise `error`; `lose_after` makes each fetch return at most so many segments; `refuse`
    is the code of every segment of a store but the first; with `far`, all leased segments lie on the node of that
    name."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        opened.append(self)
        self.engine = _Engine(self)
        self.daemon.intercept = self._intercept
        self.broken: set[str] = set()
        self.error: type[Exception] = Unreachable
        self.lose_after: int | None = None
        self.refuse: Code | None = None
        self.far = ""
        self.asked: list[MatchOptions] = []
        self.missed: list[int] = []
        """For each match, the number of keys that it did not find."""
        self.limits: list[float] = []
        """The limit in seconds of each fetch; 0: none."""
        self.marked: dict[SegmentKey, float] = {}
        """The lifetime of each in-flight marker, as set last."""
        self.stored: list[tuple[str | None, Hints | None]] = []
        self.hinted: list[tuple[int, Hints]] = []
        self.leases: list[Lease] = []
        self._keys: dict[SegmentKey, None] = {}

    @property
    def segments(self) -> dict[SegmentKey, NDArray[np.uint8]]:
        """Copies of the segments that the engine stored and the pool still has."""
        with super().match([*self._keys], INDEPENDENT) as lease:
            return {key: array.copy() for key, array in zip(lease.keys, lease.fetch(), strict=True)}

    def evict(self, first: int = 0) -> None:
        """Evict the segments that the engine stored, from the `first` one on."""
        self.daemon.evict([*self._keys][first:])

    def flip(self) -> None:
        """Change the bytes of every stored segment; the numbers stay finite."""
        with super().match([*self._keys], INDEPENDENT) as lease:
            for place in lease.places:
                slot = self.link.regions.get(int(place["region"]), write=True).slots[place["slot"]]
                slot.view(np.uint16)[:] ^= 0x0180

    @property
    def leased(self) -> int:
        """The number of leased segments that were not released, over all leases."""
        return sum(int(hold.unreleased.sum()) for lease in self.leases for hold in lease._holds)

    def fail(self, call: str) -> None:
        if call in self.broken:
            raise self.error(f"{call} is broken")

    def _intercept(self, message: engine.EngineRequest) -> None:
        if isinstance(message, engine.Commit):
            self.fail("commit")

    def prefix(self, *arguments: Any, **options: Any) -> Any:
        self.fail("prefix")
        return super().prefix(*arguments, **options)

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = INDEPENDENT, **more: Any) -> Lease:
        self.fail("match")
        self.asked.append(options)
        self.leases.append(super().match(keys, options, **more))
        self.missed.append(len(keys) - self.leases[-1].hits)
        return cast(Lease, FaultyLease(self, self.leases[-1]))

    def store_all(self, keys: Sequence[SegmentKey], fill: Any, *arguments: Any, **options: Any) -> bytes:
        def over_nans(index: int, slot: NDArray[np.uint8]) -> None:
            # All bits are ones, so that a place that the engine does not write shows as a NaN.
            slot.fill(0xFF)
            fill(index, slot)

        self.fail("store")
        self.stored.append((options.get("request"), options.get("hints")))
        given = len(keys) if self.refuse is None else 1
        codes = super().store_all(keys[:given], over_nans if callable(fill) else fill, *arguments, **options)
        self._keys |= dict.fromkeys(keys[:given])
        return codes + bytes([self.refuse or 0]) * (len(keys) - given)

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        self.fail("hint")
        self.hinted.append((len(keys), hints))

    def close(self) -> None:
        self.fail("close")
        super().close()


class _Engine(EngineCalls):
    def __init__(self, pool: FaultyPool) -> None:
        super().__init__(pool._state, pool._heartbeat)
        self._pool = pool

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        self._pool.fail("mark_in_flight")
        self._pool.marked |= dict.fromkeys(keys, seconds)
        super().mark_in_flight(keys, seconds)


class FaultyLease:
    """The lease of a `FaultyPool`."""

    def __init__(self, pool: FaultyPool, lease: Lease) -> None:
        self._pool = pool
        self._lease = lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    @property
    def local_hits(self) -> int:
        return 0 if self._pool.far else self._lease.local_hits

    def nodes(self) -> list[str]:
        return self.sources()[0]

    def sources(self) -> tuple[list[str], list[float]]:
        self._pool.fail("nodes")
        names, seconds = self._lease.sources()
        return [self._pool.far or name for name in names], seconds

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        self._pool.fail("fetch")
        self._pool.limits.append(at_most_s)
        if start > 0:
            self._pool.fail("second fetch")
        lost = self._pool.lose_after
        return self._lease.fetch(start, stop if lost is None else min(stop, start + lost), at_most_s=at_most_s)

    def release(self, *arguments: Any, **options: Any) -> None:
        self._pool.fail("release")
        self._lease.release(*arguments, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
