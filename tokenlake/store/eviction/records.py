"""Records of the segments that a policy orders, and of those that left it.

::

    record      knowledge about one segment; it outlives the segment as a ghost when that is evicted or refused
    cohort      the records of segments that one request accessed, with equal features; they age together
    ghosts      the records of segments that were evicted or refused, in that order
"""

from __future__ import annotations

import operator
from collections import OrderedDict

from tokenlake.hints import NO_ACCESS, AccessRecord
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S
from tokenlake.store.eviction.odds import Features
from tokenlake.store.segment import PolicyState, Segment

__all__ = ["GHOSTS_EACH", "GHOST_S", "LEAST_GHOSTS", "Cohort", "Ghosts", "Record"]

GHOST_S = 900.0
"""Seconds for which a ghost is kept."""
LEAST_GHOSTS, GHOSTS_EACH = 1 << 14, 4
"""At most so many ghosts, or so many for each segment in order if that is more."""

_depth = operator.attrgetter("depth")


class Cohort:
    """Segments with equal features that one request accessed."""

    __slots__ = (
        "_order",
        "age",
        "at",
        "features",
        "heap_entry",
        "here",
        "number",
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
        self.here: dict[Segment, Record] = {}
        self._order: list[Segment] | None = None
        """Segments here, deepest last, and some that left; None when a segment came since."""
        self.heap_entry = 0
        """Number of the valid entry in the heap; entries with another number are void."""

    @property
    def members(self) -> int:
        """Members at the beginning of this age."""
        return self.used + self.unused

    def enter(self, segment: Segment, record: Record) -> None:
        """The segment of a member is here."""
        self.here[segment] = record
        self._order = None

    def deepest_first(self) -> list[Segment]:
        """The segments here."""
        return sorted(self.here, key=_depth, reverse=True)

    def deepest(self) -> Segment:
        """The deepest segment here, of which there is at least one. The order in which segments came is no order by
        depth: segments behind a gap are touched before those that fill the gap are stored."""
        if self._order is None:
            # Of equal depth the one that came first is evicted first.
            self._order = self.deepest_first()
            self._order.reverse()
        while self._order[-1] not in self.here:
            self._order.pop()
        return self._order[-1]


class Record(PolicyState):
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


class Ghosts(OrderedDict[SegmentKey, Record]):
    """Records of segments that were evicted or refused, in that order, bounded in number and time."""

    def add(self, key: SegmentKey, record: Record, now: float, segments: int) -> list[Record]:
        """Add the ghost of a segment that was evicted or refused now, while `segments` are in order; the records
        that are forgotten instead. Expired ghosts are forgotten a few at a time."""
        record.gone = now
        self[key] = record
        limit = max(LEAST_GHOSTS, GHOSTS_EACH * segments)
        forgotten: list[Record] = []
        while self and (len(self) > limit or (len(forgotten) < 4 and self._oldest().gone + GHOST_S < now)):
            forgotten.append(self.popitem(last=False)[1])
        return forgotten

    def _oldest(self) -> Record:
        return next(iter(self.values()))
