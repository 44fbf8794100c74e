"""Forecast of re-use: segments that one request accessed together come again together, or not. A model (`odds.py`)
predicts how soon from the history of the request: how much of its prompt was found, which turn of a conversation it is,
how long ago the turn before was, how often the segments were accessed.

::

    cohort      the segments that one request accessed, with equal features; they age together
    heap        cohorts with segments here, by retention value at their age; within one the deepest segment leaves first
    ghosts      records of segments that were evicted or refused, in that order (`learning.py`)
"""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S
from tokenlake.store.eviction.learning import LearningPolicy, Record
from tokenlake.store.eviction.odds import AGES, EDGES, Features, Odds
from tokenlake.store.segment import Segment

__all__ = ["Forecast"]

LEARN_EVERY = 8
"""Moments of accesses between two updates of the model."""

LEARN_AT = 1024
"""So many samples are learned at once: without accesses there are no such moments, while cohorts still age."""


_depth = operator.attrgetter("depth")


class _Cohort:
    """Segments with equal features that one request accessed."""

    __slots__ = (
        "_order",
        "age",
        "at",
        "features",
        "heap_entry",
        "here",
        "joined",
        "number",
        "prompt",
        "retention_value",
        "unused",
        "used",
    )

    def __init__(self, features: Features, retention_value: list[float], at: float, number: int) -> None:
        self.features = features
        self.retention_value = retention_value
        """By age, as predicted when it was made."""
        self.at = at
        """Time of the access."""
        self.number = number
        """Cohorts are numbered in order of creation."""
        self.age = 0
        """Bucket."""
        self.unused = 0
        """Members that were not used again yet, with their segments here or ghosts."""
        self.used = 0
        """Members that were used again at this age."""
        self.joined = 0
        """All records that ever were members."""
        self.prompt = 0
        """Segments of the prompt with the same history, on all nodes."""
        self.here: dict[Segment, _Record] = {}
        self._order: list[Segment] | None = None
        """Segments here, deepest last, and some that left; None when a segment came since."""
        self.heap_entry = 0
        """Number of the valid entry in the heap; entries with another number are void."""

    def sample_size(self) -> float:
        """Segments for which this cohort is a sample at its age: the segments of the prompt at other nodes have the
        same future, and nodes that see a part each should learn as fast as one that sees all."""
        return (self.used + self.unused) * max(1.0, self.prompt / self.joined)

    def enter(self, segment: Segment, record: _Record) -> None:
        """The segment of a member is here."""
        self.here[segment] = record
        self._order = None

    def deepest(self) -> Segment:
        """The deepest segment here, of which there is at least one. The order in which segments came is no order by
        depth: segments behind a gap are touched before those that fill the gap are stored."""
        if self._order is None:
            self._order = sorted(self.here, key=_depth, reverse=True)
            self._order.reverse()
        while self._order[-1] not in self.here:
            self._order.pop()
        return self._order[-1]


_Record = Record[_Cohort]


