"""ARC: a queue of segments accessed once and a queue of segments accessed again. Ghosts, the keys of segments that were
evicted from a queue, decide how many segments each queue may have.

Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. ARC's capacity is taken as the
number of segments in the two queues together at the time of an eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction import SAME_ACCESS_S, EvictionPolicy
from tokenlake.memory.segment import PolicyState, Segment


class _Record(PolicyState):
    """ARC's state of one segment. The segment keeps it while it is pinned, when it is in no queue."""

    __slots__ = ("again",)

    def __init__(self, again: bool) -> None:
        self.again = again
        """True if the segment was accessed more than once since it was added."""


class AdaptiveReplacement(EvictionPolicy):
    """The eviction policy ARC. It admits every new segment: to the queue of segments accessed again if it remembers the
    key as evicted (a ghost), else to the queue of segments accessed once."""

    def __init__(self) -> None:
        self._once: OrderedDict[Segment, None] = OrderedDict()
        self._again: OrderedDict[Segment, None] = OrderedDict()
        self._ghosts_once: OrderedDict[SegmentKey, None] = OrderedDict()
        self._ghosts_again: OrderedDict[SegmentKey, None] = OrderedDict()
        self._for_once = 0.0
        """Number of segments that the queue of segments accessed once should have; ARC adapts it when it meets
        ghosts."""

    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the queue of segments accessed again, if the policy remembers its key as evicted or the
        segment was in that queue before, else to the queue of segments accessed once; see `EvictionPolicy`."""
        record = segment.policy_state
        if not isinstance(record, _Record):
            record = segment.policy_state = _Record(again=self._was_here(segment.key))
        segment.touched = now
        (self._again if record.again else self._once)[segment] = None

    def _was_here(self, key: SegmentKey) -> bool:
        """Whether the policy remembers the key as evicted (a ghost). If so, the ghost is removed, and the queue that
        evicted the segment may hold more segments from now on."""
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
        """Record an access: `segment` moves to the end of the queue of segments accessed again, or to the end of its
        present queue within `SAME_ACCESS_S` of its last access. See `EvictionPolicy`."""
        counts = now - segment.touched >= SAME_ACCESS_S
        if segment in self._again:
            self._again.move_to_end(segment)
        elif counts:
            del self._once[segment]
            self._again[segment] = None
            segment.policy_state = _Record(again=True)
        else:
            self._once.move_to_end(segment)
        if counts:
            segment.touched = now

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Take `segment` out of its queue; the key of an evicted one becomes a ghost of that queue. See
        `EvictionPolicy`."""
        capacity = len(self)
        again = segment in self._again
        del (self._again if again else self._once)[segment]
        if evicted:
            (self._ghosts_again if again else self._ghosts_once)[segment.key] = None
            while len(self._once) + len(self._ghosts_once) > capacity and self._ghosts_once:
                self._ghosts_once.popitem(last=False)
            while len(self._ghosts_once) + len(self._ghosts_again) > capacity and self._ghosts_again:
                self._ghosts_again.popitem(last=False)

    def victim(self, now: float) -> Segment:
        """Returns the oldest segment of the queue of segments accessed once, if that queue has more segments than it
        should have, else of the other queue; see `EvictionPolicy`."""
        for segment in self._once if self._once_first() else self._again:
            return segment
        raise KeyError("no segment")

    def _once_first(self) -> bool:
        return bool(self._once) and (not self._again or len(self._once) > self._for_once)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[Segment]:
        return chain(self._once, self._again) if self._once_first() else chain(self._again, self._once)
