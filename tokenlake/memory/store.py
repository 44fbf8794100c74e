"""The segments of one node: their index, slots, pins, budgets and eviction."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from tokenlake.hints import NO_HINTS, AccessRecord, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory.changes import ChangeLog
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake.memory.kept_slots import KeptSlots
from tokenlake.memory.models import Models
from tokenlake.memory.pool import SlotPool
from tokenlake.memory.region import RegionShape, stride_of
from tokenlake.memory.region_allocator import RegionAllocator
from tokenlake.memory.removals import (
    CACHED_RULE,
    CORRUPT_RULE,
    NOT_ADMITTED_RULE,
    OPERATOR_RULE,
    POLICY_RULE,
    RECLAIMED_RULE,
    RemovalLog,
)
from tokenlake.memory.segment import Kind, PoolId, Segment, State, apply_hints
from tokenlake.memory.slot_table import Cursor, SlotTable
from tokenlake.memory.vacancy import Vacancy, vacancy_of
from tokenlake.metrics import Counters, Metric
from tokenlake.wire.codes import Code
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import SlotRef

NOT_ADMITTED = Metric(
    "tokenlake_not_admitted_segments_total",
    "Segments that became no primary copy, because the next victim had a higher retention value",
)
EVICTED = Metric("tokenlake_evicted_segments_total", "Segments evicted for want of memory, cached copies included")
ORPHANED = Metric(
    "tokenlake_orphaned_segments_total",
    "Primary copies that lost the segment before them in their prompt to an eviction: no match finds them until it is "
    "stored again. `rule`: `primary` and `cached` by the order of eviction of such copies, `in_use` where engines read "
    "what continues it, `reclaimed` where its memory got another size of segments or another tenant",
    "rule",
)
QUARANTINED = Metric(
    "tokenlake_quarantined_segments_total", "Segments that left the index while a process could still use the slot"
)

MAX_PRESSED = 64
"""Maximum number of pools to remember in which no slot was free."""
RECLAIM_SLOTS = 1024
"""Number of segments after which a call that takes away a region examines no further region."""
RECLAIM_EVICTIONS = 128
"""Maximum number of segments that one call evicts to take away a region."""

_NO_SEGMENTS: dict[SegmentKey, Segment] = {}
_GONE, _READY = State.GONE, State.READY
_DIRTY, _CACHED, _PRIMARY = Kind.DIRTY, Kind.CACHED, Kind.PRIMARY
"""Constants for speed: each access to a member of an enum takes Python 3.11 some 100 ns."""


class SegmentStore:
    """The segments and slots of one node. All changes are synchronous: a reservation takes a slot, with an eviction if
    necessary, or is refused at once.

    Its caller takes after each event which segments left (`take_gone`) and which slots are new (`take_slots`).
    """

    def __init__(
        self,
        regions: int,
        region_bytes: int,
        dirty_share: float,
        counters: Counters,
        policy: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
        quotas: Mapping[str, float] = MappingProxyType({}),
        *,
        made: bool = True,
    ) -> None:
        """`regions`, `region_bytes`, `quotas`, `made`: as of `RegionAllocator`. `dirty_share`, `policy`: as
        of `SlotPool`."""
        self.regions = RegionAllocator(regions, region_bytes, quotas, made=made)
        """The memory of each tenant. Of other modules only `core.regions` changes it."""
        self.arrivals = 0
        """Number of segments that became READY so far."""
        self.on_arrival: Callable[[Segment], None] = lambda segment: None
        """Called with each segment that becomes READY."""
        self.spare: Callable[[TenantId, int], Segment | None] = lambda tenant, slot_bytes: None
        """Returns an unpinned primary copy, of this tenant and size, that is on disk too: memory evicts it first."""
        self.models = Models()
        """The models of re-use by which the policies order primary copies."""
        self.changes = ChangeLog()
        """The log of the segments that became READY, and of those that left."""
        self.removals = RemovalLog()
        """Why segments left this node, or others that told it."""
        self._gone: list[Segment] = []
        self._opened: list[tuple[int, int, int, TenantId]] = []
        self._reissued: list[bytes] = []
        self._counters = counters
        self._dirty_share = dirty_share
        self._policy = policy
        self._index: dict[TenantId, dict[SegmentKey, Segment]] = {}
        self._pools: dict[PoolId, SlotPool] = {}
        self._slots = SlotTable()
        self._quarantine: dict[SlotRef, Segment] = {}
        self._pressed: dict[PoolId, None] = {}
        """Pools in which engines of this node wanted a slot and found none free."""
        self.kept = KeptSlots(self, self.regions, self._slots, self._pools, self._quarantine)
        """The slots of the daemon before that get no new segments yet."""
        self.recorded: dict[tuple[int, int], Segment] | None = None
        """By (region, slot), the last segment in each slot whose record in the ledger has to be written or cleared;
        None where no ledger is kept."""

    def take_gone(self) -> list[Segment]:
        """Returns the segments that left since the last call by some rule (`Segment.left_by`), or while on disk."""
        gone, self._gone = self._gone, []
        return gone

    def take_slots(self) -> tuple[list[tuple[int, int, int, TenantId]], list[bytes]]:
        """Returns what is new since the last call: regions that got a tenant, as (region, bytes, bytes of a slot,
        tenant), and slots with a new generation, each packed."""
        opened, self._opened = self._opened, []
        reissued, self._reissued = self._reissued, []
        return opened, reissued

    # -- looking up

    def get(self, tenant: TenantId, key: SegmentKey) -> Segment | None:
        """Returns the tenant's RESERVED or READY segment of `key`; None without one."""
        return self._index.get(tenant, _NO_SEGMENTS).get(key)

    def index(self, tenant: TenantId) -> dict[SegmentKey, Segment]:
        """Returns the tenant's RESERVED and READY segments by key; the caller must not change the map."""
        return self._index.get(tenant, _NO_SEGMENTS)

    def segments(self) -> Iterable[Segment]:
        """Yields all RESERVED and READY segments, by tenant in order of insertion."""
        for index in self._index.values():
            yield from index.values()

    def walk(self, start: Cursor, slots: int) -> tuple[list[Segment], Cursor | None]:
        """Returns the segments in the next `slots` slots from `start` on, those in quarantine included, and the cursor
        at which the walk continues (None at the end). A segment that stays is passed exactly once, however many come
        and go between two calls."""
        return self._slots.walk(start, slots)

    def pool(self, tenant: TenantId, slot_bytes: int) -> SlotPool | None:
        """Returns the tenant's pool of slots of this size. A pool that does not exist yet is made with a spare region;
        None if no spare region has room for a slot, or the tenant's quota is used."""
        at = PoolId(tenant, slot_bytes)
        pool = self._pools.get(at)
        if pool is None:
            if self.regions.fits(tenant, slot_bytes) is None:
                return None
            pool = self.new_pool(at)
            self._grow(pool)
        return pool

    def new_pool(self, at: PoolId) -> SlotPool:
        """Make a pool, to which the caller adds a region at once."""
        pool = self._pools[at] = SlotPool(at, self._dirty_share, self._policy)
        for order in pool.orders:
            if order.odds is not None:
                order.odds = self.models.of(at)
        return pool

    def pools(self) -> Iterable[SlotPool]:
        """All pools with memory, in order of creation."""
        return self._pools.values()

    def region_owner(self, region: int) -> SlotPool | None:
        """Returns the pool to which a region belongs; None without one."""
        return next((pool for pool in self._pools.values() if region in pool.regions), None)

    def capacity(self, pool: PoolId) -> int:
        """Returns the slots of a pool and those that it can still get. Raises KeyError for one without a region."""
        return self._pools[pool].slots + self.room(self._pools[pool])

    def unusable(self) -> int:
        """Returns the bytes of memory that can hold no segment: of regions, and what is left beside them and takes no
        slot of any pool."""
        left = self.regions.unmade
        wasted = 0
        for pool in self._pools.values():
            held = sum(self._slots.count(region) for region in pool.regions)
            wasted += sum(map(self.regions.size, pool.regions)) - held * pool.slot_bytes
        least = min((stride_of(pool.slot_bytes) for pool in self._pools.values()), default=0)
        return wasted + (left if self._pools and left < least and not self.regions.making else 0)

    def vacancy(self, now: float) -> Vacancy:
        """Returns how much room this node has; see `vacancy_of`."""
        return vacancy_of(self.regions, self._pools.values(), now)

    def retention_value(self, segment: Segment, now: float) -> float:
        """Returns the value of keeping a READY primary copy; infinite for one that is in use."""
        return math.inf if segment.excluded else self._pools[segment.pool].primary.retention_value(segment, now)

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
        parent: SegmentKey | None = None,
        source: NodeId | None = None,
        shards: int = 0,
        *,
        for_peer: bool = False,
    ) -> Segment | Code:
        """Reserve a slot for a new segment. Returns the segment (RESERVED, indexed, and pinned once for the caller), or
        the reason of the refusal. `source`: the node that owns the segment, if not this one. `shards`: how many shards
        are committed one by one (`commit_shards`). `for_peer`: another node waits for the segment, so that it does not
        count as use of this node's engines.

        The key must not be indexed. The victim is the unpinned segment whose loss costs least (`SlotPool.rank`): one
        whose time to live has passed, or the one of the least retention value, where the value of a cached copy and of
        a primary copy that is on disk too counts less.
        """
        pool = self.pool(tenant, slot_bytes)
        if pool is None:
            if not for_peer:
                self._press(PoolId(tenant, slot_bytes))
            return self.refusal(tenant, slot_bytes, Code.NO_REGION)
        used = kind is not _PRIMARY and not for_peer
        if used:
            pool.use(1, now)
        if kind is _DIRTY and pool.counts[_DIRTY] >= pool.dirty_slots and not pool.may_write(self.room(pool)):
            return Code.WRITE_BUDGET
        if not pool.free:
            if self.regions.fits(tenant, slot_bytes) is not None:
                self._grow(pool)
            elif used:
                self._press(pool.id)
        if not pool.free and kind is _DIRTY and self.regions.making and self.room(pool):
            # Memory is coming, so that no segment is evicted for want of it: the engine tries again.
            return Code.NO_REGION
        # Mostly one eviction is enough; the slot of a segment in a region that is being given away does not become
        # free.
        while not pool.free:
            victim = self._victim(pool, now)
            if victim is None:
                return self.refusal(tenant, slot_bytes, Code.NO_SLOT)
            # The kind is PRIMARY for segments that another node hands over: they take a slot only if the policy values
            # them more than its next victim. Writes (DIRTY) and reads (CACHED) of engines need a slot in any case.
            if kind is _PRIMARY and not self._admits(pool, key, hints, now):
                return Code.NOT_ADMITTED
            self._evict(victim, now)
        segment = Segment(pool.id, key, self._slots.next_generation(*pool.free.pop()), kind, depth, now)
        segment.pins = 1
        segment.hints = hints
        segment.parent = parent
        segment.source = source
        segment.missing_shards = (1 << shards) - 1
        segment.checksums = bytes(CHECKSUM_BYTES * shards)
        self.insert(segment)
        self._reissued.append(segment.packed)
        return segment

    def admits_primary(self, segment: Segment, now: float, *, again: bool = False) -> bool:
        """Returns True if this segment, which an engine has written, should become a primary copy of this node: memory
        is free, or the eviction policy admits it. `again`: it was refused before, and a further refusal does not
        count."""
        pool = self._pools[segment.pool]
        free = bool(pool.free) or self.regions.fits(*pool.id) is not None
        return free or self._admits(pool, segment.key, segment.hints, now, again=again)

    def commit_shards(self, segment: Segment, shards: int, checksums: bytes) -> bool:
        """Take over the checksums of consecutive shards, the bit mask `shards`, of a segment that is being written.
        Returns True once none is missing."""
        if len(checksums) == len(segment.checksums):
            segment.checksums = checksums
        else:
            at = ((shards & -shards).bit_length() - 1) * CHECKSUM_BYTES
            known = segment.checksums
            segment.checksums = known[:at] + checksums + known[at + len(checksums) :]
        segment.missing_shards &= ~shards
        return not segment.missing_shards

    def publish(self, segment: Segment, checksums: bytes, now: float) -> None:
        """Make a RESERVED segment READY, with its checksums. The caller's pin stays."""
        assert segment.state is not _READY
        segment.state = _READY
        self.arrivals += 1
        self.on_arrival(segment)
        self.changes.add(segment, True)
        segment.checksums = checksums
        self._pools[segment.pool].enter(segment, now)
        self.note(segment)

    def note(self, segment: Segment) -> None:
        """Take note that the record of a segment in the ledger has changed, if it has one, which READY segments
        have."""
        if self.recorded is not None and segment.state is _READY:
            self.recorded[segment.place.region, segment.place.slot] = segment

    def insert(self, segment: Segment) -> None:
        """Add a segment, which has a slot, to the index and the slots."""
        self._pools[segment.pool].counts[segment.kind] += 1
        self._index.setdefault(segment.tenant, {})[segment.key] = segment
        self._slots.put(segment)

    def discard(self, segment: Segment, now: float) -> None:
        """Take the segment out of the index, if it is there. Its slot is free at once if it is not pinned, else after
        the last pin."""
        if segment.state is not _GONE:
            self._take_out(segment, now, "")

    def _take_out(self, segment: Segment, now: float, rule: str) -> None:
        """Take the segment out of the index. `rule`: why, for the log of removals; empty for no reason that counts."""
        pool = self._pools[segment.pool]
        if rule:
            segment.left_by = rule
            self.removals.add(segment.tenant, segment.key, now, rule, "", max(0.0, now - segment.touched))
        if rule or segment.disk >= 0:
            self._gone.append(segment)
        if segment.state is _READY:
            # The policy keeps a ghost of one that left for want of memory, and of one that an operator evicted.
            pool.leave(segment, now, bool(rule) and rule is not CORRUPT_RULE)
            self.changes.add(segment, False)
            self.note(segment)
        segment.state = _GONE
        pool.counts[segment.kind] -= 1
        del self._index[segment.tenant][segment.key]
        if segment.pins:
            self._quarantine[segment.place] = segment
            pool.quarantined += 1
            self._counters.add(QUARANTINED)
        else:
            self._free(pool, segment)

    def drop(self, segment: Segment, now: float) -> None:
        """Take a READY segment with wrong bytes out of the index at once, whatever its kind and pins."""
        self._take_out(segment, now, CORRUPT_RULE)

    def evict(self, segment: Segment, now: float, rule: str = OPERATOR_RULE) -> None:
        """Evict a READY segment by order of an operator, or by another `rule`: it leaves the index at once, whatever
        its pins."""
        self._take_out(segment, now, rule)

    def become(self, segment: Segment, kind: Kind, now: float) -> None:
        """Change the kind of an indexed segment."""
        if segment.kind is kind:
            return
        self._pools[segment.pool].move(segment, kind, now)
        self.note(segment)

    def own(self, segment: Segment) -> None:
        """This node owns a segment from now on. Its kind stays."""
        segment.source = None
        self.note(segment)

    def disown(self, segment: Segment, owner: NodeId, now: float) -> None:
        """Another node owns a segment of this node from now on: the copy here is a cached one."""
        segment.source = owner
        self.become(segment, Kind.CACHED, now)
        self.note(segment)

    def recall(self, segment: Segment, accesses: int, hints: Hints, now: float) -> None:
        """Give a segment that is about to be read back from disk what is known of it there."""
        segment.hints = segment.hints.merged_over(hints)
        self._pools[segment.pool].primary.recall(segment.key, accesses, hints, now)

    def pin(self, *segments: Segment) -> None:
        """Keep the slots of the segments as they are until `unpin`, which each `pin` needs once."""
        for segment in segments:
            segment.pins += 1

    def unpin(self, *segments: Segment) -> None:
        """Undo one `pin` of each segment. The last one frees a slot in quarantine."""
        for segment in segments:
            segment.pins -= 1
            if segment.pins:
                continue
            if segment.excluded:
                self._pools[segment.pool].readmit(segment)
            elif segment.state is _GONE:
                pool = self._pools[segment.pool]
                del self._quarantine[segment.place]
                pool.quarantined -= 1
                self._free(pool, segment)

    def touch(
        self, segments: Sequence[Segment], now: float, hints: Hints | None = None, *, for_peer: bool = False
    ) -> None:
        """Count an access of READY segments of one prompt. They come in prompt order and are touched deepest first, so
        that a parent outlives its children. `hints`: those of the request, if it gave any. `for_peer`: see
        `reserve`."""
        if not segments:
            return
        if hints is not None:
            apply_hints(segments, hints)
        at = segments[0].pool
        pool = self._pools[at]
        if not for_peer:
            pool.use(len(segments), now)
        for segment in reversed(segments):
            if segment.pool is not at:
                at = segment.pool
                pool = self._pools[at]
            if segment.excluded:
                pool.readmit(segment)
            pool.orders[segment.kind].touch(segment, now)

    def link(self, keys: Sequence[SegmentKey], segments: Sequence[Segment | None]) -> None:
        """Note which segment each one of a prompt continues. `segments`: those of `keys`, which follow each other; None
        where this node has none."""
        before: SegmentKey | None = None
        for key, segment in zip(keys, segments, strict=False):
            if segment is not None and segment.parent is None and before is not None and segment.state is not _GONE:
                self._pools[segment.pool].link(segment, before)
            before = key

    def hint(self, segments: Sequence[Segment], hints: Hints, now: float) -> None:
        """Apply hints that came after the match to READY segments of one prompt; no access."""
        apply_hints(segments, hints)
        for segment in reversed(segments):
            if not segment.excluded:
                self._pools[segment.pool].orders[segment.kind].hints_changed(segment, now)

    # -- knowledge of the policies

    def last_access(
        self, tenant: TenantId, keys: Sequence[SegmentKey], now: float
    ) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, last access record, seconds since then) of the last of `keys` that this node remembers as
        evicted or refused; None without one."""
        if not keys:
            return None
        # Mostly a tenant has one pool. Segments with the same key have the same size.
        pools = (pool for pool in self._pools.values() if pool.tenant == tenant)
        known = [access for pool in pools if (access := pool.primary.last_access(keys, now)) is not None]
        return max(known, default=None, key=operator.itemgetter(0))

    def accesses(self, segment: Segment) -> int:
        """Returns the counted accesses of a segment of this node, also of one that was just evicted; at least 1."""
        pool = self._pools.get(segment.pool)
        return 1 if pool is None else pool.primary.accesses(segment)

    # -- regions

    def refusal(self, tenant: TenantId, slot_bytes: int, reason: Code) -> Code:
        """Returns `QUOTA` if the tenant's quota is the reason why a reservation was refused, else `reason`."""
        limited = self.regions.at_quota(tenant, slot_bytes) and self.regions.total > self.regions.quota(tenant)
        return Code.QUOTA if limited else reason

    @property
    def pressed(self) -> bool:
        """True if engines of this node found no free slot in some pool since the last `take_pressed`."""
        return bool(self._pressed)

    def take_pressed(self) -> list[PoolId]:
        """Returns the pools in which engines of this node found no free slot since the last call, and forgets them."""
        taken, self._pressed = list(self._pressed), {}
        return taken

    def has_room(self, tenant: TenantId, slot_bytes: int) -> bool:
        """Returns True if the tenant has a free slot of this size, or may take a spare region."""
        pool = self._pools.get(PoolId(tenant, slot_bytes))
        return bool(pool is not None and pool.free) or self.regions.fits(tenant, slot_bytes) is not None

    def has_spare_slots(self, pool: SlotPool) -> bool:
        """Returns True if more slots of the pool are free than two regions have."""
        return len(pool.free) > 2 * self._slots.count(pool.regions[0])

    def least_used(self, pool: SlotPool, passed: Container[int] = ()) -> tuple[int, int] | None:
        """Returns (number of busy segments, region) for the region of `pool` with the fewest busy segments, which are
        pinned or being written; of several the one with the fewest segments. Regions in `passed` are left out. A call
        examines some of the regions, and the next call begins with the others; None if it examined no region."""
        looked = 0
        best: tuple[int, int, int] | None = None
        for region in tuple(pool.regions):
            if looked >= RECLAIM_SLOTS:
                break
            pool.regions.append(pool.regions.pop(0))
            if region in passed or region in pool.withheld:
                continue
            inside = self._slots.in_region(region)
            looked += len(inside)
            found = sum(map(_in_use, inside)), len(inside), region
            if best is None or found < best:
                best = found
        return None if best is None else (best[0], best[2])

    def drain(self, pool: SlotPool, now: float, region: int | None = None) -> tuple[int, int]:
        """Take a region away from a pool, over several calls. The first call begins with `region` (None: the least
        used), which gets no new segments; each call evicts some of its segments. Returns (region, number of its
        segments that are left): without one its memory is unmade."""
        if pool.draining is None:
            chosen = self.least_used(pool) if region is None else (0, region)
            assert chosen is not None
            pool.drain(chosen[1], self._slots.count(chosen[1]))
        assert pool.draining is not None
        inside = self._slots.in_region(pool.draining)
        idle = [segment for segment in inside if not _in_use(segment)][:RECLAIM_EVICTIONS]
        for segment in idle:
            self._evict(segment, now, RECLAIMED_RULE)
        drained = pool.draining
        if len(idle) < len(inside):
            return drained, len(inside) - len(idle)
        pool.drop_region(drained)
        self._slots.drop_region(drained)
        self.regions.give_up(pool.tenant, drained)
        if not pool.regions:
            del self._pools[pool.id]
        return drained, 0

    def stop_draining(self, pool: SlotPool) -> None:
        """Let a pool keep the region that it was giving away: its slots may get new segments again."""
        assert pool.draining is not None
        pool.keep(self._slots.count(pool.draining), self._slots.free_in(pool.draining))

    def grow(self, tenant: TenantId, slot_bytes: int) -> None:
        """Give the tenant a spare region for slots of this size, if its quota leaves room."""
        pool = self._pools.get(PoolId(tenant, slot_bytes))
        if pool is None:
            self.pool(tenant, slot_bytes)
        elif self.regions.fits(tenant, slot_bytes) is not None:
            self._grow(pool)

    # -- inside

    def room(self, pool: SlotPool) -> int:
        """Returns the number of slots that a pool can still get of the memory that no tenant has."""
        return self.regions.room(pool.tenant) // stride_of(pool.slot_bytes)

    def _press(self, pool: PoolId) -> None:
        if len(self._pressed) < MAX_PRESSED:
            self._pressed[pool] = None

    def _free(self, pool: SlotPool, segment: Segment) -> None:
        self._slots.clear(segment.place)
        pool.give_back(segment.place.region, segment.place.slot)

    def _grow(self, pool: SlotPool) -> None:
        """Give the pool a spare region. The caller has checked that there is one and that the tenant may take it."""
        region, nbytes = self.regions.take(*pool.id)
        slots = RegionShape(nbytes, pool.slot_bytes).slots
        self._slots.add_region(region, [0] * slots)
        pool.add_region(region, slots)
        self._opened.append((region, nbytes, pool.slot_bytes, pool.tenant))

    def _admits(self, pool: SlotPool, key: SegmentKey, hints: Hints, now: float, *, again: bool = False) -> bool:
        admitted = pool.primary.admits(key, hints, now)
        if not (admitted or again):
            self._counters.add(NOT_ADMITTED)
            self.removals.add(pool.tenant, key, now, NOT_ADMITTED_RULE)
        return admitted

    def _victim(self, pool: SlotPool, now: float) -> Segment | None:
        """Returns the segment to evict next, of the cached and of the primary copies; None when all are pinned."""
        cached = pool.victim(_CACHED, now)
        on_disk = None if pool.primary.expired(now) else self.spare(*pool.id)
        primary = on_disk or pool.victim(_PRIMARY, now)
        if cached is None or primary is None:
            return cached or primary
        return min(cached, primary, key=lambda segment: pool.rank(segment, now))

    def _evict(self, segment: Segment, now: float, rule: str = "") -> None:
        """Evict a segment for want of memory, and log why. `rule`: the reason, if it is not the order of eviction."""
        self._counters.add(EVICTED)
        children = self._pools[segment.pool].children.get(segment.key, ()) if segment.disk < 0 else ()
        if children:
            in_use = any(child.pins for child in children)
            why = "reclaimed" if rule == RECLAIMED_RULE else "in_use" if in_use else segment.kind.name.lower()
            self._counters.add_for(ORPHANED, len(children), why)
        if not rule and segment.kind is _PRIMARY:
            rule = self._pools[segment.pool].primary.rule(segment) or POLICY_RULE
        self._take_out(segment, now, rule or CACHED_RULE)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, pins, counts, regions and index do not add up. Slow; for tests."""
        for at, pool in self._pools.items():
            segments = [s for s in self.segments() if s.pool == at]
            gone = [s for s in self._quarantine.values() if s.pool == at]
            pool.check_integrity(segments, gone)
            for order in pool.orders:
                if isinstance(order, Forecast):
                    order.check_integrity()
        for tenant, index in self._index.items():
            for key, segment in index.items():
                assert (segment.tenant, segment.key) == (tenant, key)
                assert segment.state is not State.GONE
        self._slots.check_integrity()
        assert {id(s) for s in self._slots} == {id(s) for s in [*self.segments(), *self._quarantine.values()]}
        self.regions.check_integrity({region: pool.tenant for pool in self.pools() for region in pool.regions})


def _in_use(segment: Segment) -> bool:
    """Returns True if the segment is pinned or being written, so that its region cannot be given away."""
    return segment.pins > 0 or segment.kind is _DIRTY
