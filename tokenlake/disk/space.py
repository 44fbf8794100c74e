"""The space of all devices: which slab may grow, and which gives places to another.

A device has one slab per tenant and slot size. A slab grows by one place at a time while the device has room and the
tenant's quota allows it. On a full device a tenant with less than an equal part takes places of those with more, and a
slab takes places of others of its tenant that have more bytes for their use: places follow use, as regions of memory
do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from tokenlake.disk.index import Index
from tokenlake.disk.places import slab_bytes
from tokenlake.disk.queue import Queue
from tokenlake.disk.slab import Device, Slab
from tokenlake.identity import TenantId
from tokenlake.rate import Rate

MAX_SLABS = 0xFFFF
MAX_WRITING_S = 1.0
"""Maximum seconds of writing that one device has under way: further segments wait for the next look."""
SHRUNK, AHEAD_PART = 64, 64
"""Maximum number of places for which other slabs shrink at once, within this part of the device."""
MAX_SHRUNK = 512
"""Maximum number of places by which one call shrinks other slabs."""
CRAMPED_S = 1.0
"""Seconds until a slab that found no places in others seeks them again."""
SLOWER = 2.0
"""A slab gives places to another one of its tenant if it has more than so many times as many bytes for its use."""
USE_HALF_LIFE_S = 3600.0
LEAST_USE = 1.0
"""Bytes per second that count as the use of a slab without any."""
MAX_USES = 4096
"""Limit of the sizes whose use is remembered; that of the size which was used longest ago is forgotten."""
MAX_DEVICE_SLABS, MAX_TENANT_SLABS = 256, 64
"""Limits of the slabs of a device, each of which takes two descriptors, and of those of one tenant there."""

Shrinks = list[tuple[Slab, int]]
"""Slabs, and the number of places by which each has to be shortened."""


class Space:
    """The slabs of all devices. It makes and drops slabs, and names those that have to shrink; `DiskTier`, which knows
    the segments in the places, shortens them."""

    def __init__(self, quotas: Mapping[str, float], is_busy: Callable[[Slab, int], bool], index: Index) -> None:
        """`quotas`: by tenant, the greatest share (0 to 1) of each device that its segments may take; the others have
        no limit. `is_busy`: returns True for a place that has to stay. `index`: has the links of the queues."""
        self.devices: dict[int, Device] = {}
        self.slabs: dict[int, Slab] = {}
        """By number; those of devices that have gone stay until their entries are removed."""
        self._quotas = quotas
        self._is_busy = is_busy
        self._index = index
        self._last = 0
        self._uses: OrderedDict[tuple[TenantId, int], Rate] = OrderedDict()
        """By tenant and slot size: the bytes per second that memory evicts and that are read from disk."""

    def device_to_write(self) -> Device | None:
        """Returns the device whose writes under way end first, of those that have less than `MAX_WRITING_S` of
        them."""
        able = (each for each in self.devices.values() if each.writable)
        free = (each for each in able if each.writing < MAX_WRITING_S * each.write_rate)
        return min(free, key=lambda each: each.load, default=None)

    def slab_on(self, device: Device, tenant: TenantId, slot_bytes: int) -> Slab | None:
        """Returns the slab of this tenant and size on a device, made if necessary; None where the device or the tenant
        has as many as it may have."""
        slab = device.slabs.get((tenant, slot_bytes))
        if slab is None:
            own = sum(each.tenant == tenant for each in device.slabs.values())
            if own >= MAX_TENANT_SLABS or len(device.slabs) >= MAX_DEVICE_SLABS:
                return None
            while self._last in self.slabs:
                self._last = (self._last + 1) % MAX_SLABS
            slab = Slab(self._last, device, tenant, slot_bytes, Queue(self._index))
            self.slabs[slab.number] = device.slabs[tenant, slot_bytes] = slab
        return slab

    def drop_empty(self, slab: Slab) -> None:
        """Drop a slab of a device in use, if it has no places."""
        if not slab.entries:
            del self.slabs[slab.number], slab.device.slabs[slab.tenant, slab.slot_bytes]

    def has_room(self, slab: Slab) -> bool:
        """Returns True if the slab has a free place, or may grow by one."""
        return bool(slab.free) or (slab.device.used + slab.cost(1) <= slab.device.capacity and self._within_quota(slab))

    def _within_quota(self, slab: Slab) -> bool:
        """Returns True if one more place of the slab is within the quota of its tenant."""
        device, quota = slab.device, self._quotas.get(slab.tenant, 1.0)
        if quota >= 1.0:
            return True
        taken = sum(each.nbytes for each in device.slabs.values() if each.tenant == slab.tenant)
        return taken + slab.cost(1) <= quota * device.capacity

    # -- places of other slabs

    def room_for_slab(self, device: Device, tenant: TenantId, slot_bytes: int, now: float) -> Shrinks:
        """Returns what has to shrink so that a tenant with as many slabs as it may have gets one for another size: its
        least used one, if that is used less."""
        own = (each for each in device.slabs.values() if each.tenant == tenant)
        least = min(own, key=lambda each: self.use_of(each, now), default=None)
        use = self._uses.get((tenant, slot_bytes))
        if least is None or not device.writable or use is None or use.at(now) <= SLOWER * self.use_of(least, now):
            return []
        most = min(MAX_SHRUNK, len(least.entries))
        return [(least, next((at for at in range(most) if self._stays(least, at)), most))]

    def room_for_place(self, slab: Slab, now: float) -> Shrinks:
        """Returns which other slabs of the device have to shrink, if this slab may grow by the quota of its tenant:
        those of tenants with more than an equal part, for one with less, and those of the same tenant with more bytes
        for their use. None where that gives no room for one place."""
        device = slab.device
        if now < slab.cramped_until or not self._within_quota(slab):
            return []
        must = device.used + slab.cost(1) - device.capacity
        ahead = max(1, min(SHRUNK, device.capacity // AHEAD_PART // slab.footprint))
        wanted = device.used + slab.cost(ahead) - device.capacity
        plan: Shrinks = []
        given = places = 0
        excess = self._excess(slab)
        for donor in sorted(device.slabs.values(), key=lambda each: -each.nbytes / self.use_of(each, now)):
            least = self._least(donor, slab, excess, now)
            count, nbytes = 0, donor.nbytes
            while given + donor.nbytes - nbytes < wanted and places + count < MAX_SHRUNK:
                fewer = slab_bytes(donor.slot_bytes, len(donor.entries) - count - 1)
                if count == len(donor.entries) or fewer < least or self._stays(donor, count):
                    break
                count, nbytes = count + 1, fewer
            if count:
                plan.append((donor, count))
                given, places = given + donor.nbytes - nbytes, places + count
                if donor.tenant in excess:
                    excess[donor.tenant] -= donor.nbytes - nbytes
        if given >= must:
            return plan
        slab.cramped_until = now + CRAMPED_S
        return []

    def _stays(self, slab: Slab, count: int) -> bool:
        """Returns True if the last place but `count` of the slab is busy."""
        return self._is_busy(slab, len(slab.entries) - count - 1)

    def _excess(self, slab: Slab) -> dict[TenantId, float]:
        """Bytes that other tenants have above an equal part of the device; empty where the tenant of this slab would
        have more than that with one more place."""
        device, taken = slab.device, dict[TenantId, float]()
        for each in device.slabs.values():
            if each.nbytes or each is slab:
                taken[each.tenant] = taken.get(each.tenant, 0) + each.nbytes
        part = device.capacity / len(taken)
        own = taken.pop(slab.tenant) + slab.cost(1)
        return {tenant: nbytes - part for tenant, nbytes in taken.items()} if own <= part else {}

    def _least(self, donor: Slab, slab: Slab, excess: Mapping[TenantId, float], now: float) -> float:
        """Bytes that `donor` keeps when another slab of its device needs places."""
        if donor.tenant != slab.tenant:
            return donor.nbytes - max(0.0, excess.get(donor.tenant, 0.0))
        if donor is slab:
            return donor.nbytes
        fair = (slab.nbytes + slab.cost(1)) * self.use_of(donor, now) / self.use_of(slab, now)
        return fair if donor.nbytes > SLOWER * fair else donor.nbytes

    # -- use

    def use_of(self, slab: Slab, now: float) -> float:
        """Bytes per second of the slab's size that memory evicted and that were read from disk, at least a little."""
        use = self._uses.get((slab.tenant, slab.slot_bytes))
        return LEAST_USE + (use.at(now) if use is not None else 0.0)

    def count_use(self, tenant: TenantId, slot_bytes: int, nbytes: int, now: float) -> None:
        """Count bytes of a size that memory evicted or that were read from disk."""
        use = self._uses.get((tenant, slot_bytes))
        if use is None:
            use = self._uses[tenant, slot_bytes] = Rate(USE_HALF_LIFE_S)
            if len(self._uses) > MAX_USES:
                self._uses.popitem(last=False)
        self._uses.move_to_end((tenant, slot_bytes))
        use.add(nbytes, now)
