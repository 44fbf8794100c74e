"""How many regions each tenant may have, and whose turn it is to give one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenlake.identity import TenantId

__all__ = ["Quotas"]


class Quotas:
    """Shares of a node's memory, in whole regions, at least one each.

    A quota is the most a tenant may have. Up to it a tenant may use what nobody else wants; where quotas together are
    more than the memory, those who want some have a fair part each, in proportion to their quotas.
    """

    def __init__(self, regions: int, shares: Mapping[str, float]) -> None:
        """`shares`: by tenant; who is not in it may have all."""
        self._regions = regions
        # Rounded first: 0.7 of 10 is 7.
        self._most = {tenant: max(1, int(round(share * regions, 6))) for tenant, share in shares.items()}

    def most(self, tenant: TenantId) -> int:
        """Regions that the tenant may have."""
        return self._most.get(tenant, max(1, self._regions))

    def fair(self, tenant: TenantId, among: Iterable[TenantId]) -> int:
        """Regions that are the tenant's as soon as it wants them, where the tenants `among` want memory."""
        wanted = sum(map(self.most, among))
        if wanted <= self._regions:
            return self.most(tenant)
        return max(1, self._regions * self.most(tenant) // wanted)
