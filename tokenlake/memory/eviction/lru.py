"""An eviction policy: the least recently used segment is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tokenlake.memory.eviction.base import EvictionPolicy
from tokenlake.memory.segment import Segment


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the least recently used segment first; a queue of all segments in the order of their last access."""

    def __init__(self) -> None:
        self._order: OrderedDict[Segment, None] = OrderedDict()

    def insert(self, segment: Segment, now: float) -> None:
        segment.touched = now
        self._order[segment] = None

    def touch(self, segment: Segment, now: float) -> None:
        segment.touched = now
        self._order.move_to_end(segment)

    def follow(self, segment: Segment, child: Segment) -> bool:
        """Move `segment` behind all others."""
        self._order.move_to_end(segment)
        return len(self._order) > 1

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        del self._order[segment]

    def victim(self, now: float) -> Segment:
        for segment in self._order:
            return segment
        raise KeyError("no segment")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._order)
