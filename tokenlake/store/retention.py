"""Priority and time to live of primary copies: a layer over whatever policy orders them.

::

    goes first                                                    goes last
    | overdue | low      | normal: by the policy | high: bounded |
      ttl_s     priority                           priority 1, at most HIGH_SHARE of the slots and HIGH_S
      passed    -1                                 since its last use; then it is normal

A priority is soft: it moves a segment to another lane, and no lane is safe. Segments of the outer lanes go least
recently used first; the policy neither sees nor learns from them, and one that becomes normal is new to it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.store.segment import Segment

__all__ = ["HIGH_S", "HIGH_SHARE", "Retention"]

HIGH_SHARE = 0.2
"""Of a pool's slots, those of high priority. Beyond it the one of them that was not used longest is normal."""
HIGH_S = 3600.0
"""A segment of high priority that was not used for so long is normal: nothing is pinned."""
LAPSES = 64
"""At most so many segments change their lane by the clock in one call: what is left over is next."""
_LOW, NORMAL, _HIGH, _OVERDUE = 0, 1, 2, 3


class Retention:
    """An `EvictionPolicy` made of another and three lanes around it. `Segment.lane` is changed here alone."""

    def __init__(self, policy: EvictionPolicy, high_room: Callable[[], int]) -> None:
        """`high_room`: how many segments may be of high priority now."""
        self.policy = policy
        self._high_room = high_room
        # By number of the lane.
        self._lanes: tuple[EvictionPolicy, ...] = (
            LeastRecentlyUsed(),
            policy,
            LeastRecentlyUsed(),
            LeastRecentlyUsed(),
        )
        self._until: dict[Segment, float] = {}
        """When a segment leaves its lane, unless it is used before."""
        self._due: list[tuple[float, int, Segment]] = []
        """A heap; a time in it may be too early, or of a segment that left. None of `_until` is missing."""
        self._numbers = itertools.count()

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        hints = segment.hints
        if not (hints.priority or hints.ttl_s):
            segment.lane = NORMAL
            self.policy.insert(segment, now)
            return
        self._put(segment, _lane_of(hints), now)
        self._watch(segment, now)

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        hints = segment.hints
        if segment.lane == NORMAL and not (hints.priority or hints.ttl_s):
            self.policy.touch(segment, now)
            return
        if not self._moved(segment, now) or segment.lane == NORMAL:
            self._lanes[segment.lane].touch(segment, now)
            self._watch(segment, now)

    def hinted(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`. The time to live begins anew."""
        if not self._moved(segment, now):
            self._lanes[segment.lane].hinted(segment, now)
            self._watch(segment, now)

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        self._lanes[segment.lane].remove(segment, now, evicted)
        segment.lane = NORMAL
        self._until.pop(segment, None)

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._lapse(now)
        for lane in (_OVERDUE, _LOW, NORMAL):
            if len(self._lanes[lane]):
                return self._lanes[lane].coldest(now)
        return self._lanes[_HIGH].coldest(now)

    def overdue(self, now: float) -> bool:
        """Is there a segment whose time to live has passed?"""
        self._lapse(now)
        return len(self._lanes[_OVERDUE]) > 0

    def rule(self, segment: Segment) -> str:
        """By which of its own rules `segment`, which is in order, would go; empty: by the policy's."""
        return {_OVERDUE: "time to live", _LOW: "low priority"}.get(segment.lane, "")

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`; of a segment of high priority, as of one that is new."""
        if segment.lane == NORMAL:
            return self.policy.retention_value(segment, now)
        return self.policy.retention_value_of_new(segment.key, segment.hints, now) if segment.lane == _HIGH else 0.0

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return self.policy.retention_value_of_new(key, hints, now) if hints.priority >= 0 else 0.0

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """See `EvictionPolicy`. What is overdue or of low priority gives way to anybody; high priority is let in."""
        self._lapse(now)
        if hints.priority > 0 or len(self._lanes[_OVERDUE]) or len(self._lanes[_LOW]):
            return True
        return self.policy.admits(key, hints, now)

    def remembers(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """See `EvictionPolicy`."""
        return self.policy.remembers(keys, now)

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[Segment]:
        return itertools.chain.from_iterable(self._lanes[lane] for lane in (_OVERDUE, _LOW, NORMAL, _HIGH))

    def save(self) -> bytes:
        """See `EvictionPolicy`."""
        return self.policy.save()

    def absorb(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        self.policy.absorb(learned)

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        self.policy.restore(learned)

    # -- inside

    def _put(self, segment: Segment, lane: int, now: float) -> None:
        segment.lane = lane
        self._lanes[lane].insert(segment, now)
        if lane == _HIGH and len(self._lanes[_HIGH]) > self._high_room():
            # Of a prompt the deepest segments were used first, so that it keeps its beginning.
            self._leave(self._lanes[_HIGH].coldest(now), NORMAL)

    def _moved(self, segment: Segment, now: float) -> bool:
        """Its hints, or a use, brought it to another lane."""
        lane = _lane_of(segment.hints)
        if lane == segment.lane:
            return False
        self._lanes[segment.lane].remove(segment, now, evicted=False)
        self._put(segment, lane, now)
        self._watch(segment, now)
        return True

    def _leave(self, segment: Segment, lane: int) -> None:
        """It is not used: its last use stays what it was."""
        touched = segment.touched
        self._lanes[segment.lane].remove(segment, touched, evicted=False)
        self._put(segment, lane, touched)
        # A policy may know of a later time, and take that.
        segment.touched = touched
        self._watch(segment, touched)

    def _watch(self, segment: Segment, now: float) -> None:
        """Note when it leaves its lane unless it is used."""
        stay_s = segment.hints.ttl_s
        if segment.lane == _HIGH:
            stay_s = min(stay_s or HIGH_S, HIGH_S)
        if not stay_s or segment.lane == _OVERDUE:
            self._until.pop(segment, None)
            return
        known, until = self._until.get(segment), now + stay_s
        self._until[segment] = until
        if known is None or until < known:
            heapq.heappush(self._due, (until, next(self._numbers), segment))
            if len(self._due) > 2 * len(self._until) + LAPSES:
                self._due = [(at, next(self._numbers), each) for each, at in self._until.items()]
                heapq.heapify(self._due)

    def _lapse(self, now: float) -> None:
        for _ in range(LAPSES):
            if not self._due or self._due[0][0] > now:
                return
            segment = heapq.heappop(self._due)[2]
            until = self._until.get(segment)
            if until is None:
                continue
            if until > now:
                heapq.heappush(self._due, (until, next(self._numbers), segment))
                continue
            # The same sum as in `_watch`, so that it is rounded alike.
            overdue = segment.hints.ttl_s > 0 and segment.touched + segment.hints.ttl_s <= now
            del self._until[segment]
            self._leave(segment, _OVERDUE if overdue else NORMAL)


def _lane_of(hints: Hints) -> int:
    return 1 + hints.priority
