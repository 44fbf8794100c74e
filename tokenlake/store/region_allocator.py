"""The number of memory regions of each tenant: spare regions, quotas and fair shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenlake.identity import TenantId

__all__ = ["RegionAllocator"]


class RegionAllocator:
    """Counts the memory regions of each tenant; the caller knows which pool has which region.

    A quota is a share of the node's memory, in whole regions, at least one: the most that a tenant may have. Up to its
    quota a tenant may use memory that no other tenant wants. Where the quotas of the tenants that want memory exceed
    all memory, each of them has a fair share in proportion to its quota.
    """

    def __init__(self, regions: Sequence[int], quotas: Mapping[str, float]) -> None:
        """`regions`: ids of all regions, spare at first. `quotas`: by tenant; a tenant without one may have all."""
        self.total = len(regions)
        self._spare = list(regions)
        # The product is rounded to 6 places before it is cut to an integer, so that 0.7 of 10 regions is 7 and not 6.
        self._quotas = {tenant: max(1, int(round(share * self.total, 6))) for tenant, share in quotas.items()}
        self._taken: dict[TenantId, int] = {}
        """Number of regions of each tenant; tenants without a region have no entry."""

    @property
    def spare(self) -> int:
        """Number of regions that belong to no tenant."""
        return len(self._spare)

    def quota(self, tenant: TenantId) -> int:
        """Returns the number of regions that the tenant may have at most."""
        return self._quotas.get(tenant, max(1, self.total))

    def fair_share(self, tenant: TenantId, among: Iterable[TenantId]) -> int:
        """Returns the number of regions to which the tenant is entitled while the tenants `among` want memory."""
        wanted = sum(map(self.quota, among))
        if wanted <= self.total:
            return self.quota(tenant)
        return max(1, self.total * self.quota(tenant) // wanted)

    def taken(self, tenant: TenantId) -> int:
        """Returns the number of regions that the tenant has."""
        return self._taken.get(tenant, 0)

    def room(self, tenant: TenantId) -> int:
        """Returns the number of spare regions that the tenant may take."""
        return max(0, min(len(self._spare), self.quota(tenant) - self._taken.get(tenant, 0)))

    def at_quota(self, tenant: TenantId) -> bool:
        """Returns True if the tenant has as many regions as its quota allows."""
        return self.taken(tenant) >= self.quota(tenant)

    def above_fair_share(self, tenant: TenantId, among: Iterable[TenantId]) -> bool:
        """Returns True if the tenant has more regions than its fair share among the tenants `among`."""
        return self.taken(tenant) > self.fair_share(tenant, among)

    def take(self, tenant: TenantId) -> int:
        """Give the tenant a spare region, which must exist. Returns the id of the region."""
        self._taken[tenant] = self.taken(tenant) + 1
        return self._spare.pop(0)

    def give_up(self, tenant: TenantId) -> None:
        """Count one region less for the tenant. The caller replaces the memory of the region before it calls
        `add_spare`."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    def add_spare(self, region: int, *, first: bool) -> None:
        """Add a spare region, whose memory the caller has allocated anew. `first`: it is given out next, else after the
        other ones."""
        self._spare.insert(0 if first else len(self._spare), region)

    def check_integrity(self, taken: Iterable[TenantId]) -> None:
        """Raises AssertionError when the counts are not those of `taken`, the tenants of all regions in use."""
        counts: dict[TenantId, int] = {}
        for tenant in taken:
            counts[tenant] = counts.get(tenant, 0) + 1
        assert counts == self._taken
        assert sum(counts.values()) + len(self._spare) <= self.total
