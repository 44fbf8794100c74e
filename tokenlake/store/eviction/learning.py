"""Common parts of the policies that learn: a record of each segment, which outlives the segment as a ghost when
it is evicted or refused, and numbers for the labels of requests. Policies learn from ghosts too, and know a segment
that comes back."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from tokenlake.hints import NO_ACCESS, AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S, EvictionPolicy
from tokenlake.store.segment import PolicyState, Segment

__all__ = [
    "GHOSTS_EACH",
    "GHOST_S",
    "LEAST_GHOSTS",
    "UNLABELLED",
    "Ghosts",
    "Label",
    "Labels",
    "LearningPolicy",
    "Record",
]

GHOST_S = 900.0
"""Seconds for which a ghost is kept."""
LEAST_GHOSTS, GHOSTS_EACH = 1 << 14, 4
"""At most so many ghosts, or so many for each segment in order if that is more."""

Cohort = TypeVar("Cohort")
"""Segments that were accessed together, and age together."""

Label = tuple[int, str, str]
"""(outlook, category, stop reason) of a request; policies keep statistics by label."""
UNLABELLED = 0
"""The number of requests without hints, and of those for whose label there is no room."""
_NO_LABEL: Label = (0, "", "")


class Record(PolicyState, Generic[Cohort]):
    """Knowledge about a segment that is in order, out of order for a while, or a ghost."""

    __slots__ = ("access", "accesses", "cohort", "counted", "gone")

    def __init__(self, now: float) -> None:
        self.accesses = 0
        self.counted = now - SAME_ACCESS_S
        """Time of the last access that was counted."""
        self.gone = 0.0
        """Of a ghost: when it was evicted or refused."""
        self.access: AccessRecord = NO_ACCESS
        """Of a ghost: its last access."""
        self.cohort: Cohort | None = None
        """None after its next access."""


class Ghosts(OrderedDict[SegmentKey, Record[Cohort]]):
    """Records of segments that were evicted or refused, in that order, bounded in number and time."""

    def add(self, key: SegmentKey, record: Record[Cohort], now: float, segments: int) -> list[Record[Cohort]]:
        """Add the ghost of a segment that was evicted or refused now, while `segments` are in order; the records
        that are forgotten instead. Expired ghosts are forgotten a few at a time."""
        record.gone = now
        self[key] = record
        limit = max(LEAST_GHOSTS, GHOSTS_EACH * segments)
        forgotten: list[Record[Cohort]] = []
        while self and (len(self) > limit or (len(forgotten) < 4 and self._oldest().gone + GHOST_S < now)):
            forgotten.append(self.popitem(last=False)[1])
        return forgotten

    def _oldest(self) -> Record[Cohort]:
        return next(iter(self.values()))


class LearningPolicy(EvictionPolicy, Generic[Cohort]):
    """Evicts the segment with the fewest expected accesses per second that it would be kept, and refuses a new one with
    fewer than that. A subclass defines the cohorts, the order, and the model that predicts the accesses."""

    def __init__(self) -> None:
        self._ghosts = Ghosts[Cohort]()
        self._size = 0
        """Segments in order."""
        self._now = 0.0
        self._last_moment = 0.0
        """Time of the last access of any segment."""
        self._moments = 0
        """Different times of accesses."""

    # -- segments

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if isinstance(segment.policy_state, Record):
            self._enter(segment, segment.policy_state, again=True)
            return
        ghost = self._ghosts.pop(segment.key, None)
        record = segment.policy_state = Record(now) if ghost is None else ghost
        self._count_access(record, now)
        self._enter(segment, record)

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now) if now > self._now else self._now
        record = self._leave(segment)
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._enter(segment, record)

    def hints_changed(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`. The request that sent the hints used the segment until now."""
        self._advance(now)
        self._enter(segment, self._leave(segment))

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`. The record stays in its cohort, so that an access after the return is learned at its
        age."""
        now = self._advance(now)
        record = self._leave(segment)
        if evicted:
            self._add_ghost(segment.key, record, segment.hints, now)

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if not self._size or self.retention_value_of_new(key, hints, now) >= self.retention_value(
            self.victim(now), now
        ):
            return True
        ghost = self._ghosts.pop(key, None)
        record = Record[Cohort](now) if ghost is None else ghost
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._leave_cohort(record)
        self._join_cohort(record, hints)
        self._add_ghost(key, record, hints, now)
        return False

    def __len__(self) -> int:
        return self._size

    # -- inside

    def _count_access(self, record: Record[Cohort], now: float) -> None:
        """An access, which is a re-use if the record is in a cohort; the record leaves that."""
        if record.cohort is not None:
            self._used_again(record)
        record.accesses += 1
        record.counted = now
        if now > self._last_moment:
            self._last_moment = now
            self._moments += 1
            self._moment_passed()

    @staticmethod
    def _record(segment: Segment) -> Record[Cohort]:
        """The record of a segment that was inserted."""
        record = segment.policy_state
        assert isinstance(record, Record)
        return record

    def _accesses_of_new(self, key: SegmentKey) -> int:
        ghost = self._ghosts.get(key)
        return ghost.accesses + 1 if ghost is not None else 1

    def _add_ghost(self, key: SegmentKey, record: Record[Cohort], hints: Hints, now: float) -> None:
        record.access = hints.access
        for forgotten in self._ghosts.add(key, record, now, self._size):
            self._leave_cohort(forgotten)

    def _advance(self, now: float) -> float:
        """Pass the time until `now`. The latest time of all calls: a segment may be inserted again with an earlier
        one."""
        if now > self._now:
            self._now = now
            self._time_passed(now)
        return self._now

    @abstractmethod
    def _enter(self, segment: Segment, record: Record[Cohort], again: bool = False) -> None:
        """Add the segment to the order as accessed now. `again`: with the age that its record has."""

    @abstractmethod
    def _leave(self, segment: Segment) -> Record[Cohort]:
        """Take the segment out of the order; its record, which stays in its cohort."""

    @abstractmethod
    def _join_cohort(self, record: Record[Cohort], hints: Hints) -> Cohort:
        """Add the record to the cohort of segments that a request with these hints accesses now; that cohort."""

    @abstractmethod
    def _leave_cohort(self, record: Record[Cohort]) -> None:
        """Take the record out of its cohort, if it is in one."""

    @abstractmethod
    def _used_again(self, record: Record[Cohort]) -> None:
        """Learn from a re-use; the record leaves its cohort."""

    @abstractmethod
    def _moment_passed(self) -> None:
        """A segment was accessed later than any before."""

    @abstractmethod
    def _time_passed(self, now: float) -> None:
        """Move cohorts that are old enough to the next bucket of age."""

    def check_integrity(self) -> None:
        """AssertionError when there are more ghosts than the bound, or ghosts without a cohort."""
        assert len(self._ghosts) <= max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        assert all(record.cohort is not None for record in self._ghosts.values())


class Labels:
    """Numbers for the labels of requests, in the order in which they first came. At most `most`; two places are kept
    for the bare outlooks, so that a category without room still counts by its outlook."""

    def __init__(self, most: int, labels: Sequence[Label] = (_NO_LABEL,)) -> None:
        """`labels`: as another instance gave them. ValueError when they cannot be so."""
        self._most = most
        self._numbers = dict(zip(labels, range(len(labels)), strict=True))
        if len(labels) > most or self._numbers.get(_NO_LABEL) != UNLABELLED:
            raise ValueError(f"statistics of re-use with {len(labels)} labels, which begin with {labels[:1]}")
        if len(self._numbers) < len(labels):
            raise ValueError("statistics of re-use with a label twice")
        for label in labels:
            Hints(*label)

    def number(self, hints: Hints) -> int:
        """The number of a request with these hints, which is new if there is room for its label."""
        label = (hints.outlook, hints.category, hints.stop_reason)
        number = self._numbers.get(label)
        if number is None:
            named = bool(hints.category or hints.stop_reason)
            if len(self._numbers) >= self._most - 2 * named:
                return self.number(Hints(hints.outlook)) if named else UNLABELLED
            number = self._numbers[label] = len(self._numbers)
        return number

    def matched(self, others: Labels) -> list[tuple[int, int]]:
        """(number in this table, number in `others`) of each label of `others`. A label that this table does not have
        yet is added while the table has room, and left out otherwise."""
        for label in others:
            self.number(Hints(*label))
        return [(self._numbers[label], there) for there, label in enumerate(others) if label in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Label]:
        """In order of their numbers."""
        return iter(self._numbers)
