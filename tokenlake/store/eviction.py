"""Which segment goes first. A policy orders segments; the store decides when, and passes over pinned ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from tokenlake.store.segment import Segment

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


class EvictionPolicy(Protocol):
    """Order of the READY segments of one slot size, kind and tenant. Deterministic."""

    def insert(self, segment: Segment, now: float) -> None:
        """`segment` became evictable in principle; counts as a touch."""

    def touch(self, segment: Segment, now: float) -> None:
        """`segment` was read. The caller touches a prompt's deepest segment first."""

    def remove(self, segment: Segment) -> None:
        """`segment` left: evicted, discarded, or changed its kind."""

    def coldest(self) -> Segment:
        """The next victim, which stays. KeyError when empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Segment]:
        """Coldest first."""


class LeastRecentlyUsed:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Segment, None] = OrderedDict()

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        segment.touched = now
        self._order[segment] = None

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        segment.touched = now
        self._order.move_to_end(segment)

    def remove(self, segment: Segment) -> None:
        """See `EvictionPolicy`."""
        del self._order[segment]

    def coldest(self) -> Segment:
        """See `EvictionPolicy`."""
        for segment in self._order:
            return segment
        raise KeyError("no segment")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._order)
