"""Memory that changes hands: a region has one tenant and one slot size for life, so it is emptied and replaced.

::

    wanted: no region yet, or less than a fair part --> somebody gives one: emptied, at once or bit by bit
        --> ReplaceRegion --> RegionReady --> it belongs to whom it was taken for
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.instructions import ReplaceRegion
from tokenlake.core.sessions import Sessions
from tokenlake.identity import TenantId
from tokenlake.store import SlotPool

__all__ = ["Regions"]

PATIENCE_S = 2.0
"""So long nobody else loses memory while what is to be given is in use: leases mostly end sooner."""

Claim = tuple[TenantId, int]
"""(tenant, slot size) that wants a region."""


class Regions:
    """One region changes hands at a time."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._claim: Claim | None = None
        """For whom a region is replaced."""
        self._giving: tuple[SlotPool, Claim, float] | None = None
        """Whose region is emptied bit by bit, for whom, since when."""
        self._replacing: ReplaceRegion | None = None
        """What was asked for and is not there."""
        self._replaced = 0

    def look(self) -> None:
        """Does somebody want memory, and can somebody give some? Asked when an engine joins, and from time to time:
        what is to be given may be in use for now."""
        if self._replacing is not None:
            return
        if self._giving is not None:
            self._drain(*self._giving)
            if self._giving is None or self._context.now < self._giving[-1] + PATIENCE_S:
                return
        used = list(dict.fromkeys((session.tenant, session.slot_bytes) for session in self._sessions))
        claims = list(dict.fromkeys([*used, *self._context.store.take_unserved()]))
        pools = list(self._context.store.pools())
        among = list(dict.fromkeys([*(tenant for tenant, _ in claims), *(pool.tenant for pool in pools)]))
        for claim in claims:
            if self._serve(claim, used, among):
                return

    def _serve(self, claim: Claim, used: Sequence[Claim], among: Sequence[TenantId]) -> bool:
        """False where it needs nothing, or nobody can give anything."""
        store = self._context.store
        newcomer = store.pool(*claim) is None
        idle = [pool for pool in store.pools() if (pool.tenant, pool.slot_bytes) not in used]
        if self._giving is None and store.below_fair_share(*claim, among):
            rich = [
                pool
                for pool in store.pools()
                if store.regions.above_fair_share(pool.tenant, among) and (pool in idle or len(pool.regions) > 1)
            ]
            if rich:
                giver = max(rich, key=lambda pool: (pool in idle, len(pool.regions)))
                self._drain(giver, claim, self._context.now)
                return True
        if not newcomer:
            return False
        # Nobody has more than a fair part: who has no memory for such slots gets what no connected engine uses.
        for pool in idle:
            if pool.draining is not None or (pool.tenant != claim[0] and store.regions.at_quota(claim[0])):
                continue
            free = len(pool.free)
            self._replace(store.reclaim(pool, self._context.now), claim)
            if self._replacing is not None or len(pool.free) > free:
                # It gave a region, or a part of one for now: no other pool has to lose anything.
                return True
        return False

    def _drain(self, pool: SlotPool, claim: Claim, since: float) -> None:
        region = self._context.store.drain(pool, self._context.now)
        self._giving = (pool, claim, since) if region is None else None
        self._replace(region, claim)

    def _replace(self, region: int | None, claim: Claim) -> None:
        if region is None:
            return
        fresh = self._context.config.regions + self._replaced
        self._claim, self._replacing = claim, ReplaceRegion(region, fresh)
        self._replaced += 1
        self._context.emit(self._replacing)

    def check_ready(self, region: int) -> None:
        """Raises `ValueError` when this region was not asked for. Changes nothing."""
        wanted = self._replacing
        if wanted is None or region != wanted.fresh:
            raise ValueError(f"region {region} is there, which was not asked for")

    def ready(self, region: int) -> None:
        """The fresh memory is there."""
        claim, self._claim, self._replacing = self._claim, None, None
        self._context.store.add_spare(region, claim)
        self.look()
