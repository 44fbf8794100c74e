"""Records of the segments that the learning eviction policy orders, and of segments that left its order.

::

    record      knowledge about one segment; it outlives the segment as a ghost when that is evicted or refused
    cohort      the records of segments that one request accessed and whose features are equal; they age together
    ghosts      the records of segments that were evicted or refused, in the order in which that happened
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from enum import IntEnum

from tokenlake.hints import NO_ACCESS, AccessRecord
from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction.base import SAME_ACCESS_S
from tokenlake.memory.eviction.odds import Features
from tokenlake.memory.segment import PolicyState, Segment

GHOST_S = 900.0
"""Seconds for which the record of an evicted or refused segment (its ghost) is kept."""
LEAST_GHOSTS, GHOSTS_EACH = 1 << 14, 4
"""Limits on the number of ghosts (records of evicted or refused segments): in all, or for each segment in order; the
greater limit counts."""

HIGH_S = 3600.0
"""Seconds without an access after which a segment of high priority gets normal priority."""

_depth = operator.attrgetter("depth")


class Tier(IntEnum):
    """What comes before the retention value in the order of eviction. No tier keeps a segment for ever: victims come
    from the first one that is not empty."""

    EXPIRED = 0
    """The time to live has passed since the last access."""
    LOW = 1
    NORMAL = 2
    HIGH = 3


class Cohort:
    """The segments with equal features (inputs of the model of re-use) that one request accessed. They age together."""

    __slots__ = (
        "age",
        "at",
        "changes",
        "expires",
        "features",
        "here",
        "number",
        "order",
        "place",
        "priority",
        "retention_value",
        "tier",
        "unused",
        "used",
    )

    def __init__(
        self,
        features: Features,
        retention_value: list[float],
        at: float,
        number: int,
        priority: int = 0,
        expires: float = math.inf,
    ) -> None:
        self.features = features
        self.retention_value = retention_value
        """Retention value of the segments for each age (index of a bucket of `EDGES`), predicted when the cohort was
        made."""
        self.at = at
        """Time in seconds at which the request accessed the segments."""
        self.number = number
        """Number of the cohort, in order of creation."""
        self.priority = priority
        """Priority of its segments: that of their hints, or 0 for those beyond the limit of high priority."""
        self.expires = expires
        """Time in seconds at which their time to live passes; infinite without one."""
        self.tier = Tier.NORMAL
        self.place: tuple[Tier, float, float, int] = (self.tier, 0.0, at, number)
        """Its place in the order of eviction; it has one while it has segments here. Of cohorts with equal value the
        older one is evicted first, and of one request's cohorts the one made first, which has the deeper segments."""
        self.changes: tuple[float, int] | None = None
        """When it gets another tier, while it is in order; None if it gets none."""
        self.age = 0
        """Age of the cohort: index of the bucket of `EDGES` into which the time since the access falls."""
        self.unused = 0
        """Number of segments of the cohort that were not accessed again yet, whether they are stored or evicted."""
        self.used = 0
        """Number of segments of the cohort that were accessed again within the present bucket of age."""
        self.here: dict[Segment, Record] = {}
        self.order: list[Segment] | None = None
        """The cohort's stored segments, the deepest last, and some that have left since; None when it has to be sorted
        again because a segment was added."""

    @property
    def members(self) -> int:
        """Number of segments of the cohort that were not accessed again before the present bucket of age."""
        return self.used + self.unused

    @property
    def value(self) -> float:
        """The retention value of its segments now: for high priority that of new ones, before the tier NORMAL none."""
        return self.place[1]

    def place_at(self, now: float) -> float:
        """Set tier and place as they are at `now`. Returns the time in seconds at which the tier changes, or
        infinity."""
        high_until = self.at + HIGH_S if self.priority > 0 else self.at
        if self.expires <= now:
            self.tier, value, ends = Tier.EXPIRED, 0.0, math.inf
        elif self.priority < 0:
            self.tier, value, ends = Tier.LOW, 0.0, self.expires
        elif now < high_until:
            self.tier, value, ends = Tier.HIGH, self.retention_value[0], min(high_until, self.expires)
        else:
            self.tier, value, ends = Tier.NORMAL, self.retention_value[self.age], self.expires
        self.place = self.tier, value, self.at, self.number
        return ends

    def deepest_first(self) -> list[Segment]:
        """Returns the stored segments of the cohort (segments that one request accessed), in descending order of depth,
        which is the position in the prompt."""
        return sorted(self.here, key=_depth, reverse=True)

    def deepest(self) -> Segment:
        """Returns the stored segment of the cohort that is deepest in the prompt; the cohort must have a stored
        segment. The segments have to be sorted for it, because they are not added by depth: segments behind a gap of
        the prompt are touched before those that fill the gap are stored."""
        if self.order is None:
            # Of segments with equal depth the one that was added first is evicted first.
            self.order = self.deepest_first()
            self.order.reverse()
        while self.order[-1] not in self.here:
            self.order.pop()
        return self.order[-1]


class Record(PolicyState):
    """The policy's knowledge of one segment: a stored one, or one that was evicted or refused (then the record is a
    ghost)."""

    __slots__ = ("access", "accesses", "cohort", "counted", "gone")

    def __init__(self, now: float) -> None:
        self.accesses = 0
        self.counted = now - SAME_ACCESS_S
        """Time in seconds of the last access of the segment that was counted."""
        self.gone = 0.0
        """Time in seconds at which the segment was evicted or refused; meaningless for a stored segment."""
        self.access: AccessRecord = NO_ACCESS
        """Access record of the last request that accessed the evicted or refused segment."""
        self.cohort: Cohort | None = None
        """The cohort of the segment's last access; None once the segment was accessed again and has not joined the new
        cohort yet."""


class Ghosts(OrderedDict[SegmentKey, Record]):
    """Records of segments that were evicted or refused, in the order in which that happened. Their number and their age
    are bounded."""

    def add(self, key: SegmentKey, record: Record, now: float, segments: int) -> list[Record]:
        """Add the record of a segment that was evicted or refused at `now`. `segments`: the number of stored segments,
        which bounds the number of ghosts. Returns the records that are forgotten instead; expired ones are forgotten a
        few at a time."""
        record.gone = now
        self[key] = record
        limit = max(LEAST_GHOSTS, GHOSTS_EACH * segments)
        forgotten: list[Record] = []
        while self and (len(self) > limit or (len(forgotten) < 4 and self._oldest().gone + GHOST_S < now)):
            forgotten.append(self.popitem(last=False)[1])
        return forgotten

    def _oldest(self) -> Record:
        return next(iter(self.values()))
