"""The policy of primary and of cached copies, which forecasts re-use. The segments that one request accessed together
mostly are accessed again together, or not at all. A model (`odds.py`) predicts how soon from the history of the
request: how much of its prompt was found, which turn of a conversation it is, how long ago the turn before was, how
often the segments were accessed. Hints of priority and time to live come before the forecast.

::

    leaves first                                                      leaves last
    | EXPIRED | LOW      | NORMAL: by forecast | HIGH: bounded |
      ttl_s     priority                         priority 1, at most HIGH_SHARE of the slots and HIGH_S since the
      passed    -1                               last access; then NORMAL

    order       cohorts with segments here, by tier, then by retention value at their age; within one the deepest
                segment leaves first
    ghosts      records of segments that were evicted or refused (`records.py`): the model learns from them too, and
                knows a segment that comes back
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from sortedcontainers import SortedDict

from tokenlake.hints import NO_HINTS, AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction.base import SAME_ACCESS_S, EvictionPolicy
from tokenlake.memory.eviction.odds import AGES, EDGES, Features, Odds
from tokenlake.memory.eviction.records import GHOSTS_EACH, LEAST_GHOSTS, Cohort, Ghosts, Record, Tier
from tokenlake.memory.segment import Segment

HIGH_SHARE = 0.2
"""Maximum share of a pool's slots for segments of high priority. Beyond it the least recently used of them gets normal
priority."""
LEARN_EVERY = 8
"""Number of different times of accesses after which the model learns from the observed re-use."""

LEARN_AT = 1024
"""Number of waiting samples at which the model learns at once, because samples also come from the passing of time,
without accesses."""


class Forecast(EvictionPolicy):
    """An eviction policy that evicts the segment with the fewest predicted accesses per second of being kept, and
    refuses a new segment with even fewer."""

    def __init__(self) -> None:
        self._ghosts = Ghosts()
        self._size = 0
        """Number of segments in order."""
        self._now = 0.0
        self._last_moment = 0.0
        """Time in seconds of the last access of any segment."""
        self._moments = 0
        """Number of different times at which segments were accessed."""
        self.odds: Odds = Odds()
        self._order: SortedDict[tuple[Tier, float, float, int], Cohort] = SortedDict()
        """The cohorts with segments by `Cohort.place`, the one to evict from next first."""
        self._first: Cohort | None = None
        """The first of them, once it was looked for."""
        self._changes: SortedDict[tuple[float, int], Cohort] = SortedDict()
        """By time in seconds and number: the cohorts in order that get another tier then, because their time to live or
        their high priority ends."""
        self._high: SortedDict[int, Cohort] = SortedDict()
        """The cohorts in order of high priority, by number: in the order of their access."""
        self._high_size = 0
        """Number of their segments."""
        self._high_most = 2
        """Limit of that number."""
        self._ages: list[deque[Cohort]] = [deque() for _ in range(AGES - 1)]
        self._newest: dict[tuple[float, ...], Cohort] = {}
        """Cohorts that further segments of the same request still join, by their names: the segments of a request
        come one by one."""
        self._newest_since = 0.0
        self._hints = NO_HINTS
        self._by_accesses: dict[int, Cohort] = {}
        """Those of the newest cohorts that segments with the hints `_hints` join, by the accesses of the segment."""
        self._cohorts = 0
        """Number of cohorts made so far."""
        self._next_aging = math.inf
        """Time in seconds at which the next cohort reaches its next bucket of age."""

    def resize(self, slots: int) -> None:
        self._high_most = max(2, math.ceil(HIGH_SHARE * slots))

    # -- segments

    def insert(self, segment: Segment, now: float) -> None:
        """At its first insert, and the first one after `forget`, the segment joins the cohort of the present time,
        otherwise its earlier one."""
        now = self._advance(now)
        if isinstance(segment.policy_state, Record):
            # Its priority and time to live may have come meanwhile.
            self._enter(segment, segment.policy_state, again=not (segment.hints.priority or segment.hints.ttl_s))
            return
        ghost = self._ghosts.pop(segment.key, None)
        record = segment.policy_state = Record(now) if ghost is None else ghost
        self._count_access(record, now)
        self._enter(segment, record)

    def touch(self, segment: Segment, now: float) -> None:
        """The segment joins the cohort of the present time."""
        now = self._advance(now) if now > self._now else self._now
        record = self._leave(segment)
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._enter(segment, record)

    def follow(self, segment: Segment, child: Segment) -> bool:
        """The segment joins the cohort of `child`, in which the deeper one leaves first."""
        cohort = self._record(child).cohort
        record = self._record(segment)
        if cohort is None or cohort is record.cohort:
            return False
        touched = segment.touched
        self._leave(segment)
        self._leave_cohort(record)
        cohort.unused += 1
        record.cohort = cohort
        self._enter(segment, record, again=True)
        segment.touched = touched
        return True

    def hints_changed(self, segment: Segment, now: float) -> None:
        """The segment joins a new cohort: the request that sent the hints used it until now, and its time to live
        begins anew."""
        self._advance(now)
        self._enter(segment, self._leave(segment))

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Its record stays in its cohort, so that the model learns from an access after the segment has come back."""
        now = self._advance(now)
        record = self._leave(segment)
        if evicted:
            self._add_ghost(segment.key, record, segment.hints, now)

    def forget(self, segment: Segment) -> None:
        """Its record leaves its cohort and keeps its accesses."""
        self._leave_cohort(self._record(segment))

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Admits a segment of high priority, where the next victim is of low priority or its time to live has passed,
        and where the retention value of the new segment is at least that of the victim."""
        now = self._advance(now)
        if not self._size or hints.priority > 0:
            return True
        next_one = self._next()
        if next_one.tier < Tier.NORMAL or self.retention_value_of_new(key, hints, now) >= next_one.value:
            return True
        ghost = self._ghosts.pop(key, None)
        record = Record(now) if ghost is None else ghost
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._leave_cohort(record)
        self._join_cohort(record, hints)
        self._add_ghost(key, record, hints, now)
        return False

    def __len__(self) -> int:
        return self._size

    # -- the order

    def victim(self, now: float) -> Segment:
        """The deepest segment of the cohort that leaves first."""
        self._advance(now)
        if not self._size:
            raise KeyError("no segment")
        return self._next().deepest()

    def expired(self, now: float) -> bool:
        self._advance(now)
        return self._size > 0 and self._next().tier is Tier.EXPIRED

    def rule(self, segment: Segment) -> str:
        return _RULES.get(self._cohort(segment).tier, "")

    def rank(self, segment: Segment, now: float) -> tuple[int, float, float]:
        cohort = self._cohort(segment)
        return cohort.tier, self.retention_value(segment, now), segment.touched

    def retention_value(self, segment: Segment, now: float) -> float:
        """The predicted accesses per second: for high priority those of a new segment, before the tier NORMAL none."""
        self._advance(now)
        return self._cohort(segment).value

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        if hints.priority < 0:
            return 0.0
        ghost = self._ghosts.get(key)
        accesses = ghost.accesses + 1 if ghost is not None else 1
        return self.odds.retention_value(self.odds.features(accesses, hints))[0]

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        for index in range(len(keys) - 1, -1, -1):
            ghost = self._ghosts.get(keys[index])
            if ghost is not None:
                return index, ghost.access, max(0.0, now - ghost.counted)
        return None

    def __iter__(self) -> Iterator[Segment]:
        for cohort in self._order.values():
            yield from cohort.deepest_first()

    def accesses(self, segment: Segment) -> int:
        record = segment.policy_state
        if not isinstance(record, Record):
            record = self._ghosts.get(segment.key)
        return 1 if record is None else max(1, record.accesses)

    def recall(self, key: SegmentKey, accesses: int, hints: Hints, now: float) -> None:
        """Make a ghost of the segment, without a cohort: the model learns nothing from its next access."""
        if key not in self._ghosts:
            now = self._advance(now)
            record = Record(now)
            record.accesses = accesses
            self._add_ghost(key, record, hints, now)

    # -- inside

    def _next(self) -> Cohort:
        """Returns the cohort to evict from next; there must be one."""
        if self._first is None:
            self._first = self._order.peekitem(0)[1]
        return self._first

    def _count_access(self, record: Record, now: float) -> None:
        """Count an access of the segment of `record`. If the record is in a cohort, the access is a re-use, and the
        record leaves the cohort."""
        cohort = record.cohort
        if cohort is not None:
            cohort.used += 1
            cohort.unused -= 1
            record.cohort = None
            if not cohort.unused and cohort.age < AGES - 1:
                self.odds.add(cohort.features, cohort.age, 1.0, cohort.members)
        record.accesses += 1
        record.counted = now
        if now > self._last_moment:
            self._last_moment = now
            self._moments += 1
            if self._moments % LEARN_EVERY == 0:
                self.odds.learn()

    @staticmethod
    def _record(segment: Segment) -> Record:
        """Returns the record of a segment that was inserted before."""
        record = segment.policy_state
        assert isinstance(record, Record)
        return record

    def _cohort(self, segment: Segment) -> Cohort:
        """Returns the cohort of a segment in order."""
        cohort = self._record(segment).cohort
        assert cohort is not None
        return cohort

    def _add_ghost(self, key: SegmentKey, record: Record, hints: Hints, now: float) -> None:
        record.access = hints.access
        for forgotten in self._ghosts.add(key, record, now, self._size):
            self._leave_cohort(forgotten)

    def _advance(self, now: float) -> float:
        """Let cohorts age until the time `now`. Returns the latest time of all calls, because a segment may be inserted
        again with an earlier time."""
        if now > self._now:
            self._now = now
            self._time_passed(now)
        return self._now

    def _enter(self, segment: Segment, record: Record, again: bool = False) -> None:
        """Put the segment in order, in the cohort of the present time; `again`: in its earlier cohort."""
        segment.touched = self._now
        cohort = record.cohort
        if not again or cohort is None:
            if cohort is not None:
                cohort.unused -= 1
            cohort = self._join_cohort(record, segment.hints)
        if not cohort.here:
            self._put(cohort)
        cohort.here[segment] = record
        cohort.order = None
        self._size += 1
        if cohort.priority > 0 and cohort.tier is Tier.HIGH:
            self._high_size += 1
            if self._high_size > self._high_most:
                self._lower_one()

    def _leave(self, segment: Segment) -> Record:
        """Take the segment out of the order. Returns its record, which stays in its cohort."""
        record = segment.policy_state
        assert isinstance(record, Record)
        cohort = record.cohort
        assert cohort is not None
        if cohort.priority > 0 and cohort.tier is Tier.HIGH:
            self._high_size -= 1
        del cohort.here[segment]
        if not cohort.here:
            self._take(cohort)
        self._size -= 1
        return record

    def _put(self, cohort: Cohort) -> None:
        """Put a cohort in order, by its tier and its retention value of now."""
        self._first = None
        ends = cohort.place_at(self._now)
        self._order[cohort.place] = cohort
        if ends < math.inf:
            cohort.changes = ends, cohort.number
            self._changes[cohort.changes] = cohort
        if cohort.tier is Tier.HIGH:
            self._high[cohort.number] = cohort
            self._high_size += len(cohort.here)

    def _take(self, cohort: Cohort) -> None:
        """Take a cohort out of the order."""
        self._first = None
        del self._order[cohort.place]
        if cohort.changes is not None:
            del self._changes[cohort.changes]
            cohort.changes = None
        if cohort.tier is Tier.HIGH:
            del self._high[cohort.number]
            self._high_size -= len(cohort.here)

    def _lower_one(self) -> None:
        """Give normal priority to the deepest of the segments of high priority that were accessed longest ago: their
        prompt keeps its beginning. This counts as no access."""
        segment = self._high.peekitem(0)[1].deepest()
        touched = segment.touched
        record = self._leave(segment)
        cohort = record.cohort
        assert cohort is not None
        self._leave_cohort(record)
        self._join(record, cohort.features, 0, cohort.expires)
        self._enter(segment, record, again=True)
        segment.touched = touched

    def _leave_cohort(self, record: Record) -> None:
        if record.cohort is not None:
            record.cohort.unused -= 1
            record.cohort = None

    def _join_cohort(self, record: Record, hints: Hints) -> Cohort:
        """Let a record join the cohort of the present time for segments with these hints."""
        if hints is not self._hints:
            self._hints = hints
            self._by_accesses.clear()
        # A time to live ends at another time for each access; with a priority segments leave in the order of theirs.
        cohort = None if hints.ttl_s or hints.priority else self._by_accesses.get(record.accesses)
        if cohort is not None:
            cohort.unused += 1
            record.cohort = cohort
            return cohort
        features = self.odds.features(record.accesses, hints)
        expires = self._now + hints.ttl_s if hints.ttl_s else math.inf
        cohort = self._by_accesses[record.accesses] = self._join(record, features, hints.priority, expires)
        return cohort

    def _join(self, record: Record, features: Features, priority: int, expires: float) -> Cohort:
        name = (*features, priority, expires, self._now) if priority or expires < math.inf else features
        cohort = self._newest.get(name)
        if cohort is None:
            self._cohorts += 1
            values = self.odds.retention_value(features)
            cohort = self._newest[name] = Cohort(features, values, self._now, self._cohorts, priority, expires)
            self._ages[0].append(cohort)
            self._next_aging = min(self._next_aging, self._now + EDGES[1])
        cohort.unused += 1
        record.cohort = cohort
        return cohort

    # -- time

    def _time_passed(self, now: float) -> None:
        if now - self._newest_since >= SAME_ACCESS_S:
            self._newest.clear()
            self._by_accesses.clear()
            self._newest_since = now
        if now >= self._next_aging:
            self._age(now)
        while self._changes and self._changes.peekitem(0)[0][0] <= now:
            cohort = self._changes.peekitem(0)[1]
            self._take(cohort)
            self._put(cohort)

    def _age(self, now: float) -> None:
        """Move cohorts that are old enough to their next bucket of age. Update the model of `odds` if it has collected
        many samples."""
        self._next_aging = math.inf
        for age in range(AGES - 1):
            cohorts, edge = self._ages[age], EDGES[age + 1]
            while cohorts and cohorts[0].at + edge <= now:
                self._grow_older(cohorts.popleft(), age + 1)
            if cohorts:
                self._next_aging = min(self._next_aging, cohorts[0].at + edge)
        if self.odds.pending >= LEARN_AT:
            self.odds.learn()

    def _grow_older(self, cohort: Cohort, age: int) -> None:
        if not cohort.unused:
            return
        self.odds.add(cohort.features, age - 1, cohort.used / cohort.members, cohort.members)
        if cohort.here:
            self._take(cohort)
        cohort.age, cohort.used = age, 0
        if age < AGES - 1:
            self._ages[age].append(cohort)
        if cohort.here:
            self._put(cohort)

    def check_integrity(self) -> None:
        """Raises AssertionError when sizes, cohorts or bounds do not add up."""
        assert len(self._ghosts) <= max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        cohorts = list(self._order.values())
        assert [cohort.place for cohort in cohorts] == list(self._order)
        assert self._size == sum(len(cohort.here) for cohort in cohorts)
        for cohort in cohorts:
            assert 0 < len(cohort.here) <= cohort.unused
            assert all(record.cohort is cohort for record in cohort.here.values())
        assert list(self._changes) == sorted(cohort.changes for cohort in cohorts if cohort.changes is not None)
        high = [cohort for cohort in cohorts if cohort.tier is Tier.HIGH]
        assert set(self._high.values()) == set(high)
        assert self._high_size == sum(len(cohort.here) for cohort in high) <= self._high_most


_RULES = {Tier.EXPIRED: "time to live", Tier.LOW: "low priority"}
