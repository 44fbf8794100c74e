"""S3-FIFO: a small queue of segments on probation, a main queue, and ghosts: the keys of segments that were evicted
from the small queue.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction import SAME_ACCESS_S, EvictionPolicy
from tokenlake.memory.segment import PolicyState, Segment

SMALL_SHARE = 0.1
"""Share of all segments that may be in the small queue, where new segments are on probation. While it holds more, its
segments are evicted first."""
MAX_ACCESSES = 3
"""Maximum number of accesses that are counted per segment. When a segment comes to the front of the main queue, each
counted access lets it pass through the queue once more."""
MOST_PASSED = 1024
"""Maximum number of accessed segments that one search for a victim moves to the end of a queue; moving one takes some
200 ns."""


class _Record(PolicyState):
    """S3-FIFO's state of one segment. The segment keeps it while it is pinned, when it is in no queue."""

    __slots__ = ("accesses", "main")

    def __init__(self, main: bool) -> None:
        self.main = main
        self.accesses = 0
        """Number of accesses, at most `MAX_ACCESSES`, since the segment was added to its queue or moved to the end of
        it."""


class S3Fifo(EvictionPolicy):
    """The policy S3-FIFO. It admits every new segment: to the main queue if the policy remembers its key as evicted (a
    ghost), else to the small queue."""

    def __init__(self) -> None:
        self._small: OrderedDict[Segment, _Record] = OrderedDict()
        self._main: OrderedDict[Segment, _Record] = OrderedDict()
        self._ghosts: OrderedDict[SegmentKey, None] = OrderedDict()

    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the end of a queue: the main queue, if the policy remembers its key as evicted or the
        segment was there before, else the small queue. See `EvictionPolicy`."""
        record = segment.policy_state
        if not isinstance(record, _Record):
            known = segment.key in self._ghosts
            if known:
                del self._ghosts[segment.key]
            record = segment.policy_state = _Record(main=known)
        segment.touched = now
        (self._main if record.main else self._small)[segment] = record

    def touch(self, segment: Segment, now: float) -> None:
        if now - segment.touched >= SAME_ACCESS_S:
            segment.touched = now
            record = self._main.get(segment) or self._small[segment]
            record.accesses = min(record.accesses + 1, MAX_ACCESSES)

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        queue = self._main if segment in self._main else self._small
        del queue[segment]
        if evicted and queue is self._small:
            self._ghosts[segment.key] = None
            while len(self._ghosts) > len(self._main) + len(self._small):
                self._ghosts.popitem(last=False)

    def victim(self, now: float) -> Segment:
        """Returns the first segment without a counted access, of the small queue while that is too long, else of the
        main queue. Accessed segments in front of it, at most `MOST_PASSED`, are moved to the end of the main queue. See
        `EvictionPolicy`."""
        passed = 0
        while self._small or self._main:
            on_probation = not self._main or len(self._small) > SMALL_SHARE * len(self)
            segment, record = next(iter((self._small if on_probation else self._main).items()))
            if not record.accesses or passed == MOST_PASSED:
                return segment
            passed += 1
            if on_probation:
                del self._small[segment]
                record.main, record.accesses = True, 0
                self._main[segment] = record
            else:
                record.accesses -= 1
                self._main.move_to_end(segment)
        raise KeyError("no segment")

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Segment]:
        return chain(self._small, self._main)
