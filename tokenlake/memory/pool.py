"""The slots of one tenant and one slot size (a pool): free slots, counts by kind of segment, budgets, orders of
eviction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.memory.segment import Kind, PoolId, Segment, State
from tokenlake.rate import Rate

USE_HALF_LIFE_S = 5.0
"""Seconds after which a use counts half in the rate of uses: memory follows within some of them."""


MAX_KEPT = 128
"""Maximum number of segments that one search for a victim keeps for their children: each takes some 5 us."""
MAX_PASSED = 1024
"""Maximum number of segments that such a search then passes to find one without children."""
MAX_CHILDREN = 64
"""Maximum number of children of a segment among which the one that stays longest is looked for."""


COPY_LOSS = 0.03
"""Cost of the loss of a copy that another node or the disk has too, as a share of the cost of the loss of the last one:
the time in which a segment is fetched, of the time in which it is computed (docs/decisions/030)."""
LEAST_USES = 0.025
"""Value of such a copy, as a share of the uses of a mean slot of the pool, below which it leaves before all last
copies. The forecast is too low for segments that are kept for minutes, until the model has seen many of them."""


class SlotPool:
    """The slots of one tenant and one slot size. Only `SegmentStore` changes it; `primary` also learns from the core
    of segments that come back from disk."""

    def __init__(self, pool: PoolId, dirty_share: float, policy: Callable[[], EvictionPolicy]):
        """`dirty_share`: maximum share of the slots, at least two, for segments that engines are writing. `policy`:
        makes the eviction policies of the cached and of the primary copies."""
        self.id = pool
        self.tenant, self.slot_bytes = pool
        self.used = -math.inf
        """Time in seconds at which an engine of this node last read or wrote a segment of the pool."""
        self._uses = Rate(USE_HALF_LIFE_S)
        self._dirty_share = dirty_share
        self.regions: list[int] = []
        self.slots = self.dirty_slots = 0
        """Number of its slots, and how many of them segments that are being written may have."""
        self.free: list[tuple[int, int]] = []
        """Free slots as (region, slot); the last one is used next."""
        self.primary = policy()
        """The order in which primary copies are evicted."""
        # Lists by kind: hashing an enum member for a dict runs Python code, and this is the hot path.
        self.orders: list[EvictionPolicy] = [LeastRecentlyUsed(), policy(), self.primary]
        """For each kind, the order in which its READY segments are evicted, without the segments that are excluded from
        it. Segments that were just written are in an order until their kind is decided, but are never evicted from
        it."""
        self.children: dict[SegmentKey, dict[Segment, None]] = {}
        """The primary copies that continue a prompt behind each key, whose segment may be here or not."""
        self.counts = [0] * len(Kind)
        """Number of RESERVED and READY segments of each kind."""
        self.quarantined = 0
        self.draining: int | None = None
        """The region that the pool is giving away, None without one: its slots do not count, and get no new
        segments."""
        self.withheld: dict[int, int] = {}
        """For regions of the daemon before whose slots get no new segments yet: the first slot of which that is so."""
        self.withheld_free = 0
        """Number of such slots without a segment."""

    def use(self, segments: int, now: float) -> None:
        """Count segments that engines of this node read, or get slots to write."""
        self.used = now
        self._uses.add(segments, now)

    def turnover_s(self, now: float) -> float:
        """Returns the seconds in which engines of this node use as many segments as the pool has slots, at their recent
        rate; infinite for a pool that they do not use."""
        rate = self._uses.at(now)
        return self.slots / rate if rate else math.inf

    def add_region(self, region: int, slots: int) -> None:
        """Cut a fresh region into free slots."""
        self.regions.append(region)
        self._resize(slots)
        self.free.extend(zip(itertools.repeat(region), range(slots - 1, -1, -1), strict=False))

    def keep_region(self, region: int, slots: int) -> None:
        """Add a region of the daemon before, whose slots get no new segments yet."""
        self.regions.append(region)
        self._resize(slots)
        self.withheld[region] = 0
        self.withheld_free += slots

    def withholds(self, region: int, slot: int) -> bool:
        """Returns True if this slot gets no new segment yet."""
        return slot >= self.withheld.get(region, slot + 1)

    @property
    def may_drain(self) -> bool:
        """True if the pool can give some region away: one none of whose slots is withheld."""
        return len(self.withheld) < len(self.regions)

    def drain(self, region: int, slots: int) -> None:
        """Begin to give a region of so many slots away: they get no new segments."""
        self.draining = region
        self._resize(-slots)
        self.free = [place for place in self.free if place[0] != region]

    def keep(self, slots: int, free: list[tuple[int, int]]) -> None:
        """End `drain` without giving the region away. `free`: its free slots."""
        self.draining = None
        self._resize(slots)
        self.free.extend(free)

    def _resize(self, more: int) -> None:
        self.slots += more
        self.dirty_slots = _share(self._dirty_share, self.slots)
        # The order of cached copies keeps its least limit of high priority: copies do not outlive last ones by it.
        self.primary.resize(self.slots)

    def drop_region(self, region: int) -> None:
        """Forget a region that was drained, and is empty."""
        self.draining = None
        self.regions.remove(region)

    def give_back(self, region: int, slot: int) -> None:
        """Make a slot free, which holds no segment any more."""
        if self.withheld and self.withholds(region, slot):
            self.withheld_free += 1
        elif region != self.draining:
            self.free.append((region, slot))

    def may_write(self, more: int) -> bool:
        """Returns True if the budget of segments being written has room for another one. `more`: the slots that the
        pool can still get, which count too."""
        dirty = self.counts[Kind.DIRTY]
        return dirty < self.dirty_slots or dirty < _share(self._dirty_share, self.slots + more)

    def victim(self, kind: Kind, now: float) -> Segment | None:
        """Returns the unpinned segment of `kind` to evict next, None if all are pinned. Pinned segments before it are
        in use: they count as accessed now, and leave the order until their last pin goes, so that no search passes over
        the same segment twice. A primary copy stays as long as its last child here, which no match finds without
        it."""
        order, kept = self.orders[kind], 0
        while len(order):
            segment = order.victim(now)
            if segment.pins:
                order.remove(segment, now, evicted=False)
                segment.excluded, segment.touched = True, now
            elif kind is not Kind.PRIMARY or segment.key not in self.children:
                return segment
            elif kept < MAX_KEPT and self._keep(segment, now):
                kept += 1
            else:
                ends = (each for each in itertools.islice(order, MAX_PASSED) if each.key not in self.children)
                return next((each for each in ends if not each.pins), segment)
        return None

    def _keep(self, segment: Segment, now: float) -> bool:
        """Let a primary copy stay as long as the one of its children that stays longest. Returns False if all are in
        use, or the order has no other place for it."""
        newest = itertools.islice(reversed(self.children[segment.key]), MAX_CHILDREN)
        idle = [child for child in newest if not child.excluded]
        return bool(idle) and self.primary.follow(segment, max(idle, key=lambda child: self.primary.rank(child, now)))

    def link(self, segment: Segment, parent: SegmentKey) -> None:
        """Set the parent of a segment, which has none yet."""
        segment.parent = parent
        if segment.kind is Kind.PRIMARY and segment.state is State.READY:
            self.children.setdefault(parent, {})[segment] = None

    def enter(self, segment: Segment, now: float) -> None:
        """Add a READY segment to the order of its kind."""
        self.orders[segment.kind].insert(segment, now)
        if segment.parent is not None and segment.kind is Kind.PRIMARY:
            self.children.setdefault(segment.parent, {})[segment] = None

    def leave(self, segment: Segment, now: float, evicted: bool = False) -> None:
        """Take a segment out of the order of its kind, also one that is excluded from it. `evicted`: it left for want
        of memory."""
        if segment.excluded:
            segment.excluded = False
        else:
            self.orders[segment.kind].remove(segment, now, evicted)
        if segment.parent is not None and segment.kind is Kind.PRIMARY:
            siblings = self.children[segment.parent]
            del siblings[segment]
            if not siblings:
                del self.children[segment.parent]

    def move(self, segment: Segment, kind: Kind, now: float) -> None:
        """Change the kind of a segment."""
        ready = segment.state is State.READY
        if ready:
            self.leave(segment, now)
            self.orders[segment.kind].forget(segment)
        self.counts[segment.kind] -= 1
        segment.kind = kind
        self.counts[kind] += 1
        if ready:
            self.enter(segment, now)

    def rank(self, segment: Segment, now: float) -> tuple[int, float, float]:
        """Returns a rank by which READY cached and primary copies in order can be compared: those of a lower rank leave
        first. The value of a copy that another node or the disk has too counts `COPY_LOSS` times, and nothing below
        `LEAST_USES`."""
        tier, value, touched = self.orders[segment.kind].rank(segment, now)
        if segment.elsewhere:
            value *= COPY_LOSS
            if value * self.turnover_s(now) < LEAST_USES:
                value = 0.0
        return tier, value, touched

    def readmit(self, segment: Segment) -> None:
        """Put an excluded segment back in order: its last pin went, or it was touched."""
        segment.excluded = False
        self.enter(segment, segment.touched)

    def check_integrity(self, segments: list[Segment], quarantined: list[Segment]) -> None:
        """Raises AssertionError unless free, withheld, indexed and quarantined slots together are all slots, each
        once."""
        places = [*self.free, *((s.place.region, s.place.slot) for s in segments + quarantined)]
        places = [place for place in places if place[0] != self.draining]
        assert len(places) == len(set(places)), "a slot is counted twice"
        counted = len(places) + self.withheld_free
        assert counted == self.slots, f"{counted} places for {self.slots} slots"
        assert not any(self.withholds(*place) for place in self.free), "a free slot is withheld"
        assert self.draining not in self.withheld
        assert self.withheld_free >= 0
        assert self.quarantined == len(quarantined), f"counted {self.quarantined} in quarantine, are {len(quarantined)}"
        for kind in Kind:
            of_kind = [s for s in segments if s.kind is kind]
            assert self.counts[kind] == len(of_kind), f"{kind.name}: counted {self.counts[kind]}, are {len(of_kind)}"
            ready = [s for s in of_kind if s.state is State.READY]
            assert set(self.orders[kind]) == {s for s in ready if not s.excluded}
            assert all(s.pins for s in ready if s.excluded)
        children = [child for each in self.children.values() for child in each]
        primary = {s for s in segments if s.kind is Kind.PRIMARY and s.state is State.READY and s.parent is not None}
        assert set(children) == primary
        assert len(children) == len(primary)
        assert all(self.children.values())
        assert all(s.pins > 0 for s in quarantined)
        assert all(s.pins >= 0 for s in segments)


def _share(share: float, slots: int) -> int:
    """Returns `share` of `slots` in whole slots, at least two."""
    return max(2, math.ceil(share * slots))
