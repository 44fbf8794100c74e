"""The learned re-use index: the policy counts after how long segments were used again, and values each segment by the
counts of its class and age (`hazard.py`).

::

    queues      one per class, by last access: [oldest ... youngest]; the victim is the oldest of some class
    cohorts     segments of one class accessed at one moment; a queue of cohorts for each bucket of age but the last
    ghosts      records of segments that were evicted or refused (`learning.py`)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.hazard import ACCESSES, AGES, EDGES, UNLABELLED, Hazards
from tokenlake.store.eviction.learning import LearningPolicy, Record
from tokenlake.store.segment import Segment

__all__ = ["LearnedReuse"]

LEARN_EVERY = 50
"""Moments of accesses between two updates of the tables."""
MOMENT_S = 0.1
"""Accesses within this time join one cohort: the segments of a prompt arrive one by one."""
LATE_S = 0.25
"""A cohort may reach its next age so much too late: most of the work is the search for those that do."""


class _Cohort:
    """Records of one class, last accessed at one moment."""

    __slots__ = ("age", "at", "cls", "members", "size")

    def __init__(self, cls: int, at: float) -> None:
        self.cls = cls
        self.at = at
        self.age = 0
        """Bucket."""
        self.size = 0
        """Records that joined."""
        self.members = 0
        """Records that joined and did not leave."""

    def weight(self) -> float:
        """Weight of a member in the statistics. All members together weigh size^0.5, because segments of one prompt are
        correlated."""
        return float(self.size**-0.5)


_Record = Record[_Cohort]


class _Queue:
    """Segments of one class, and the value of the first of them."""

    __slots__ = ("accesses", "head", "order", "retention_value")

    def __init__(self, accesses: int) -> None:
        self.accesses = accesses
        """Bucket."""
        self.order: OrderedDict[Segment, _Record] = OrderedDict()
        self.head: Segment | None = None
        """The first segment, of which `retention_value` is; None when another may have become the first or its value
        may have changed."""
        self.retention_value = 0.0


class LearnedReuse(LearningPolicy[_Cohort]):
    """The default policy."""

    def __init__(self) -> None:
        super().__init__()
        self._hazards = Hazards()
        self._queues: list[_Queue] = []
        self._ages: list[deque[_Cohort]] = [deque() for _ in range(AGES - 1)]
        self._newest: list[_Cohort | None] = []
        """The newest cohort by class."""
        self._next_aging = float("inf")
        """When the next cohort reaches its next age."""
        self._hints, self._label = NO_HINTS, UNLABELLED
        """The hints that were looked up last, and their label."""
        self._grow()

    # -- the order

    def victim(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._advance(now)
        first: _Queue | None = None
        for queue in self._queues:
            if not queue.order:
                continue
            if queue.head is None:
                self._update_head(queue)
            # Between equals the class with fewer accesses: a child is in the class of its parent, where it
            # is older, or in one with fewer accesses.
            if first is None or (queue.retention_value, queue.accesses) < (first.retention_value, first.accesses):
                first = queue
        if first is None or first.head is None:
            raise KeyError("no segment")
        return first.head

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: accesses per second."""
        self._advance(now)
        return self._retention_value_of(self._record(segment))

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return self._hazards.retention_value[self._class_of(self._accesses_of_new(key), hints)][0]

    def __iter__(self) -> Iterator[Segment]:
        for queue in sorted((queue for queue in self._queues if queue.order), key=self._first_value):
            yield from queue.order

    def save(self) -> bytes:
        """See `EvictionPolicy`."""
        return self._hazards.save()

    def merge(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        self._hazards.merge(learned)
        self._grow()
        self._forget_heads()

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        if learned:
            self._hazards.restore(learned)
            self._grow()

    # -- inside

    def _class_of(self, accesses: int, hints: Hints) -> int:
        if hints is not self._hints:
            # Most calls are for segments of one prompt, with the same hints.
            self._hints, self._label = hints, self._hazards.label(hints)
            self._grow()
        return self._hazards.class_of(accesses, self._label)

    def _grow(self) -> None:
        """Add queues for new labels."""
        while len(self._queues) < len(self._hazards.retention_value):
            self._queues.append(_Queue(len(self._queues) % ACCESSES))
            self._newest.append(None)

    def _enter(self, segment: Segment, record: _Record, again: bool = False) -> None:
        """To the young end of the queue of its class. `again`: in its old cohort, if the class is still the same."""
        segment.touched = self._now
        cohort = record.cohort
        if not again or cohort is None or cohort.cls != self._class_of(record.accesses, segment.hints):
            self._leave_cohort(record)
            cohort = self._join_cohort(record, segment.hints)
        queue = self._queues[cohort.cls]
        if not queue.order:
            queue.head = None
        queue.order[segment] = record
        self._size += 1

    def _leave(self, segment: Segment) -> _Record:
        """See `LearningPolicy`."""
        record = self._record(segment)
        assert record.cohort is not None
        queue = self._queues[record.cohort.cls]
        del queue.order[segment]
        if queue.head is segment:
            queue.head = None
        self._size -= 1
        return record

    def _used_again(self, record: _Record) -> None:
        cohort = record.cohort
        assert cohort is not None
        self._hazards.count_used(cohort.cls, cohort.age, cohort.weight())
        cohort.members -= 1
        record.cohort = None

    def _moment_passed(self) -> None:
        if self._moments % LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        self._hazards.learn()
        self._forget_heads()

    def _forget_heads(self) -> None:
        """The tables changed, and with them the values of all heads."""
        for queue in self._queues:
            queue.head = None

    def _leave_cohort(self, record: _Record) -> None:
        if record.cohort is not None:
            record.cohort.members -= 1
            record.cohort = None

    def _join_cohort(self, record: _Record, hints: Hints) -> _Cohort:
        cls = self._class_of(record.accesses, hints)
        cohort = self._newest[cls]
        if cohort is None or self._now >= cohort.at + MOMENT_S:
            cohort = self._newest[cls] = _Cohort(cls, self._now)
            self._ages[0].append(cohort)
            self._next_aging = min(self._next_aging, self._now + EDGES[1])
        cohort.size += 1
        cohort.members += 1
        record.cohort = cohort
        return cohort

    def _update_head(self, queue: _Queue) -> None:
        queue.head, record = next(iter(queue.order.items()))
        queue.retention_value = self._retention_value_of(record)

    def _first_value(self, queue: _Queue) -> float:
        return self._retention_value_of(next(iter(queue.order.values())))

    def _retention_value_of(self, record: _Record) -> float:
        assert record.cohort is not None
        return self._hazards.retention_value[record.cohort.cls][record.cohort.age]

    # -- time

    def _time_passed(self, now: float) -> None:
        if now >= self._next_aging:
            self._age(now)

    def _age(self, now: float) -> None:
        """Move cohorts that are old enough to the next bucket."""
        self._next_aging = float("inf")
        for age in range(AGES - 1):
            cohorts, edge = self._ages[age], EDGES[age + 1]
            while cohorts and cohorts[0].at + edge <= now:
                cohort = cohorts.popleft()
                if cohort.members:
                    self._hazards.count_unused(cohort.cls, age, cohort.members * cohort.weight())
                    cohort.age = age + 1
                    if cohort.age < AGES - 1:
                        self._ages[cohort.age].append(cohort)
                    self._queues[cohort.cls].head = None
            if cohorts:
                self._next_aging = min(self._next_aging, cohorts[0].at + edge)
        self._next_aging = max(self._next_aging, now + LATE_S)

    def check_integrity(self) -> None:
        """AssertionError when sizes, cohorts or bounds do not add up."""
        assert self._size == sum(len(queue.order) for queue in self._queues)
        super().check_integrity()
        records = [record for queue in self._queues for record in queue.order.values()]
        records += self._ghosts.values()
        members: dict[_Cohort, int] = {}
        for record in records:
            assert record.cohort is not None
            members[record.cohort] = members.get(record.cohort, 0) + 1
        cohorts = [cohort for queue in self._ages for cohort in queue]
        # Records of segments that are out of order for a while are in a cohort too.
        assert all(count <= cohort.members for cohort, count in members.items())
        assert len(cohorts) == len(dict.fromkeys(cohorts))
        assert all(cohort.age == AGES - 1 or cohort in cohorts for cohort in members)
