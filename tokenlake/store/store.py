"""The segments of one node: index, slots, pins, budgets, eviction."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from tokenlake.hints import NO_HINTS, AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.metrics import Counters, Metric
from tokenlake.placement import MAX_RETENTION_VALUE, Vacancy
from tokenlake.store.eviction import POLICIES, EvictionPolicy, LeastRecentlyUsed
from tokenlake.store.history import CACHED_RULE, CORRUPT_RULE, NOT_ADMITTED_RULE, RECLAIMED_RULE, Gone, History
from tokenlake.store.places import Cursor, Places
from tokenlake.store.pool import Budgets, SlotPool
from tokenlake.store.quota import Quotas
from tokenlake.store.region import RegionShape
from tokenlake.store.segment import Kind, Segment, State
from tokenlake.wire.codes import Code
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import SlotRef

__all__ = ["Budgets", "SegmentStore"]

NOT_ADMITTED_RULE_NAME = Metric(
    "tokenlake_unworthy_segments_total", "Segments not kept since what would have gone for them was worth more"
)
EVICTED = Metric("tokenlake_evicted_segments_total", "Segments that gave their slot to another, cached ones included")
QUARANTINED = Metric(
    "tokenlake_quarantined_segments_total",
    "Segments that left the index while somebody could still touch the slot",
)
HEALED = Metric(
    "tokenlake_healed_segments_total",
    "Segments of which a copy with wrong bytes was found here, and a sound copy is here since",
)

LOOKED_AT = 64
"""Segments in search of the next victim's age."""
MAX_UNSERVED = 64
"""Pools without memory that are remembered."""
REMEMBERED = 64
"""Pools that are gone, whose statistics are kept."""
MAX_CORRUPT = 1 << 12
"""Segments whose sound copies are waited for, to be counted."""
RECLAIM_SLOTS = 1024
"""Segments that one call of `reclaim` looks at, or one region's if that is more."""
RECLAIM_EVICTIONS = 128
"""Segments that one call of `reclaim` evicts."""

_NO_SEGMENTS: dict[SegmentKey, Segment] = {}
_GONE = State.GONE
"""Looked up once: each access to a member of an enum costs Python 3.11 some 100 ns."""