class Forecast(LearningPolicy[_Cohort]):
    """Orders cohorts by the predicted rate of accesses."""

    def __init__(self) -> None:
        super().__init__()
        self._odds = Odds()
        self._heap: list[tuple[float, float, int, int, _Cohort]] = []
        """(retention value, time, number, number of the entry, cohort)"""
        self._live = 0
        """Cohorts with segments here."""
        self._ages: list[deque[_Cohort]] = [deque() for _ in range(AGES - 1)]
        self._newest: dict[Features, _Cohort] = {}
        """Cohorts that segments still join: the segments of one request come one by one."""
        self._newest_since = 0.0
        self._cohorts = 0
        """Cohorts made so far."""
        self._next_aging = float("inf")
        """When the next cohort reaches its next age."""

    # -- the order

    def victim(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._advance(now)
        self._drop_void()
        if not self._heap:
            raise KeyError("no segment")
        return self._heap[0][-1].deepest()

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: accesses per second."""
        self._advance(now)
        cohort = self._record(segment).cohort
        assert cohort is not None
        return cohort.retention_value[cohort.age]

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return self._odds.retention_value(self._odds.features(self._accesses_of_new(key), hints))[0]

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """See `EvictionPolicy`."""
        for index in range(len(keys) - 1, -1, -1):
            ghost = self._ghosts.get(keys[index])
            if ghost is not None:
                return index, ghost.access, max(0.0, now - ghost.counted)
        return None

    def __iter__(self) -> Iterator[Segment]:
        # From the root of the heap downwards without a change of the heap: callers look at the first few segments.
        frontier = [(entry, 0) for entry in self._heap[:1]]
        while frontier:
            (*_, number, cohort), at = heapq.heappop(frontier)
            if number == cohort.heap_entry:
                yield from sorted(cohort.here, key=_depth, reverse=True)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))

    def save(self) -> bytes:
        """See `EvictionPolicy`."""
        return self._odds.save()

    def merge(self, learned: bytes) -> None:
        """See `EvictionPolicy`; cohorts that exist keep their values."""
        self._odds.merge(learned)

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        if learned:
            self._odds.restore(learned)

    # -- inside

    def _enter(self, segment: Segment, record: _Record, again: bool = False) -> None:
        """Into a cohort of this moment. `again`: into its old one."""
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

    def _leave(self, segment: Segment) -> _Record:
        """See `LearningPolicy`."""
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
        """Drop void entries from the top of the heap, so that the first one is valid."""
        while self._heap and self._heap[0][3] != self._heap[0][4].heap_entry:
            heapq.heappop(self._heap)

    def _push(self, cohort: _Cohort) -> None:
        cohort.heap_entry += 1
        # Between equals the older cohort first, and of one request the one made first, which has the deeper segments.
        heapq.heappush(
            self._heap, (cohort.retention_value[cohort.age], cohort.at, cohort.number, cohort.heap_entry, cohort)
        )
        if len(self._heap) > 4 * self._live + 256:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].heap_entry]
            heapq.heapify(self._heap)

    def _used_again(self, record: _Record) -> None:
        cohort = record.cohort
        assert cohort is not None
        cohort.used += 1
        self._leave_cohort(record)
        if not cohort.unused and cohort.age < AGES - 1:
            self._odds.add(cohort.features, cohort.age, 1.0, cohort.sample_size())

    def _moment_passed(self) -> None:
        if self._moments % LEARN_EVERY == 0:
            self._odds.learn()

    def _leave_cohort(self, record: _Record) -> None:
        if record.cohort is not None:
            record.cohort.unused -= 1
            record.cohort = None

    def _join_cohort(self, record: _Record, hints: Hints) -> _Cohort:
        features = self._odds.features(record.accesses, hints)
        cohort = self._newest.get(features)
        if cohort is None:
            self._cohorts += 1
            cohort = self._newest[features] = _Cohort(
                features, self._odds.retention_value(features), self._now, self._cohorts
            )
            self._ages[0].append(cohort)
            self._next_aging = min(self._next_aging, self._now + EDGES[1])
        cohort.unused += 1
        cohort.joined += 1
        access = hints.access
        cohort.prompt = max(cohort.prompt, access.segments - access.known if record.accesses == 1 else access.known)
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
        """Move cohorts that are old enough to the next bucket."""
        self._next_aging = float("inf")
        for age in range(AGES - 1):
            cohorts, edge = self._ages[age], EDGES[age + 1]
            while cohorts and cohorts[0].at + edge <= now:
                self._grow_older(cohorts.popleft(), age + 1)
            if cohorts:
                self._next_aging = min(self._next_aging, cohorts[0].at + edge)
        if self._odds.pending >= LEARN_AT:
            self._odds.learn()

    def _grow_older(self, cohort: _Cohort, age: int) -> None:
        if not cohort.unused:
            return
        self._odds.add(cohort.features, age - 1, cohort.used / (cohort.used + cohort.unused), cohort.sample_size())
        cohort.age, cohort.used = age, 0
        if age < AGES - 1:
            self._ages[age].append(cohort)
        if cohort.here:
            self._push(cohort)

    def check_integrity(self) -> None:
        """AssertionError when sizes, cohorts or bounds do not add up."""
        super().check_integrity()
        live = [cohort for *_, number, cohort in self._heap if number == cohort.heap_entry and cohort.here]
        assert len(live) == self._live == len({cohort.number for cohort in live})
        assert self._size == sum(len(cohort.here) for cohort in live)
        for cohort in live:
            assert len(cohort.here) <= cohort.unused
            assert all(record.cohort is cohort for record in cohort.here.values())
