"""Memory follows use: which regions are made, and which pool gives a region up.

A pool is pressed when an engine of this node wants a slot in it and none is free. It gets memory that no tenant has,
and where there is none a region of another pool:

- of any pool with two regions of free slots;
- of another tenant, if that one does not use its memory, or if it has more than its fair share and this tenant less;
- of the same tenant, if that pool has no engines, or has more than twice as many slots for its use as the pressed one.

A pool of a connected engine keeps one region. Memory that the daemon before left is given back where it exceeds the
memory of this one or the quota of its tenant, or where the tenant is not configured any more.

::

    --> a region of the other pool is emptied, at once or bit by bit
    --> CloseRegion, MakeRegion --> RegionReady --> the new region belongs to the pressed pool
"""

from __future__ import annotations

import math
from collections.abc import Collection

from tokenlake.core.context import Context
from tokenlake.core.engines.pins import Pins
from tokenlake.core.engines.sessions import Sessions
from tokenlake.core.instructions import CloseRegion, MakeRegion
from tokenlake.core.kept import Kept
from tokenlake.identity import TenantId
from tokenlake.memory import PoolId, SlotPool
from tokenlake.memory.region import RegionShape, stride_of

UNUSED_S = 30.0
"""Seconds without a read or write of its engines after which a tenant does not count as using its memory."""
SLOWER = 2.0
"""A pool gives up a region to a pool of its tenant if its engines take this many times as long to use as many segments
as it has slots. At 1, two pools would exchange regions for ever."""
LOOK_S = 0.02
"""Minimum seconds between two looks for pressed pools: a look takes up to 0.1 ms for each pool."""
DRAIN_ALONE_S = 2.0
"""Seconds for which no second pool has to give up memory while a region with slots in use is being emptied; most leases
end sooner."""
PATIENCE_S = 60.0
"""Seconds after which a region that is being emptied and still has slots in use is given up for another region, even if
that region has slots in use too. A region without slots in use is chosen at once."""