class SegmentStore:
    """All changes are synchronous: a reservation takes a slot, evicting if it must, or is refused at once.

    `reissued` and `evicted` collect what the caller has to make known (generations of slots that changed
    hands, copies that left and that a directory node may think are here: primary copies, cached ones of which no owner
    is
    known, and whatever had wrong bytes); the caller empties them.
    """

    def __init__(
        self,
        regions: Sequence[int],
        region_bytes: int,
        budgets: Budgets,
        counters: Counters,
        policy: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
        quotas: Mapping[str, float] = MappingProxyType({}),
        history: History | None = None,
    ) -> None:
        """`regions`: ids of the regions that exist, each of `region_bytes`. `quotas`: share of them by tenant."""
        self.region_bytes = region_bytes
        self.reissued: list[SlotRef] = []
        self.evicted: list[Segment] = []
        self.arrivals = 0
        """Segments that became READY so far."""
        self._counters = counters
        self._budgets = budgets
        self._policy = policy
        self._spare = list(regions)
        self._regions = len(self._spare)
        self._history = History() if history is None else history
        self._rule = next((name for name, make in POLICIES.items() if make is policy), "the policy")
        self._quotas = Quotas(self._regions, quotas)
        self._unserved: dict[tuple[TenantId, int], None] = {}
        self._owned: dict[TenantId, int] = {}
        """Regions by tenant; those with none are not in it."""
        self._generations: dict[int, list[int]] = {}
        self._index: dict[TenantId, dict[SegmentKey, Segment]] = {}
        self._pools: dict[tuple[TenantId, int], SlotPool] = {}
        self._quarantine: dict[SlotRef, Segment] = {}
        self._places = Places()
        self._corrupt: OrderedDict[tuple[TenantId, SegmentKey], None] = OrderedDict()
        """Found with wrong bytes here, and no sound copy came since. The oldest is forgotten first."""
        self._learned: dict[tuple[TenantId, int], bytes] = {}
        """Of pools that are gone, those that went last at the end."""

    # -- looking up

    def get(self, tenant: TenantId, key: SegmentKey) -> Segment | None:
        """The segment, RESERVED or READY."""
        return self._index.get(tenant, _NO_SEGMENTS).get(key)

    def index(self, tenant: TenantId) -> dict[SegmentKey, Segment]:
        """The tenant's index, RESERVED and READY; for reading only."""
        return self._index.get(tenant, _NO_SEGMENTS)

    def segments(self) -> Iterable[Segment]:
        """Every indexed segment, in order of tenants and insertion."""
        for index in self._index.values():
            yield from index.values()

    def walk(self, start: Cursor, slots: int) -> tuple[list[Segment], Cursor | None]:
        """The segments in the next `slots` slots, those in quarantine too, and where to go on: None at the end.
        Whatever comes and goes between two calls, a segment that stays is passed exactly once."""
        return self._places.walk(start, slots)

    def pool(self, tenant: TenantId, slot_bytes: int) -> SlotPool | None:
        """The pool of that slot size, given a spare region if it has none. None when there is none to give, or the
        tenant has its quota."""
        pool = self._pools.get((tenant, slot_bytes))
        if pool is None:
            if not self._room(tenant) or not RegionShape(self.region_bytes, slot_bytes).slots:
                return None
            pool = self._pools[tenant, slot_bytes] = SlotPool(tenant, slot_bytes, self._budgets, self._policy)
            pool.retention.restore(self._learned.pop((tenant, slot_bytes), b""))
            self._grow(pool)
        return pool

    def pools(self) -> Iterable[SlotPool]:
        """Every pool, in order of creation."""
        return self._pools.values()

    def region_owner(self, region: int) -> SlotPool | None:
        """The pool that a region belongs to."""
        return next((pool for pool in self._pools.values() if region in pool.regions), None)

    def capacity(self, pool: SlotPool) -> int:
        """Slots that `pool` has or can still get."""
        return pool.slots + self._room(pool.tenant) * RegionShape(self.region_bytes, pool.slot_bytes).slots

    def dirty_room(self, pool: SlotPool) -> int:
        """How many more dirty copies `pool` may keep. Of what it can grow to: a fresh node's first region is no reason
        to refuse."""
        return max(0, pool.budget(pool.budgets.dirty, self.capacity(pool)) - pool.counts[Kind.DIRTY])

    def replica_room(self, pool: SlotPool) -> int:
        """How many more replicas `pool` may keep."""
        return max(0, pool.budget(pool.budgets.replica, self.capacity(pool)) - pool.counts[Kind.REPLICA])

    def vacancy(self, now: float) -> Vacancy:
        """Free memory, and of the primary copies that pools would evict next the greatest age and the least worth."""
        total = self._regions * self.region_bytes
        free = len(self._spare) * self.region_bytes
        age, retention_value = 0.0, MAX_RETENTION_VALUE
        for pool in self._pools.values():
            free += len(pool.free) * pool.slot_bytes
            if not len(order := pool.order[Kind.PRIMARY]):
                continue
            # Only a look, with every answer to a peer: what is pinned on the way stays where it is in the order. A pool
            # whose coldest segments are all in use has no victim to offer now.
            coldest: Segment | None = order.coldest(now)
            if coldest is not None and coldest.pins:
                coldest = next((segment for segment in islice(order, LOOKED_AT) if not segment.pins), None)
            if coldest is not None:
                age = max(age, now - coldest.touched)
                retention_value = min(retention_value, order.retention_value(coldest, now))
        return Vacancy(free / total if total else 0.0, min(MAX_SECONDS, max(0.0, age)), retention_value)

    # -- life of a segment

    def reserve(
        self,
        tenant: TenantId,
        slot_bytes: int,
        key: SegmentKey,
        kind: Kind,
        depth: int,
        now: float,
        hints: Hints = NO_HINTS,
    ) -> Segment | Code:
        """A slot for a new segment, RESERVED, indexed and pinned once for the caller; or the reason why not.

        The key must not be indexed. Victims: cached copies beyond their budget, then primary copies by policy. A cached
        copy within its budget takes a primary copy's slot first, else the budget would never fill; beyond it, only when
        all cached copies are in use, else what is leased of a prompt could keep the rest of it from being read
        (test_a_tail_that_is_here_keeps_nobody_from_reading_its_head).
        """
        pool = self.pool(tenant, slot_bytes)
        if pool is None:
            if len(self._unserved) < MAX_UNSERVED:
                self._unserved[tenant, slot_bytes] = None
            return self.refusal(tenant, Code.NO_REGION)
        if kind is Kind.DIRTY and not self.dirty_room(pool):
            return Code.WRITE_BUDGET
        if kind is Kind.REPLICA and not self.replica_room(pool):
            return Code.REPLICA_BUDGET
        if not pool.free and self._room(tenant):
            self._grow(pool)
        # Once, but for victims in a region that is to be given away: their slots are nobody's.
        while not pool.free:
            victim = self._victim(pool, kind, now)
            if victim is None:
                return self.refusal(tenant, Code.NO_SLOT)
            # Primary copies compete with primary copies; what an engine writes or reads needs a slot in any case.
            if kind is victim.kind is Kind.PRIMARY and not self._admits(pool, key, hints, now):
                return Code.NOT_ADMITTED
            self._evict(victim, now)
        segment = Segment(pool, key, pool.take(self._generations), kind, depth, now)
        segment.pins = 1
        segment.hints = hints
        pool.counts[kind] += 1
        self._index.setdefault(tenant, {})[key] = segment
        self._places.of[segment.place.region][segment.place.slot] = segment
        self.reissued.append(segment.place)
        return segment

    def admits_primary(self, segment: Segment, now: float) -> bool:
        """Should this dirty copy become a primary copy here? Not where memory is full and what would go next is worth
        more."""
        pool = segment.pool
        return bool(pool.free or self._room(pool.tenant)) or self._admits(pool, segment.key, segment.hints, now)

    def publish(self, segment: Segment, checksums: bytes, now: float) -> None:
        """RESERVED -> READY. The caller's pin stays."""
        assert segment.state is State.RESERVED
        segment.state = State.READY
        self.arrivals += 1
        segment.checksums = checksums
        segment.pool.enter(segment, now)
        if self._corrupt and (segment.tenant, segment.key) in self._corrupt:
            del self._corrupt[segment.tenant, segment.key]
            self._counters.add(HEALED)

    def discard(self, segment: Segment, now: float, evicted: bool = False) -> None:
        """Out of the index. The slot is free at once without pins, else quarantined until the last one goes.
        `evicted`: for want of memory, which the policy remembers."""
        pool = segment.pool
        if segment.state is State.READY:
            pool.leave(segment, now, evicted)
        segment.state = State.GONE
        pool.counts[segment.kind] -= 1
        del self._index[segment.tenant][segment.key]
        if segment.pins:
            self._quarantine[segment.place] = segment
            pool.quarantined += 1
            self._counters.add(QUARANTINED)
        else:
            self._free(segment)

    def drop(self, segment: Segment, now: float) -> None:
        """The bytes of a READY segment are wrong: it leaves the index at once, whatever its kind and its pins, and
        its directory node is told as of an eviction."""
        self.found_corrupt(segment.tenant, segment.key)
        self._history.add(segment.tenant, segment.key, Gone(now, CORRUPT_RULE))
        self.evicted.append(segment)
        self.discard(segment, now)

    def found_corrupt(self, tenant: TenantId, key: SegmentKey) -> None:
        """A copy with wrong bytes was here, or came here: the next sound one is counted."""
        self._corrupt[tenant, key] = None
        if len(self._corrupt) > MAX_CORRUPT:
            self._corrupt.popitem(last=False)

    def become(self, segment: Segment, kind: Kind, now: float) -> None:
        """Change the kind of an indexed segment."""
        if segment.kind is kind:
            return
        pool = segment.pool
        if segment.state is State.READY:
            pool.leave(segment, now)
        pool.counts[segment.kind] -= 1
        segment.kind = kind
        pool.counts[kind] += 1
        if segment.state is State.READY:
            pool.enter(segment, now)

    def pin(self, *segments: Segment) -> None:
        """Their slots stay what they are until the matching `unpin`, one for each `pin`."""
        for segment in segments:
            segment.pins += 1

    def unpin(self, *segments: Segment) -> None:
        """Undo one `pin` each; frees a quarantined slot with the last."""
        for segment in segments:
            segment.pins -= 1
            if segment.pins:
                continue
            if segment.aside:
                segment.pool.come_back(segment)
            elif segment.state is _GONE:
                self._leave_quarantine(segment)

    def touch(self, segments: Sequence[Segment], now: float, hints: Hints | None = None) -> None:
        """The READY segments of one prompt were read; given in prompt order, touched deepest first, so that a
        parent outlives its children. `hints`: of the request that read them, if it gave any."""
        if hints is not None:
            _take_word(segments, hints)
        for segment in reversed(segments):
            if segment.aside:
                segment.pool.come_back(segment)
            segment.pool.order[segment.kind].touch(segment, now)

    def hint(self, segments: Sequence[Segment], hints: Hints, now: float) -> None:
        """A word about the READY segments of one prompt that came late; no use."""
        _take_word(segments, hints)
        for segment in reversed(segments):
            if not segment.aside:
                segment.pool.order[segment.kind].hinted(segment, now)

    # -- what was learned

    def remembers(
        self, tenant: TenantId, keys: Sequence[SegmentKey], now: float
    ) -> tuple[int, AccessRecord, float] | None:
        """Of the last of these keys that was evicted or refused and is not forgotten: its index, how it was used last,
        and how long ago."""
        if not keys:
            return None
        # Mostly there is one; and no key has segments of two sizes.
        pools = (pool for (owner, _), pool in self._pools.items() if owner == tenant)
        told = [remembered for pool in pools if (remembered := pool.retention.remembers(keys, now)) is not None]
        return max(told, default=None, key=operator.itemgetter(0))

    def learned(self) -> dict[tuple[TenantId, int], bytes]:
        """By tenant and slot size: what the policies learned of their primary copies, also of pools that are gone."""
        live = {at: pool.retention.save() for at, pool in self._pools.items()}
        return {at: data for at, data in (self._learned | live).items() if data}

    def absorb(self, learned: Mapping[tuple[TenantId, int], bytes]) -> None:
        """What another node's stores learned just now, of pools that are here as well. Raises `ValueError`."""
        for at, data in learned.items():
            if at in self._pools:
                self._pools[at].retention.absorb(data)

    def remember(self, learned: Mapping[tuple[TenantId, int], bytes]) -> None:
        """Pools that are yet to come begin with this, which `learned` gave to an equal policy."""
        for at, data in learned.items():
            self._learned.pop(at, None)
            self._learned[at] = data
            while len(self._learned) > REMEMBERED:
                del self._learned[next(iter(self._learned))]

    # -- regions

    def refusal(self, tenant: TenantId, reason: Code) -> Code:
        """`reason`, unless what stands in the way is the tenant's quota."""
        return Code.QUOTA if self.has_quota(tenant) and self._regions > self._quotas.most(tenant) else reason

    def has_quota(self, tenant: TenantId) -> bool:
        """Has the tenant as much as it may have?"""
        return self._owned.get(tenant, 0) >= self._quotas.most(tenant)

    def take_unserved(self) -> list[tuple[TenantId, int]]:
        """Tenants and slot sizes for which there was no region since this was last asked."""
        taken, self._unserved = list(self._unserved), {}
        return taken

    def is_short(self, tenant: TenantId, slot_bytes: int, among: Iterable[TenantId]) -> bool:
        """Has the tenant less than its fair part among those tenants, and could use more for slots of this size?"""
        pool = self._pools.get((tenant, slot_bytes))
        if pool is not None and (pool.free or self._room(tenant)):
            return False
        return self._owned.get(tenant, 0) < self._quotas.fair(tenant, among)

    def has_too_much(self, tenant: TenantId, among: Iterable[TenantId]) -> bool:
        """Has the tenant more than its fair part among those tenants?"""
        return self._owned.get(tenant, 0) > self._quotas.fair(tenant, among)

    def drain(self, pool: SlotPool, now: float) -> int | None:
        """As `reclaim`, of a pool in use: one region is chosen, filled no more, and taken once all its pins have gone
        and its dirty segments are pushed."""
        if pool.draining is None:
            looked, best, busiest = 0, pool.regions[0], RECLAIM_SLOTS
            for region in pool.regions:
                inside = [segment for segment in self._places.of[region] if segment is not None]
                busy = sum(segment.pins > 0 or segment.kind is Kind.DIRTY for segment in inside)
                if busy < busiest:
                    best, busiest = region, busy
                looked += len(inside)
                if looked >= RECLAIM_SLOTS:
                    break
            pool.drain(best, len(self._places.of[best]))
        inside = [segment for segment in self._places.of[pool.draining or 0] if segment is not None]
        idle = [segment for segment in inside if not segment.pins and segment.kind is not Kind.DIRTY]
        for segment in idle[:RECLAIM_EVICTIONS]:
            self._evict(segment, now, RECLAIMED_RULE)
        return self._take_away(pool) if len(idle[:RECLAIM_EVICTIONS]) == len(inside) else None

    def reclaim(self, pool: SlotPool, now: float) -> int | None:
        """Empty one region of `pool` for somebody else and take it away; its id, or None while something in
        each of them is pinned or dirty. None as well when there is more to look at, or to evict, than is done at
        once: ask again. The caller replaces the memory, then calls `add_spare`."""
        looked = 0
        for region in tuple(pool.regions):
            inside = [segment for segment in self._places.of[region] if segment is not None]
            if any(segment.pins or segment.kind is Kind.DIRTY for segment in inside):
                # The next call begins with the others.
                pool.regions.append(pool.regions.pop(0))
                looked += len(inside)
                if looked >= RECLAIM_SLOTS:
                    return None
                continue
            for segment in inside[:RECLAIM_EVICTIONS]:
                self._evict(segment, now, RECLAIMED_RULE)
            if len(inside) > RECLAIM_EVICTIONS:
                return None
            if pool.draining is None:
                pool.drain(region, len(self._places.of[region]))
            return self._take_away(pool)
        return None

    def _take_away(self, pool: SlotPool) -> int:
        """The region that was drained, which is empty."""
        region = pool.draining
        assert region is not None
        pool.drop_region(region)
        self._places.drop_region(region)
        # All that `add_spare` needs of them.
        self._generations[region] = [max(self._generations[region])]
        self._owned[pool.tenant] -= 1
        if not self._owned[pool.tenant]:
            del self._owned[pool.tenant]
        if not pool.regions:
            del self._pools[pool.tenant, pool.slot_bytes]
            self.remember({(pool.tenant, pool.slot_bytes): pool.retention.save()})
        return region

    def add_spare(self, region: int, claimed: tuple[TenantId, int] | None = None) -> None:
        """`region` has fresh memory. Its generations go on from where they were, so that a reference to the
        former memory fits no slot of the new one. `claimed`: the tenant and slot size that it was taken for."""
        if claimed is None or self.has_quota(claimed[0]):
            self._spare.append(region)
            return
        self._spare.insert(0, region)
        pool = self._pools.get(claimed)
        if pool is not None:
            self._grow(pool)
        else:
            self.pool(*claimed)

    @property
    def spare_regions(self) -> int:
        """Regions that belong to nobody yet."""
        return len(self._spare)

    # -- inside

    def _leave_quarantine(self, segment: Segment) -> None:
        del self._quarantine[segment.place]
        segment.pool.quarantined -= 1
        self._free(segment)

    def _free(self, segment: Segment) -> None:
        region, slot, _ = segment.place
        self._places.of[region][slot] = None
        segment.pool.give_back(region, slot)

    def _room(self, tenant: TenantId) -> int:
        """Spare regions that the tenant may take."""
        return max(0, min(len(self._spare), self._quotas.most(tenant) - self._owned.get(tenant, 0)))

    def _grow(self, pool: SlotPool) -> None:
        """By a spare region, which there is and which its tenant may take."""
        region = self._spare.pop(0)
        previous_owner = max(self._generations.get(region, [0]))
        slots = RegionShape(self.region_bytes, pool.slot_bytes).slots
        self._generations[region] = [previous_owner] * slots
        self._places.add_region(region, slots)
        self._owned[pool.tenant] = self._owned.get(pool.tenant, 0) + 1
        pool.add_region(region, self.region_bytes)

    def _admits(self, pool: SlotPool, key: SegmentKey, hints: Hints, now: float) -> bool:
        admitted = pool.order[Kind.PRIMARY].admits(key, hints, now)
        self._counters.add(NOT_ADMITTED_RULE_NAME, not admitted)
        if not admitted:
            self._history.add(pool.tenant, key, Gone(now, NOT_ADMITTED_RULE))
        return admitted

    def _victim(self, pool: SlotPool, kind: Kind, now: float) -> Segment | None:
        """Which segment goes so that one of `kind` can come.

        A primary copy displaces a cached one only where those are beyond their budget: else what other nodes push here
        would drive out what this node's engines read, and each read would travel again.
        """
        room = pool.budget(pool.budgets.cached, pool.slots) - pool.counts[Kind.CACHED]
        spares_cached = room > 0 if kind is Kind.CACHED else room >= 0 and kind is Kind.PRIMARY
        primaries_first = spares_cached or pool.retention.overdue(now)
        for victims in (Kind.PRIMARY, Kind.CACHED) if primaries_first else (Kind.CACHED, Kind.PRIMARY):
            victim = pool.victim(victims, now)
            if victim is not None:
                return victim
        return None

    def _evict(self, segment: Segment, now: float, rule: str = "") -> None:
        self._counters.add(EVICTED)
        if not rule:
            rule = segment.pool.retention.rule(segment) if segment.kind is Kind.PRIMARY else CACHED_RULE
        gone = Gone(now, rule or self._rule, unused_s=max(0.0, now - segment.touched))
        self._history.add(segment.tenant, segment.key, gone)
        if segment.kind is Kind.PRIMARY or (segment.kind is Kind.CACHED and segment.source is None):
            self.evicted.append(segment)
        self.discard(segment, now, evicted=True)

    def check_integrity(self) -> None:
        """AssertionError when slots, pins, counts and index do not add up. Slow; for tests."""
        for (tenant, slot_bytes), pool in self._pools.items():
            segments = [s for s in self.segments() if (s.tenant, s.slot_bytes) == (tenant, slot_bytes)]
            gone = [s for s in self._quarantine.values() if (s.tenant, s.slot_bytes) == (tenant, slot_bytes)]
            pool.check_integrity(segments, gone)
        for tenant, index in self._index.items():
            for key, segment in index.items():
                assert (segment.tenant, segment.key) == (tenant, key)
                assert segment.state is not State.GONE
                assert segment.place.generation == self._generations[segment.place.region][segment.place.slot]
        placed = [s for slots in self._places.of.values() for s in slots if s is not None]
        assert {id(s) for s in placed} == {id(s) for s in [*self.segments(), *self._quarantine.values()]}
        assert all(self._places.of[s.place.region][s.place.slot] is s for s in placed)
        assert sum(len(p.regions) for p in self._pools.values()) + len(self._spare) <= self._regions


def _take_word(segments: Sequence[Segment], hints: Hints) -> None:
    """`hints` is the newest of these. Segments of one prompt mostly had the same word before: merged once for each."""
    previous_owner, merged = NO_HINTS, hints
    for segment in segments:
        if segment.hints is not previous_owner:
            previous_owner = segment.hints
            merged = hints.over(previous_owner)
        segment.hints = merged
