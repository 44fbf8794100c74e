"""The learned policy, which forecasts re-use. The segments that one request accessed together mostly are accessed again
together, or not at all. A model (`odds.py`) predicts how soon from the history of the request: how much of its prompt
was found, which turn of a conversation it is, how long ago the turn before was, how often the segments were accessed.

::

    heap        cohorts with segments here, by retention value at their age; within one the deepest segment leaves first
    ghosts      records of segments that were evicted or refused (`records.py`): the model learns from them too, and
                knows a segment that comes back
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction.base import SAME_ACCESS_S, EvictionPolicy
from tokenlake.memory.eviction.odds import AGES, EDGES, Features, Odds
from tokenlake.memory.eviction.records import GHOSTS_EACH, LEAST_GHOSTS, Cohort, Ghosts, Record
from tokenlake.memory.segment import Segment

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
        self._odds = Odds()
        self._heap: list[tuple[float, float, int, int, Cohort]] = []
        """Heap of cohorts, the one to evict from next first: (retention value, time of its access, number of the
        cohort, number of the heap entry, cohort)."""
        self._live = 0
        """Number of cohorts with stored segments."""
        self._ages: list[deque[Cohort]] = [deque() for _ in range(AGES - 1)]
        self._newest: dict[Features, Cohort] = {}
        """Cohorts that further segments of the same request still join, by their features: the segments of a request
        come one by one."""
        self._newest_since = 0.0
        self._cohorts = 0
        """Number of cohorts made so far."""
        self._next_aging = float("inf")
        """Time in seconds at which the next cohort reaches its next bucket of age."""

    # -- segments

    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the order: at its first insert to the cohort of the present time, otherwise to its earlier
        cohort. See `EvictionPolicy`."""
        now = self._advance(now)
        if isinstance(segment.policy_state, Record):
            self._enter(segment, segment.policy_state, again=True)
            return
        ghost = self._ghosts.pop(segment.key, None)
        record = segment.policy_state = Record(now) if ghost is None else ghost
        self._count_access(record, now)
        self._enter(segment, record)

    def touch(self, segment: Segment, now: float) -> None:
        """Record an access: `segment` joins the cohort of the present time; see `EvictionPolicy`."""
        now = self._advance(now) if now > self._now else self._now
        record = self._leave(segment)
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._enter(segment, record)

    def follow(self, segment: Segment, child: Segment) -> bool:
        """Move `segment` to the cohort of `child`, in which the deeper one leaves first; see `EvictionPolicy`."""
        cohort = self._record(child).cohort
        record = self._record(segment)
        if cohort is None or cohort is record.cohort:
            return False
        self._leave(segment)
        self._leave_cohort(record)
        cohort.unused += 1
        record.cohort = cohort
        self._enter(segment, record, again=True)
        return True

    def hints_changed(self, segment: Segment, now: float) -> None:
        """Move `segment` to a new cohort when its hints change, because the request that sent the hints used the
        segment until now; see `EvictionPolicy`."""
        self._advance(now)
        self._enter(segment, self._leave(segment))

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Take `segment` out of the order. Its record stays in its cohort, so that the model learns from an access
        after the segment has come back. See `EvictionPolicy`."""
        now = self._advance(now)
        record = self._leave(segment)
        if evicted:
            self._add_ghost(segment.key, record, segment.hints, now)

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Returns True if the retention value of a new segment is at least that of the segment that would be evicted
        for it; otherwise the refusal is recorded like an access. See `EvictionPolicy`."""
        now = self._advance(now)
        if not self._size or self.retention_value_of_new(key, hints, now) >= self.retention_value(
            self.victim(now), now
        ):
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
        """Returns the deepest segment of the cohort with the least retention value; see `EvictionPolicy`."""
        self._advance(now)
        self._drop_void()
        if not self._heap:
            raise KeyError("no segment")
        return self._heap[0][-1].deepest()

    def retention_value(self, segment: Segment, now: float) -> float:
        """Returns the predicted accesses of `segment` per second; see `EvictionPolicy`."""
        self._advance(now)
        cohort = self._record(segment).cohort
        assert cohort is not None
        return cohort.retention_value[cohort.age]

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Returns the predicted accesses per second of a segment that would be stored now; see `EvictionPolicy`."""
        return self._odds.retention_value(self._odds.features(self._accesses_of_new(key), hints))[0]

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, last access record, seconds since then) of the last of `keys` that has a ghost, the record of
        an evicted or refused segment; see `EvictionPolicy`."""
        for index in range(len(keys) - 1, -1, -1):
            ghost = self._ghosts.get(keys[index])
            if ghost is not None:
                return index, ghost.access, max(0.0, now - ghost.counted)
        return None

    def __iter__(self) -> Iterator[Segment]:
        # The heap is read from its root downwards and not changed, because callers look only at the first few segments.
        frontier = [(entry, 0) for entry in self._heap[:1]]
        while frontier:
            (*_, number, cohort), at = heapq.heappop(frontier)
            if number == cohort.heap_entry:
                yield from cohort.deepest_first()
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))

    @property
    def odds(self) -> Odds:
        """The model; see `EvictionPolicy`."""
        return self._odds

    def accesses(self, segment: Segment) -> int:
        """Returns the counted accesses of a segment; see `EvictionPolicy`."""
        record = segment.policy_state
        if not isinstance(record, Record):
            record = self._ghosts.get(segment.key)
        return 1 if record is None else max(1, record.accesses)

    def recall(self, key: SegmentKey, accesses: int, hints: Hints, now: float) -> None:
        """Make a ghost of the segment, without a cohort: the model learns nothing from its next access. See
        `EvictionPolicy`."""
        if key not in self._ghosts:
            now = self._advance(now)
            record = Record(now)
            record.accesses = accesses
            self._add_ghost(key, record, hints, now)

    def save(self) -> bytes:
        """Returns the statistics of the model, encoded; see `EvictionPolicy`."""
        return self._odds.save()

    def exchange_among(self, nodes: int) -> None:
        """Set the number of nodes that merge each other's statistics, this one included; see `EvictionPolicy`."""
        self._odds.nodes = nodes

    def merge(self, learned: bytes) -> None:
        """Take over half of the difference to the statistics of another node; cohorts that exist keep their values. See
        `EvictionPolicy`."""
        self._odds.merge(learned)

    def restore(self, learned: bytes) -> None:
        """Begin with saved statistics; see `EvictionPolicy`."""
        if learned:
            self._odds.restore(learned)

    # -- inside

    def _count_access(self, record: Record, now: float) -> None:
        """Count an access of the segment of `record`. If the record is in a cohort, the access is a re-use, and the
        record leaves the cohort."""
        if record.cohort is not None:
            self._used_again(record)
        record.accesses += 1
        record.counted = now
        if now > self._last_moment:
            self._last_moment = now
            self._moments += 1
            if self._moments % LEARN_EVERY == 0:
                self._odds.learn()

    @staticmethod
    def _record(segment: Segment) -> Record:
        """Returns the record of a segment that was inserted before."""
        record = segment.policy_state
        assert isinstance(record, Record)
        return record

    def _accesses_of_new(self, key: SegmentKey) -> int:
        ghost = self._ghosts.get(key)
        return ghost.accesses + 1 if ghost is not None else 1

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
                self._leave_cohort(record)
            cohort = self._join_cohort(record, segment.hints)
        if not cohort.here:
            self._live += 1
            self._push(cohort)
        cohort.enter(segment, record)
        self._size += 1

    def _leave(self, segment: Segment) -> Record:
        """Take the segment out of the order. Returns its record, which stays in its cohort."""
        record = self._record(segment)
        cohort = record.cohort
        assert cohort is not None
        del cohort.here[segment]
        if not cohort.here:
            self._live -= 1
            cohort.heap_entry += 1
        self._size -= 1
        return record

    def _drop_void(self) -> None:
        """Drop void entries (of a cohort that has a newer entry) from the top of the heap, so that the first entry is
        valid."""
        while self._heap and self._heap[0][3] != self._heap[0][4].heap_entry:
            heapq.heappop(self._heap)

    def _push(self, cohort: Cohort) -> None:
        cohort.heap_entry += 1
        # Of cohorts with equal value the older one is evicted first, and of one request's cohorts the one made first,
        # which has the deeper segments.
        heapq.heappush(
            self._heap, (cohort.retention_value[cohort.age], cohort.at, cohort.number, cohort.heap_entry, cohort)
        )
        if len(self._heap) > 4 * self._live + 256:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].heap_entry]
            heapq.heapify(self._heap)

    def _used_again(self, record: Record) -> None:
        cohort = record.cohort
        assert cohort is not None
        cohort.used += 1
        self._leave_cohort(record)
        if not cohort.unused and cohort.age < AGES - 1:
            self._odds.add(cohort.features, cohort.age, 1.0, cohort.members)

    def _leave_cohort(self, record: Record) -> None:
        if record.cohort is not None:
            record.cohort.unused -= 1
            record.cohort = None

    def _join_cohort(self, record: Record, hints: Hints) -> Cohort:
        features = self._odds.features(record.accesses, hints)
        cohort = self._newest.get(features)
        if cohort is None:
            self._cohorts += 1
            cohort = self._newest[features] = Cohort(
                features, self._odds.retention_value(features), self._now, self._cohorts
            )
            self._ages[0].append(cohort)
            self._next_aging = min(self._next_aging, self._now + EDGES[1])
        cohort.unused += 1
        record.cohort = cohort
        return cohort

    # -- time

    def _time_passed(self, now: float) -> None:
        if now - self._newest_since >= SAME_ACCESS_S:
            self._newest.clear()
            self._newest_since = now
        if now >= self._next_aging:
            self._age(now)

    def _age(self, now: float) -> None:
        """Move cohorts that are old enough to their next bucket of age. Update the model of `odds` if it has collected
        many samples."""
        self._next_aging = float("inf")
        for age in range(AGES - 1):
            cohorts, edge = self._ages[age], EDGES[age + 1]
            while cohorts and cohorts[0].at + edge <= now:
                self._grow_older(cohorts.popleft(), age + 1)
            if cohorts:
                self._next_aging = min(self._next_aging, cohorts[0].at + edge)
        if self._odds.pending >= LEARN_AT:
            self._odds.learn()

    def _grow_older(self, cohort: Cohort, age: int) -> None:
        if not cohort.unused:
            return
        self._odds.add(cohort.features, age - 1, cohort.used / cohort.members, cohort.members)
        cohort.age, cohort.used = age, 0
        if age < AGES - 1:
            self._ages[age].append(cohort)
        if cohort.here:
            self._push(cohort)

    def check_integrity(self) -> None:
        """Raises AssertionError when sizes, cohorts or bounds do not add up."""
        assert len(self._ghosts) <= max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        live = [cohort for *_, number, cohort in self._heap if number == cohort.heap_entry and cohort.here]
        assert len(live) == self._live == len({cohort.number for cohort in live})
        assert self._size == sum(len(cohort.here) for cohort in live)
        for cohort in live:
            assert len(cohort.here) <= cohort.unused
            assert all(record.cohort is cohort for record in cohort.here.values())