class Regions:
    """Decides which regions are made, and which is emptied for a pressed pool. A node empties one region at a time."""

    def __init__(self, context: Context, sessions: Sessions, pins: Pins, kept: Kept) -> None:
        self._context = context
        self._kept = kept
        self._sessions = sessions
        self._pins = pins
        self._draining: tuple[SlotPool, PoolId | None, float] | None = None
        """The region that is being emptied bit by bit: (its pool, the pool that gets its memory, None for a region that
        is given back, time at which it began)."""
        self._passed: set[int] = set()
        """Regions that were chosen for `PATIENCE_S` and did not become empty."""
        self._making: dict[int, PoolId] = {}
        """The pools that get regions which the driver is making, by region."""
        self._looked = -math.inf
        """Time in seconds of the last look."""
        self._short: PoolId | None = None
        """The pool for which a region was emptied that has less memory than one of its slots takes."""

    def follow(self) -> None:
        """Called after each event: look, if a pool is pressed, at most once in `LOOK_S`."""
        if self._context.store.pressed and self._context.now >= self._looked + LOOK_S:
            self.look()

    def look(self) -> None:
        """Make regions of memory that no tenant has, and begin to empty one for a pressed pool. Called when an engine
        joins, when a region is ready, and in every gossip interval, because slots of a region may be in use for a
        while."""
        self._looked = self._context.now
        used = dict.fromkeys(PoolId(session.tenant, session.slot_bytes) for session in self._sessions)
        self._make_spare(used)
        if self._draining is not None:
            self._drain(*self._draining)
            if self._draining is not None:
                self._choose_another(*self._draining, used)
            if self._draining is None or self._context.now < self._draining[-1] + DRAIN_ALONE_S:
                return
        store = self._context.store
        short = [self._short] if self._short is not None else []
        self._short = None
        without = [pool for pool in used if store.pool(*pool) is None]
        for pressed in dict.fromkeys([*short, *without, *store.take_pressed()]):
            if store.has_room(*pressed) or pressed in self._making.values() or self._make_for(pressed):
                continue
            if self._draining is None and (giver := self._giver(pressed, used)) is not None:
                self._drain(giver, pressed, self._context.now)
        if self._draining is None and (giver := self._giver(None, used)) is not None:
            self._drain(giver, None, self._context.now)
        for pool in used:
            # A large slot fits no spare region: one that it fits is made before the pool needs it.
            if not store.regions.making and store.regions.fits(*pool) is None:
                self._gather(pool)

    # -- memory that no tenant has

    def _unit(self, slot_bytes: int) -> int:
        """Returns the bytes of a new region: the setting, rounded up to whole slots of this size."""
        stride = stride_of(slot_bytes)
        return -(-self._context.config.region_bytes // stride) * stride

    def _make_spare(self, used: Collection[PoolId]) -> None:
        """Make regions of unmade memory, some at a time, in whole slots of the largest size in use. Memory that
        takes no slot of any pool in use stays unmade."""
        regions = self._context.store.regions
        sizes = [pool.slot_bytes for pool in used]
        unit, least = self._unit(max(sizes, default=1)), stride_of(min(sizes, default=1))
        while regions.unmade and self._short is None and len(regions.making) < self._context.config.makers:
            nbytes = min(unit, regions.unmade)
            if nbytes < unit and (nbytes < least or regions.making or regions.spare):
                return
            self._make(nbytes)

    def _gather(self, pool: PoolId) -> int | None:
        """Make a region with room for a slot of the pool out of unmade memory and of spare regions, which are all too
        small. Returns its number; None where the memory that is there, or the quota, has no room."""
        regions = self._context.store.regions
        room = regions.room(pool.tenant)
        if stride_of(pool.slot_bytes) > room:
            return None
        unit = min(self._unit(pool.slot_bytes), room)
        for region in list(regions.spare):
            if regions.unmade < unit:
                regions.unmake(region)
                self._context.emit(CloseRegion(region))
        nbytes = RegionShape(min(unit, regions.unmade), pool.slot_bytes).fitted()
        return self._make(nbytes) if nbytes else None

    def _make_for(self, pressed: PoolId) -> bool:
        """Make a region for a pool that no spare region fits. Returns False where there is no memory for it and none is
        being made."""
        region = self._gather(pressed)
        if region is not None:
            self._making[region] = pressed
        return region is not None or (
            bool(self._context.store.regions.making)
            and stride_of(pressed.slot_bytes) <= self._context.store.regions.room(pressed.tenant)
        )

    def _make(self, nbytes: int) -> int:
        region = self._context.store.regions.make(nbytes)
        self._context.emit(MakeRegion(region, nbytes))
        return region

    def ready(self, region: int) -> None:
        """The driver has made a region: give it to the pool for which it was made, and look for the next one to
        make."""
        store = self._context.store
        store.regions.made(region)
        pool = self._making.pop(region, None)
        if pool is not None:
            store.grow(*pool)
        self.look()

    # -- memory of other pools

    def _surplus(self) -> SlotPool | None:
        """Returns the pool that has to give a kept region back, the emptiest of them; None where no pool has to."""
        regions, unwanted = self._context.store.regions, self._kept.unwanted
        over = [
            pool
            for pool in self._context.store.pools()
            if pool.may_drain
            and (regions.excess or pool.tenant in unwanted or regions.taken(pool.tenant) > regions.quota(pool.tenant))
        ]
        first = [pool for pool in over if pool.tenant in unwanted]
        return max(first or over, key=lambda pool: len(pool.free) / max(1, pool.slots), default=None)

    def _giver(self, pressed: PoolId | None, used: Collection[PoolId]) -> SlotPool | None:
        """Returns the pool that has to give up a region for a pressed pool: one without engines first, then the one
        with most slots for its use. None where no pool has to. `pressed`: None for the pool that has to give a region
        back."""
        if pressed is None:
            return self._surplus()
        store, now = self._context.store, self._context.now
        own = next((pool for pool in store.pools() if pool.id == pressed), None)
        turnover_s = own.turnover_s(now) if own is not None else 0.0
        active = dict.fromkeys(pool.tenant for pool in store.pools() if pool.id in used and now < pool.used + UNUSED_S)
        among = list(dict.fromkeys([*active, pressed.tenant]))
        needs, regions = stride_of(pressed.slot_bytes), store.regions
        entitled = regions.taken(pressed.tenant) + needs <= regions.fair_share(pressed.tenant, among)
        allowed = not regions.at_quota(*pressed)
        chosen: tuple[tuple[bool, float], SlotPool] | None = None
        for pool in store.pools():
            idle, seconds = pool.id not in used, pool.turnover_s(now)
            if pool is own or not pool.may_drain or (not idle and len(pool.regions) == 1):
                continue
            if store.has_spare_slots(pool):
                gives = allowed or pool.tenant == pressed.tenant
            elif pool.tenant == pressed.tenant:
                gives = idle or seconds > SLOWER * turnover_s
            elif pool.tenant in active:
                gives = entitled and self._above_share(pool, among)
            else:
                gives = entitled
            if gives and (chosen is None or (idle, seconds) > chosen[0]):
                chosen = (idle, seconds), pool
        return None if chosen is None else chosen[1]

    def _above_share(self, pool: SlotPool, among: Collection[TenantId]) -> bool:
        """Returns True if the pool's tenant has its fair share also without a region of the pool."""
        regions = self._context.store.regions
        return regions.taken(pool.tenant) - regions.size(pool.regions[0]) >= regions.fair_share(pool.tenant, among)

    def _drain(self, pool: SlotPool, pressed: PoolId | None, since: float, region: int | None = None) -> None:
        """Begin to empty a region of `pool`, or go on with it: in slices, as long as it gets emptier."""
        self._draining = pool, pressed, since
        before = math.inf

        def work() -> bool:
            nonlocal before
            if self._draining is None or self._draining[0] is not pool:
                return False
            if pool.draining is not None:
                self._pins.yield_region(pool.draining)
            drained, left = self._context.store.drain(pool, self._context.now, region)
            if left:
                before, emptier = left, left < before
                return emptier
            self._draining = None
            self._context.emit(CloseRegion(drained))
            if pressed is not None and not self._make_for(pressed):
                self._short = pressed
            return False

        self._context.in_slices(work)

    def _choose_another(self, pool: SlotPool, pressed: PoolId | None, since: float, used: Collection[PoolId]) -> None:
        """Empty another region than the one that is being emptied, which has slots in use. Otherwise one lease that is
        never released would keep all pools from getting memory."""
        assert pool.draining is not None
        store, now = self._context.store, self._context.now
        late = now >= since + PATIENCE_S
        if late:
            self._passed.add(pool.draining)
        giver = self._giver(pressed, used)
        found = None if giver is None else store.least_used(giver, self._passed | {pool.draining})
        if giver is not None and found is not None and (late or not found[0]):
            store.stop_draining(pool)
            self._drain(giver, pressed, now, found[1])
        elif late:
            # All regions were in use for long: begin again with the first one.
            self._passed.clear()
