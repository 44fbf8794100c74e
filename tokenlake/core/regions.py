"""Moves memory between tenants. A region keeps its tenant and slot size for life, so to move its memory the node
empties the region and replaces it by a new one.

::

    a tenant has no region, or less than its fair share, or one of its slot sizes less than an equal part
        --> a region of another pool is emptied, at once or bit by bit
        --> ReplaceRegion --> RegionReady --> the new region belongs to that tenant
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.instructions import ReplaceRegion
from tokenlake.core.sessions import Sessions
from tokenlake.identity import TenantId
from tokenlake.store import SlotPool

__all__ = ["Regions"]

DRAIN_ALONE_S = 2.0
"""Seconds for which no second pool has to give up memory while a region with slots in use is being emptied; most leases
end sooner."""
PATIENCE_S = 60.0
"""Seconds after which a region that is being emptied and still has slots in use is given up for another region, even if
that region has slots in use too. A region without slots in use is chosen at once."""

Demand = tuple[TenantId, int]
"""(tenant, bytes of a slot) for which engines need a region of the node's memory."""


class Regions:
    """Decides which region is emptied, and which tenant and slot size get a new region in its place. A node does this
    for one region at a time."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._draining: tuple[SlotPool, Demand, float] | None = None
        """The region that is being emptied bit by bit: (its pool, tenant and slot size that get its memory, time at
        which it began)."""
        self._passed: set[int] = set()
        """Regions that were chosen for `PATIENCE_S` and did not become empty."""
        self._replacing: tuple[int, Demand] | None = None
        """The number of the new region that the driver is making, and the tenant and slot size that get it."""
        self._replaced = 0

    def look(self) -> None:
        """Begin to replace a region if a tenant needs one and another pool can give one up. Called when an engine
        joins, and in every gossip interval because slots of a region may be in use for a while."""
        if self._replacing is not None:
            return
        used = list(dict.fromkeys((session.tenant, session.slot_bytes) for session in self._sessions))
        if self._draining is not None:
            self._drain(*self._draining)
            if self._draining is not None:
                self._choose_another(*self._draining, used)
            if self._draining is None or self._context.now < self._draining[-1] + DRAIN_ALONE_S:
                return
        demands = list(dict.fromkeys([*used, *self._context.store.take_unserved()]))
        among = self._among(demands)
        for demand in demands:
            if self._serve(demand, used, among):
                return

    def _among(self, demands: Sequence[Demand]) -> list[TenantId]:
        """Returns the tenants that share the memory: those of `demands` and those that have memory."""
        have = (pool.tenant for pool in self._context.store.pools())
        return list(dict.fromkeys([*(tenant for tenant, _ in demands), *have]))

    def _givers(self, demand: Demand, used: Sequence[Demand], among: Sequence[TenantId]) -> list[SlotPool]:
        """Returns the pools that may have to give up a region for `demand`: those of tenants with more than their fair
        share, pools without engines first, then those with most regions; or, if the tenant of `demand` has its fair
        share, the one of its own pools that has most."""
        store = self._context.store
        if store.regions.taken(demand[0]) >= store.regions.fair_share(demand[0], among):
            layouts = len({slot_bytes for tenant, slot_bytes in (*used, demand) if tenant == demand[0]})
            own = store.above_part(*demand, layouts)
            return [] if own is None else [own]
        idle = {pool.id: (pool.tenant, pool.slot_bytes) not in used for pool in store.pools()}
        rich = [
            pool
            for pool in store.pools()
            if store.regions.above_fair_share(pool.tenant, among) and (idle[pool.id] or len(pool.regions) > 1)
        ]
        return sorted(rich, key=lambda pool: (idle[pool.id], len(pool.regions)), reverse=True)

    def _serve(self, demand: Demand, used: Sequence[Demand], among: Sequence[TenantId]) -> bool:
        """Returns True if another pool begins to give up a region for `demand`. `used`: tenants and slot sizes of the
        connected engines. `among`: the tenants that share the memory."""
        store = self._context.store
        if self._draining is None and not store.has_room(*demand):
            givers = self._givers(demand, used, among)
            if givers:
                self._drain(givers[0], demand, self._context.now)
                return True
        if store.pool(*demand) is not None:
            return False
        # No tenant has more than its fair share of the memory. A tenant without any slot of this size gets memory that
        # no connected engine uses.
        for pool in [pool for pool in store.pools() if (pool.tenant, pool.slot_bytes) not in used]:
            if pool.draining is not None or (pool.tenant != demand[0] and store.regions.at_quota(demand[0])):
                continue
            free = len(pool.free)
            self._replace(store.reclaim(pool, self._context.now), demand)
            if self._replacing is not None or len(pool.free) > free:
                # The pool gave up a region, or evicted a part of one, so this call takes memory from no other pool.
                return True
        return False

    def _drain(self, pool: SlotPool, demand: Demand, since: float, region: int | None = None) -> None:
        given = self._context.store.drain(pool, self._context.now, region)
        self._draining = (pool, demand, since) if given is None else None
        self._replace(given, demand)

    def _choose_another(self, pool: SlotPool, demand: Demand, since: float, used: Sequence[Demand]) -> None:
        """Empty another region than the one that is being emptied, which has slots in use. Otherwise one lease that is
        never released would keep all tenants from getting memory."""
        assert pool.draining is not None
        store, now = self._context.store, self._context.now
        late = now >= since + PATIENCE_S
        if late:
            self._passed.add(pool.draining)
        for giver in self._givers(demand, used, self._among([*used, demand])):
            found = store.least_used(giver, self._passed | {pool.draining})
            if found is not None and (late or not found[0]):
                store.stop_draining(pool)
                self._drain(giver, demand, now, found[1])
                return
        if late:
            # All regions were in use for long: begin again with the first one.
            self._passed.clear()

    def _replace(self, region: int | None, demand: Demand) -> None:
        if region is None:
            return
        fresh = self._context.config.regions + self._replaced
        self._replacing = fresh, demand
        self._replaced += 1
        self._context.emit(ReplaceRegion(region, fresh))

    def check_ready(self, region: int) -> None:
        """Raises `ValueError` for a region that no `ReplaceRegion` names. Changes nothing."""
        if self._replacing is None or region != self._replacing[0]:
            raise ValueError(f"region {region} is ready, and no ReplaceRegion asked for it")

    def ready(self, region: int) -> None:
        """The driver has made the new region: give it to the tenant for which it was made, and look for the next region
        to replace."""
        assert self._replacing is not None
        self._context.store.add_spare(region, self._replacing[1])
        self._replacing = None
        self.look()
