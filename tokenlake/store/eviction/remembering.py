"""What the policies that learn have in common: a record of each segment, which lives on for a while when the segment is
evicted or refused, so that they learn also from what they did not keep, and know it when it comes again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic, TypeVar

from tokenlake.hints import NO_ACCESS, AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S
from tokenlake.store.segment import Segment

__all__ = ["GHOSTS_EACH", "GHOST_S", "LEAST_GHOSTS", "Record", "Remembering"]

GHOST_S = 900.0
"""How long a segment is remembered after it went."""
LEAST_GHOSTS, GHOSTS_EACH = 1 << 14, 4
"""At most so many are remembered, or so many for each segment in order if that is more."""

Group = TypeVar("Group")
"""What was used together, and ages together."""


class Record(Generic[Group]):
    """What is known of a segment: in order, set aside, or gone."""

    __slots__ = ("access", "accesses", "counted", "gone", "group")

    def __init__(self, now: float) -> None:
        self.accesses = 0
        self.counted = now - SAME_ACCESS_S
        """When its last use was."""
        self.gone = 0.0
        """When it was evicted or refused."""
        self.access: AccessRecord = NO_ACCESS
        """Of what is gone: how it was used last."""
        self.group: Group | None = None


class Remembering(ABC, Generic[Group]):
    """Evicts what earns the fewest uses for the time that it will be held; a newcomer that would earn fewer than that
    stays out. Who derives from it has groups, their order, and what is learned."""

    def __init__(self) -> None:
        self._ghosts: OrderedDict[SegmentKey, Record[Group]] = OrderedDict()
        """In order of their going."""
        self._size = 0
        self._now = 0.0
        self._moment = 0.0
        """When something was used last."""
        self._moments = 0

    # -- segments

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if isinstance(segment.record, Record):
            self._enter(segment, segment.record, again=True)
            return
        ghost = self._ghosts.pop(segment.key, None)
        record = segment.record = Record(now) if ghost is None else ghost
        self._count_access(record, now)
        self._enter(segment, record)

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now) if now > self._now else self._now
        record = self._leave(segment)
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._enter(segment, record)

    def hinted(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`; whoever speaks of it had it in use until now."""
        self._advance(now)
        self._enter(segment, self._leave(segment))

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        # It ages on: whether it is used again while it is away, and after how long, is to be learned in any case.
        record = self._leave(segment)
        if evicted:
            self._remember(segment.key, record, segment.hints, now)

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if not self._size or self.retention_value_of_new(key, hints, now) >= self.retention_value(
            self.coldest(now), now
        ):
            return True
        ghost = self._ghosts.pop(key, None)
        record = Record[Group](now) if ghost is None else ghost
        if now - record.counted >= SAME_ACCESS_S:
            self._count_access(record, now)
        self._leave_group(record)
        self._join_group(record, hints)
        self._remember(key, record, hints, now)
        return False

    def __len__(self) -> int:
        return self._size

    @abstractmethod
    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""

    @abstractmethod
    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: uses per second."""

    @abstractmethod
    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""

    # -- inside

    def _count_access(self, record: Record[Group], now: float) -> None:
        """A use of it, which is a re-use if it ages in some group; not any more."""
        if record.group is not None:
            self._used_again(record)
        record.accesses += 1
        record.counted = now
        if now > self._moment:
            self._moment = now
            self._moments += 1
            self._used_something()

    @staticmethod
    def _record(segment: Segment) -> Record[Group]:
        """Of a segment that was inserted."""
        record = segment.record
        assert isinstance(record, Record)
        return record

    def _accesses_of_new(self, key: SegmentKey) -> int:
        ghost = self._ghosts.get(key)
        return ghost.accesses + 1 if ghost is not None else 1

    def _remember(self, key: SegmentKey, record: Record[Group], hints: Hints, now: float) -> None:
        record.gone, record.access = now, hints.access
        self._ghosts[key] = record
        limit = max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        forgotten = 0
        while self._ghosts and (len(self._ghosts) > limit or (forgotten < 4 and self._oldest_gone(now))):
            _, ghost = self._ghosts.popitem(last=False)
            self._leave_group(ghost)
            forgotten += 1

    def _oldest_gone(self, now: float) -> bool:
        return next(iter(self._ghosts.values())).gone + GHOST_S < now

    def _advance(self, now: float) -> float:
        """Up to `now`, or up to the latest time heard of: what comes back from a pin comes with an earlier one."""
        if now > self._now:
            self._now = now
            self._time_passed(now)
        return self._now

    @abstractmethod
    def _enter(self, segment: Segment, record: Record[Group], again: bool = False) -> None:
        """Into order, as used now. `again`: as it was."""

    @abstractmethod
    def _leave(self, segment: Segment) -> Record[Group]:
        """Out of order; it ages on in its group."""

    @abstractmethod
    def _join_group(self, record: Record[Group], hints: Hints) -> Group:
        """That of what is used now, by a request with this hints; returns it."""

    @abstractmethod
    def _leave_group(self, record: Record[Group]) -> None:
        """If it is in one."""

    @abstractmethod
    def _used_again(self, record: Record[Group]) -> None:
        """To be learned from; it leaves its group."""

    @abstractmethod
    def _used_something(self) -> None:
        """Something was used at a new moment."""

    @abstractmethod
    def _time_passed(self, now: float) -> None:
        """Groups come of age."""

    def check_integrity(self) -> None:
        """AssertionError when more is remembered than may be."""
        assert len(self._ghosts) <= max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
