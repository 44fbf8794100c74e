"""ARC: one queue of segments used once and one of segments used again; evictions from each move the border between
them.

Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. The capacity is the number of
segments in order when one is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S, recency, refuse
from tokenlake.store.segment import Segment

__all__ = ["AdaptiveReplacement"]


class _Record:
    """The policy's state of a segment, kept while the segment is out of order."""

    __slots__ = ("again",)

    def __init__(self, again: bool) -> None:
        self.again = again
        """Used more than once."""


class AdaptiveReplacement:
    """An `EvictionPolicy` that admits every segment, at the recent end of those used once."""

    def __init__(self) -> None:
        self._once: OrderedDict[Segment, None] = OrderedDict()
        self._again: OrderedDict[Segment, None] = OrderedDict()
        self._ghosts_once: OrderedDict[SegmentKey, None] = OrderedDict()
        self._ghosts_again: OrderedDict[SegmentKey, None] = OrderedDict()
        self._for_once = 0.0
        """Target number of segments used once."""

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        record = segment.record
        if not isinstance(record, _Record):
            record = segment.record = _Record(again=self._was_here(segment.key))
        segment.touched = now
        (self._again if record.again else self._once)[segment] = None

    def _was_here(self, key: SegmentKey) -> bool:
        """Whether the segment was evicted lately. If it was, the queue that evicted it gets more room."""
        once, again = len(self._ghosts_once), len(self._ghosts_again)
        if key in self._ghosts_once:
            del self._ghosts_once[key]
            self._for_once = min(len(self) + 1.0, self._for_once + max(1.0, again / once))
        elif key in self._ghosts_again:
            del self._ghosts_again[key]
            self._for_once = max(0.0, self._for_once - max(1.0, once / again))
        else:
            return False
        return True

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        counts = now - segment.touched >= SAME_ACCESS_S
        if segment in self._again:
            self._again.move_to_end(segment)
        elif counts:
            del self._once[segment]
            self._again[segment] = None
            segment.record = _Record(again=True)
        else:
            self._once.move_to_end(segment)
        if counts:
            segment.touched = now

    def hinted(self, segment: Segment, now: float) -> None:
        """This policy ignores hints."""

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        capacity = len(self)
        again = segment in self._again
        del (self._again if again else self._once)[segment]
        if evicted:
            (self._ghosts_again if again else self._ghosts_once)[segment.key] = None
            while len(self._once) + len(self._ghosts_once) > capacity and self._ghosts_once:
                self._ghosts_once.popitem(last=False)
            while len(self._ghosts_once) + len(self._ghosts_again) > capacity and self._ghosts_again:
                self._ghosts_again.popitem(last=False)

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        for segment in self._once if self._once_first() else self._again:
            return segment
        raise KeyError("no segment")

    def _once_first(self) -> bool:
        return bool(self._once) and (not self._again or len(self._once) > self._for_once)

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
        """This policy keeps no access records."""
        return None

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[Segment]:
        return chain(self._once, self._again) if self._once_first() else chain(self._again, self._once)

    def save(self) -> bytes:
        """This policy learns nothing."""
        return b""

    def absorb(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        refuse(learned)

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        refuse(learned)
