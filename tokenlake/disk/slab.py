"""The slabs of a device: the places of one tenant and slot size each, and the segments in them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

from tokenlake.disk.admission import DailyBudget
from tokenlake.disk.places import footprint, slab_bytes
from tokenlake.disk.queue import Queue
from tokenlake.identity import TenantId
from tokenlake.memory import Segment


class Slab:
    """The places of one tenant and slot size on one device."""

    def __init__(self, number: int, device: Device, tenant: TenantId, slot_bytes: int, queue: Queue) -> None:
        self.number = number
        self.device = device
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.footprint = footprint(slot_bytes)
        """Bytes of a place and its record."""
        self.free = array("I")
        """Free places; the last one is used next."""
        self.entries = array("I")
        """By place: its entry + 1; 0 for a free place."""
        self.generations = array("I")
        """By place: the number of segments that it has had."""
        self.newest = 0
        """The greatest generation of the places that were found on the device, and of those by which the slab was
        shortened. New places begin with it."""
        self.queue = queue
        """The entries that were on disk alone at some time, in the order in which they may leave."""
        self.resident: OrderedDict[int, tuple[Segment, float]] = OrderedDict()
        """The segments of the slab that are in memory too, by entry, and the time of an access of each. The order is
        that of these times, approximately."""
        self.cramped_until = 0.0
        """Time before which no place is sought in other slabs."""
        self.void = False
        """True once the device has gone: its entries are not found any more."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slab and its table."""
        return slab_bytes(self.slot_bytes, len(self.entries))

    def cost(self, places: int) -> int:
        """Bytes by which the slab grows with so many further places."""
        return slab_bytes(self.slot_bytes, len(self.entries) + places) - self.nbytes

    def grow(self, places: int, generation: int) -> None:
        """Add places, whose segments so far are counted by `generation`. The caller fills them or adds them to
        `free`."""
        self.device.used += self.cost(places)
        self.entries.extend([0] * places)
        self.generations.extend([generation] * places)

    def take(self) -> int:
        """Take a free place of the slab, which has one or may grow."""
        if self.free:
            return self.free.pop()
        self.grow(1, self.newest)
        return len(self.entries) - 1


class Device:
    """One device, as the file layer reported it."""

    def __init__(self, number: int, read_rate: float, write_rate: float) -> None:
        self.number = number
        self.capacity = 0
        self.read_rate, self.write_rate = max(1.0, read_rate), max(1.0, write_rate)
        """Bytes per second: those that the file layer reported when the device was opened. Reads change that of
        reads."""
        self.writable = False
        """True once everything on it was found."""
        self.unerased = False
        """True once segments on it could not be erased, until the device is opened anew."""
        self.used = 0
        """Bytes of all places of its slabs."""
        self.writing = 0
        """Bytes of the writes under way."""
        self.slabs: dict[tuple[TenantId, int], Slab] = {}
        self.budget = DailyBudget(0.0, 0.0)

    @property
    def load(self) -> tuple[float, float]:
        """How busy the device is with writes, in seconds, and how full."""
        return self.writing / self.write_rate, self.used / max(1, self.capacity)


class SlabUse(NamedTuple):
    """The places of a slab that have a segment, for gauges."""

    device: int
    tenant: TenantId
    slot_bytes: int
    segments: int
    nbytes: int
    """Bytes of these places."""
