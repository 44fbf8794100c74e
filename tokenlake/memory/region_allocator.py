"""The memory of a node in bytes: what each tenant has, what is ready to be given out, what has to be made first.

::

    unmade --make--> making --made--> spare --take--> a tenant's region
      ^                                 |  (the rest of it)    |
      +----------- unmake --------------+----------------------+ give_up

A region has a tenant and a slot size for life. It gets as many bytes as its slots take; what is left of the spare
region becomes unmade, and so does the memory of a region that ends: the kernel gives it out again for the next region,
of any size, so that no memory is lost between regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenlake.identity import TenantId
from tokenlake.memory.region import RegionShape, stride_of


class RegionAllocator:
    """Counts the bytes of each tenant; the caller knows which pool has which region.

    A quota is a share of the node's memory, at least the size of one region: the most that a tenant may have. Up to its
    quota a tenant may use memory that no other tenant wants. Where the quotas of the tenants that want memory exceed
    all memory, each of them has a fair share in proportion to its quota.
    """

    def __init__(self, regions: int, region_bytes: int, quotas: Mapping[str, float], *, made: bool = True) -> None:
        """`regions`: number of regions of `region_bytes` that the memory is as large as. `made`: they exist and are
        spare, numbered from 0; otherwise all memory is unmade. `quotas`: by tenant; a tenant without one may have
        all."""
        self.region_bytes = region_bytes
        self.total = regions * region_bytes
        self._quotas = {tenant: max(region_bytes, int(share * self.total)) for tenant, share in quotas.items()}
        self._spare = dict.fromkeys(range(regions), region_bytes) if made else {}
        self._making: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of each region that a tenant has."""
        self._taken: dict[TenantId, int] = {}
        """Bytes of each tenant; tenants without a region have no entry."""
        self._next = len(self._spare)
        self.unmade = 0 if made else self.total
        """Bytes that belong to no region."""
        self.free = self.total
        """Bytes that no tenant has: those that are unmade, being made or spare."""
        self.excess = 0
        """Bytes of kept regions beyond `total`, because the node has less memory than before."""
        self._kept: dict[TenantId, None] = {}
        """The tenants with kept regions, which may exceed their quotas until these are given up."""

    @property
    def spare(self) -> Mapping[int, int]:
        """The bytes of each region that is ready and belongs to no tenant, by number."""
        return self._spare

    @property
    def making(self) -> Mapping[int, int]:
        """The bytes of each region that is being made, by number."""
        return self._making

    def size(self, region: int) -> int:
        """Returns the bytes of a region that a tenant has."""
        return self._sizes[region]

    def quota(self, tenant: TenantId) -> int:
        """Returns the number of bytes that the tenant may have at most."""
        return self._quotas.get(tenant, self.total)

    def fair_share(self, tenant: TenantId, among: Iterable[TenantId]) -> int:
        """Returns the bytes to which the tenant is entitled while the tenants `among` want memory: those of whole
        regions, at least of one."""
        wanted = sum(map(self.quota, among))
        if wanted <= self.total:
            return self.quota(tenant)
        return max(1, self.total * self.quota(tenant) // wanted // self.region_bytes) * self.region_bytes

    def taken(self, tenant: TenantId) -> int:
        """Returns the bytes that the tenant has."""
        return self._taken.get(tenant, 0)

    def room(self, tenant: TenantId) -> int:
        """Returns the bytes that the tenant may still take of those that no tenant has."""
        return max(0, min(self.free, self.quota(tenant) - self.taken(tenant)))

    def at_quota(self, tenant: TenantId, slot_bytes: int) -> bool:
        """Returns True if the tenant's quota leaves no room for a further slot of this size."""
        return self.taken(tenant) + stride_of(slot_bytes) > self.quota(tenant)

    def fits(self, tenant: TenantId, slot_bytes: int) -> int | None:
        """Returns the number of the spare region that `take` would give to the tenant, the smallest with room for a
        slot; None without one."""
        if not self._spare:
            return None
        stride = stride_of(slot_bytes)
        if stride > self.room(tenant):
            return None
        fitting = (number for number, nbytes in self._spare.items() if nbytes >= stride)
        return min(fitting, key=self._spare.__getitem__, default=None)

    def take(self, tenant: TenantId, slot_bytes: int) -> tuple[int, int]:
        """Give the tenant the spare region that `fits` names, which must exist, for slots of this size. Returns its
        number and its bytes: those of the slots; the rest of it becomes unmade."""
        number = self.fits(tenant, slot_bytes)
        assert number is not None
        whole = self._spare.pop(number)
        nbytes = RegionShape(min(whole, self.room(tenant)), slot_bytes).fitted()
        self.unmade += whole - nbytes
        self.free -= nbytes
        self._sizes[number] = nbytes
        self._taken[tenant] = self.taken(tenant) + nbytes
        return number, nbytes

    def keep(self, tenant: TenantId, region: int, nbytes: int) -> None:
        """The tenant has had a region since before the start, with its memory."""
        paid = min(nbytes, self.unmade)
        self.unmade -= paid
        self.free -= paid
        self.excess += nbytes - paid
        self._sizes[region] = nbytes
        self._taken[tenant] = self.taken(tenant) + nbytes
        self._kept[tenant] = None
        self.number_from(region + 1)

    def keep_spare(self, region: int, nbytes: int) -> bool:
        """There has been a spare region since before the start. Returns False if the memory has no room for it."""
        self.number_from(region + 1)
        if nbytes > self.unmade:
            return False
        self.unmade -= nbytes
        self._spare[region] = nbytes
        return True

    def number_from(self, region: int) -> None:
        """New regions get at least this number."""
        self._next = max(self._next, region)

    def give_up(self, tenant: TenantId, region: int) -> None:
        """Take a region away from the tenant: its memory becomes unmade, without the bytes in excess."""
        nbytes = self._sizes.pop(region)
        beyond = min(self.excess, nbytes)
        self.excess -= beyond
        self.unmade += nbytes - beyond
        self.free += nbytes - beyond
        self._taken[tenant] -= nbytes
        if not self._taken[tenant]:
            del self._taken[tenant]
            self._kept.pop(tenant, None)

    def make(self, nbytes: int) -> int:
        """Begin a region of `nbytes` of the unmade memory. Returns its number, which no earlier region had."""
        assert 0 < nbytes <= self.unmade
        number, self._next = self._next, self._next + 1
        self._making[number] = nbytes
        self.unmade -= nbytes
        return number

    def made(self, region: int) -> None:
        """The memory of a region that was being made is there: the region is spare."""
        self._spare[region] = self._making.pop(region)

    def unmake(self, region: int) -> None:
        """End a spare region, so that its memory can become part of another one."""
        self.unmade += self._spare.pop(region)

    def check_integrity(self, regions: Mapping[int, TenantId]) -> None:
        """Raises AssertionError when bytes are lost or counted twice. `regions`: the tenant of each region in use."""
        assert self._sizes.keys() == regions.keys()
        taken: dict[TenantId, int] = {}
        for region, tenant in regions.items():
            taken[tenant] = taken.get(tenant, 0) + self._sizes[region]
        assert taken == self._taken
        assert all(count <= self.quota(tenant) or tenant in self._kept for tenant, count in taken.items())
        assert self.free == self.unmade + sum(self._spare.values()) + sum(self._making.values())
        assert self.free + sum(taken.values()) == self.total + self.excess
        assert not (self.excess and self.free)
