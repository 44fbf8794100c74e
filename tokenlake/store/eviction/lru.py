"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import recency, refuse
from tokenlake.store.segment import Segment

__all__ = ["LeastRecentlyUsed"]


class LeastRecentlyUsed:
    """One queue. Worth falls with the time since the last use; whatever is new comes in."""

    def __init__(self) -> None:
        self._order: OrderedDict[Segment, None] = OrderedDict()

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`; at the young end."""
        segment.touched = now
        self._order[segment] = None

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        segment.touched = now
        self._order.move_to_end(segment)

    def hinted(self, segment: Segment, now: float) -> None:
        """Hints changes nothing here."""

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        del self._order[segment]

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        for segment in self._order:
            return segment
        raise KeyError("no segment")

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`."""
        return recency(segment, now)

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return 1.0

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """See `EvictionPolicy`."""
        return True

    def remembers(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Not how it was used."""
        return None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._order)

    def save(self) -> bytes:
        """Nothing is learned."""
        return b""

    def absorb(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        refuse(learned)

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        refuse(learned)
