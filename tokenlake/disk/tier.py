"""The segments on the devices of one node: which place of which slab has which segment, and which leaves next.

::

    (place free) -> WRITTEN -> RESIDENT <-> ORDERED -> (place free)
                       |          ^            |
                       |          +--- READ <--+
                       +-> (place free): the write failed, or the segment was void before it ended

    WRITTEN    the file layer writes it; it is in memory
    RESIDENT   it is on disk and in memory
    ORDERED    it is on disk only, in the order in which segments leave the slab
    READ       it is being read back, or held for a reader: it keeps its place

A device has one slab per tenant and slot size. A slab grows by one place at a time while the device has room and the
tenant's quota allows it. On a full device a tenant with less than an equal part takes places of those with more, and a
slab takes places of others of its tenant that have more bytes for their use: places follow use, as regions of memory
do. Elsewhere a new segment takes the place of the one of least retention value in its slab.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenlake.disk.admission import DAY_S, SHARE, Admission, DailyBudget, Refusal
from tokenlake.disk.index import NO_ENTRY, Index
from tokenlake.disk.notes import Note, Notes
from tokenlake.disk.order import TOGETHER_S, Order
from tokenlake.disk.places import Place, footprint, slab_bytes
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.memory.eviction.odds import EDGES, Odds
from tokenlake.memory.removals import DISK_RULE
from tokenlake.rate import Rate

EVICTIONS_HALF_LIFE_S = 300.0
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
MAX_PASSED = 32
"""Maximum number of segments that one search for a segment to evict from memory passes over."""
MAX_HELD = 1 << 14
"""Maximum number of entries that are held for readers at a time."""


class Slab:
    """The places of one tenant and slot size on one device."""

    def __init__(self, number: int, device: Device, tenant: TenantId, slot_bytes: int, order: Order) -> None:
        self.number = number
        self.device = device
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.footprint = footprint(slot_bytes)
        """Bytes of a place and its record."""
        self.order = order
        self.free = array("I")
        """Free places; the last one is used next."""
        self.entries = array("I")
        """By place: its entry + 1; 0 for a free place."""
        self.generations = array("I")
        """By place: the number of segments that it has had."""
        self.newest = 0
        """The greatest generation of the places that were found on the device, and of those by which the slab was
        shortened. New places begin with it."""
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


class Forgotten(NamedTuple):
    """A segment that is void on disk."""

    slab: Slab
    key: SegmentKey
    place: Place
    rule: str
    """Why; see `tokenlake.memory.removals`."""
    erase: bool = False
    """True if the bytes must never be found again. The place counts as read until the caller ends that (`end_read`)."""


class SlabUse(NamedTuple):
    """The places of a slab that have a segment, for gauges."""

    device: int
    tenant: TenantId
    slot_bytes: int
    segments: int
    nbytes: int
    """Bytes of these places."""


def _fill(device: Device) -> tuple[float, float]:
    """How busy a device is with writes, in seconds, and how full."""
    return device.writing / device.write_rate, device.used / max(1, device.capacity)


class DiskTier:
    """All entries of a node. Changes nothing outside itself but the field `disk` of segments, and gives the models of
    re-use samples to learn from. An entry that is being written is not found."""

    def __init__(
        self,
        odds: Callable[[TenantId, int], Odds],
        writes_per_day: float,
        quotas: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`odds`: returns the model of re-use for segments of a tenant and a size in bytes. `writes_per_day`: how often
        a device may be written whole per day; 0: no limit. `quotas`: by tenant, the greatest share (0 to 1) of each
        device that its segments may take; the others have no limit."""
        self._odds = odds
        self._writes_per_day = writes_per_day
        self._quotas = quotas
        self.devices: dict[int, Device] = {}
        self.forgotten: list[Forgotten] = []
        """Segments that became void; the caller empties the list."""
        self.trimmed: dict[tuple[int, TenantId, int], Slab] = {}
        """Slabs that became shorter, by device, tenant and slot size; the caller empties the map."""
        self.evictions = 0
        """Number of segments that left a device for want of space."""
        self._slabs: dict[int, Slab] = {}
        self._last = 0
        self._index = Index(lambda slab, tenant: self._slabs[slab].tenant == tenant and not self._slabs[slab].void)
        self._notes = Notes()
        self._writing: set[int] = set()
        """Entries that are being written; not iterated over."""
        self._erased_when_written: set[int] = set()
        """Those of them whose segment became void meanwhile, so that it must never be found again."""
        self._reads: dict[tuple[int, int], int] = {}
        """Number of reads under way, by (number of the slab, place)."""
        self._voids: deque[tuple[Slab, int]] = deque()
        """Slabs of devices that have gone, and how many of their places were looked at to remove the entries."""
        self._holds: OrderedDict[int, float] = OrderedDict()
        """Time in seconds until which each entry is held for a reader, the earliest first."""
        self._uses: OrderedDict[tuple[TenantId, int], Rate] = OrderedDict()
        """By tenant and slot size: the bytes per second that memory evicts and that are read from disk."""
        self._admissions: dict[tuple[TenantId, int], Admission] = {}
        self._evicted = Rate(EVICTIONS_HALF_LIFE_S)
        """Bytes that memory evicts per second."""

    def __len__(self) -> int:
        return len(self._index)

    # -- looking up

    def find(self, tenant: TenantId, key: SegmentKey) -> int:
        """Returns the entry of a segment that can be read from a device, or `NO_ENTRY`."""
        if not self._index:
            return NO_ENTRY
        entry = self._index.find(tenant, key)
        return NO_ENTRY if entry in self._writing else entry

    def slab(self, entry: int) -> Slab:
        """The slab of an entry."""
        return self._slabs[self._index.slabs[entry]]

    def key(self, entry: int) -> SegmentKey:
        """The key of an entry."""
        return self._index.key(entry)

    def place(self, entry: int) -> Place:
        """The place of an entry."""
        slot = self._index.slots[entry]
        return Place(slot, self.slab(entry).generations[slot])

    def shards(self, entry: int) -> int:
        """The number of shards of the segment of an entry."""
        return self._index.shards[entry]

    def note(self, entry: int) -> Note:
        """The note of an entry: depth, accesses and hints of its segment."""
        return self._notes.unpack(self._index.note(entry))

    def packed_note(self, entry: int) -> bytes:
        """The note of an entry, as instructions carry it."""
        return self._index.note(entry)

    def last_access(self, entry: int, now: float) -> tuple[AccessRecord, float]:
        """Returns (access record of the request that accessed the segment of an entry last, seconds since then). The
        time is known to `TOGETHER_S`; an entry in use was accessed now."""
        at = self.slab(entry).order.accessed_at(entry) if self._index.groups[entry] else now
        return self.note(entry).hints.access, max(0.0, now - at)

    def walk(self, start: int, entries: int) -> tuple[list[int], int | None]:
        """Examines the `entries` numbers of entries from `start` on. Returns those of segments on devices, and the
        number at which the walk continues (None at the end)."""
        index, limit = self._index, min(self._index.limit, start + entries)
        found = [
            entry
            for entry in range(start, limit)
            if index.holds(entry) and entry not in self._writing and not self.slab(entry).void
        ]
        return found, limit if limit < index.limit else None

    def value(self, segment: Segment, accesses: int, now: float) -> float:
        """The retention value of a segment by the model of re-use, in accesses per second."""
        odds = self._odds(segment.tenant, segment.slot_bytes)
        age = bisect_right(EDGES, max(0.0, now - segment.touched)) - 1
        return odds.retention_value(odds.features(accesses, segment.hints))[age]

    # -- writing

    def evicted(self, tenant: TenantId, slot_bytes: int, segments: int, now: float) -> None:
        """Count segments that memory evicted, whether or not they are on disk."""
        self._admission(tenant, slot_bytes).evicted(segments)
        self._evicted.add(segments * slot_bytes, now)
        self._count_use(tenant, slot_bytes, segments * slot_bytes, now)

    def admit(self, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        """Choose a place for a READY segment of this retention value that memory will evict soon. Returns its entry,
        which is being written from now on, or the reason why it is not written."""
        device = self._device_to_write()
        if device is None:
            return Refusal.QUEUE
        slab = self._slab_on(device, segment.tenant, segment.slot_bytes, now)
        if slab is None:
            return Refusal.SLABS
        verdict = self._admit(slab, segment, accesses, value, now)
        self._drop_empty(slab)
        return verdict

    def _admit(self, slab: Slab, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        device = slab.device
        room = self._has_room(slab)
        if not room:
            self._make_room(slab, now)
            room = self._has_room(slab)
        victim = None if room else slab.order.victim(now)
        if not room and victim is None:
            return Refusal.QUEUE
        if self._writes_per_day and device.budget.left(now) < slab.footprint:
            return Refusal.DAY
        admission = self._admission(segment.tenant, segment.slot_bytes)
        least = victim[1] if victim is not None else 0.0
        request = segment.hints, int(segment.touched / TOGETHER_S)
        refusal = admission.asks(request, accesses, value, least, self._share_of_day(now))
        return refusal or self._write(slab, segment, accesses, victim, now)

    def save(self, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        """As `admit`, before the daemon ends: only the space of the devices and their writes under way limit what is
        written. Segments of less value leave for it."""
        device = self._device_to_write()
        if device is None:
            return Refusal.QUEUE
        slab = self._slab_on(device, segment.tenant, segment.slot_bytes, now)
        if slab is None:
            return Refusal.SLABS
        if self._has_room(slab):
            return self._write(slab, segment, accesses, None, now)
        victim = slab.order.victim(now)
        if victim is None or victim[1] > value:
            self._drop_empty(slab)
            return Refusal.VALUE
        return self._write(slab, segment, accesses, victim, now)

    def _write(self, slab: Slab, segment: Segment, accesses: int, victim: tuple[int, float] | None, now: float) -> int:
        if victim is not None:
            self.evictions += 1
            self.forget(victim[0])
        slot = self._take(slab)
        note = self._notes.pack(Note(segment.depth, accesses, segment.hints))
        shards = len(segment.checksums) // 8
        entry = self._index.add(segment.key, slab.number, slot, shards, note)
        slab.entries[slot] = entry + 1
        slab.generations[slot] += 1
        segment.disk = entry
        self._writing.add(entry)
        self._admission(segment.tenant, segment.slot_bytes).wrote(1)
        slab.device.writing += slab.footprint
        slab.device.budget.spend(slab.footprint, now)
        return entry

    def written(self, entry: int, segment: Segment, done: bool) -> bool:
        """Handle the end of the write of an entry. `done`: its bytes are on the device. Returns True if the segment is
        on disk from now on; False also if it left memory during the write, which makes its entry void."""
        slab = self.slab(entry)
        slab.device.writing -= slab.footprint
        self._writing.discard(entry)
        kept = segment.disk == entry
        erase = entry in self._erased_when_written
        self._erased_when_written.discard(entry)
        if slab.void or not (done or erase):
            if kept:
                segment.disk = NO_ENTRY
            self._remove(slab, entry)
            self._drop_void(slab)
            return False
        if not kept:
            self.forget(entry, erase=erase)
            return False
        slab.resident[entry] = segment, segment.touched
        return True

    # -- memory

    def arrived(self, segment: Segment) -> None:
        """A segment became READY in memory: note that it is on disk, if it is."""
        entry = self.find(segment.tenant, segment.key)
        if entry >= 0:
            slab = self.slab(entry)
            if slab.slot_bytes == segment.slot_bytes:
                self._leave_order(slab, entry)
                slab.resident[entry] = segment, segment.touched
                segment.disk = entry

    def spare(self, tenant: TenantId, slot_bytes: int) -> Segment | None:
        """Returns the primary copy of this tenant and size that memory should evict first, because it is on a device
        too: the one that was accessed longest ago, approximately, of those that nothing uses. Returns None if there is
        none, or if the first `MAX_PASSED` on each device were accessed lately or are in use."""
        for device in self.devices.values():
            slab = device.slabs.get((tenant, slot_bytes))
            if slab is None:
                continue
            resident = slab.resident
            # Twice as many, because a segment that was accessed is passed over once.
            for _ in range(min(MAX_PASSED, 2 * len(resident))):
                entry, (segment, touched) = next(iter(resident.items()))
                idle = segment.state is State.READY and segment.kind is Kind.PRIMARY and not segment.pins
                if idle and segment.touched == touched and segment.hints.priority <= 0:
                    return segment
                resident[entry] = segment, segment.touched
                resident.move_to_end(entry)
        return None

    def left(self, segment: Segment, accesses: int, now: float, *, keep: bool, erase: bool = False) -> bool:
        """A segment with an entry left memory. `keep`: its bytes on disk still count; `erase`: they must never be found
        again. Returns True if it stays on disk."""
        entry, segment.disk = segment.disk, NO_ENTRY
        slab = self.slab(entry)
        slab.resident.pop(entry, None)
        if entry in self._writing:
            if erase:
                self._erased_when_written.add(entry)
            return False
        if not keep or slab.void:
            self.forget(entry, erase=erase)
            return False
        self._index.set_note(entry, self._notes.pack(Note(segment.depth, accesses, segment.hints)))
        self._settle(slab, entry, segment.touched, now)
        return True

    # -- reading

    def begin_read(self, entry: int) -> tuple[Slab, int]:
        """A read of an entry begins. Returns its slab and its place, which gets no other segment until `end_read`."""
        slab, slot = self.slab(entry), self._index.slots[entry]
        at = slab.number, slot
        self._reads[at] = self._reads.get(at, 0) + 1
        self._leave_order(slab, entry, used=True)
        return slab, slot

    def end_read(self, slab: Slab, slot: int, now: float) -> None:
        """A read of a place has ended."""
        at = slab.number, slot
        self._reads[at] -= 1
        if self._reads[at]:
            return
        del self._reads[at]
        entry = slab.entries[slot] - 1
        if entry >= 0:
            self._count_use(slab.tenant, slab.slot_bytes, slab.slot_bytes, now)
            self._settle(slab, entry, now, now)
        elif not slab.void:
            slab.free.append(slot)
        else:
            self._drop_void(slab)

    def hold(self, entry: int, until: float) -> None:
        """Keep an entry until this time, because a reader was told of it. The time must not be before that of any hold
        that stands. Does nothing while too many entries are held."""
        if entry not in self._holds and len(self._holds) >= MAX_HELD:
            return
        self._leave_order(self.slab(entry), entry, used=True)
        self._holds[entry] = until
        self._holds.move_to_end(entry)

    def expire(self, now: float) -> None:
        """End the holds whose time has passed."""
        while self._holds and next(iter(self._holds.values())) <= now:
            entry, _ = self._holds.popitem(last=False)
            self._settle(self.slab(entry), entry, now, now)

    def touch(self, entry: int, hints: Hints | None, now: float) -> None:
        """Count an access of a segment that is on disk only."""
        note = self.note(entry)
        hints = note.hints if hints is None else hints.merged_over(note.hints)
        self._index.set_note(entry, self._notes.pack(Note(note.depth, note.accesses + 1, hints)))
        slab = self.slab(entry)
        if self._index.groups[entry]:
            self._leave_order(slab, entry, used=True)
            self._settle(slab, entry, now, now)

    def hint(self, entry: int, hints: Hints, now: float) -> None:
        """Apply hints that came after the last access of a segment on disk; no access."""
        slab, note, noted = self.slab(entry), self.note(entry), self._index.note(entry)
        packed = self._notes.pack(note._replace(hints=hints.merged_over(note.hints)))
        if packed == noted:
            return
        self._index.set_note(entry, packed)
        if self._index.groups[entry]:
            # Its place in the order follows from its hints.
            at = slab.order.accessed_at(entry)
            slab.order.leave(entry)
            self._settle(slab, entry, at, now)

    # -- leaving

    def forget(self, entry: int, rule: str = DISK_RULE, *, erase: bool = False) -> None:
        """Remove the entry of a segment, which is void on disk. Its place is free once no read of it is under way.
        `erase`: its bytes must never be found again, whatever happens to the index."""
        slab = self.slab(entry)
        if entry in slab.resident:
            slab.resident.pop(entry)[0].disk = NO_ENTRY
        if not slab.void:
            place = self.place(entry)
            self.forgotten.append(Forgotten(slab, self.key(entry), place, rule, erase))
            if erase:
                # No other segment gets the place before its bytes are erased.
                at = slab.number, place.slot
                self._reads[at] = self._reads.get(at, 0) + 1
        self._leave_order(slab, entry)
        self._holds.pop(entry, None)
        self._remove(slab, entry)

    def forget_place(self, slab: Slab, slot: int, rule: str) -> None:
        """The segment at a place is void, if it still has one; see `forget`. `sweep` removes that of a device that has
        gone."""
        if slab.entries[slot] and not slab.void:
            self.forget(slab.entries[slot] - 1, rule)

    def _remove(self, slab: Slab, entry: int) -> None:
        slot = self._index.slots[entry]
        self._index.remove(entry)
        slab.entries[slot] = 0
        if not slab.void and (slab.number, slot) not in self._reads:
            slab.free.append(slot)

    def _leave_order(self, slab: Slab, entry: int, used: bool = False) -> None:
        if self._index.groups[entry]:
            slab.order.leave(entry, used)

    def _settle(self, slab: Slab, entry: int, at: float, now: float) -> None:
        """Put an entry in order, unless it is in memory too, is being written or read, or is held. `at`: the time of
        its last access."""
        index = self._index
        out = slab.void or index.groups[entry] or entry in slab.resident or entry in self._holds
        if out or entry in self._writing or (slab.number, index.slots[entry]) in self._reads:
            return
        note = self.note(entry)
        features = self._odds(slab.tenant, slab.slot_bytes).features(note.accesses, note.hints)
        slab.order.enter(entry, features, at, now)

    # -- space

    def _device_to_write(self) -> Device | None:
        """The device whose writes under way end first, of those that have less than `MAX_WRITING_S` of them."""
        best: Device | None = None
        for device in self.devices.values():
            able = device.writable and device.writing < MAX_WRITING_S * device.write_rate
            if able and (best is None or _fill(device) < _fill(best)):
                best = device
        return best

    def _slab_on(self, device: Device, tenant: TenantId, slot_bytes: int, now: float) -> Slab | None:
        """The slab for segments of this tenant and size, a new one if needed; None where the device or the tenant has
        as many as it may have. Then the least used one of the tenant gets smaller, if it is used less."""
        slab = device.slabs.get((tenant, slot_bytes))
        if slab is None:
            own = [each for each in device.slabs.values() if each.tenant == tenant]
            if len(own) >= MAX_TENANT_SLABS or len(device.slabs) >= MAX_DEVICE_SLABS:
                self._make_slab_room(own, tenant, slot_bytes, now)
                return None
            while self._last in self._slabs:
                self._last = (self._last + 1) % MAX_SLABS
            order = Order(self._index, lambda: self._odds(tenant, slot_bytes))
            slab = Slab(self._last, device, tenant, slot_bytes, order)
            self._slabs[slab.number] = device.slabs[tenant, slot_bytes] = slab
        return slab

    def _make_slab_room(self, own: list[Slab], tenant: TenantId, slot_bytes: int, now: float) -> None:
        least = min(own, key=lambda each: self._use_of(each, now), default=None)
        use = self._uses.get((tenant, slot_bytes))
        if least is None or not least.device.writable or use is None:
            return
        if use.at(now) > SLOWER * self._use_of(least, now):
            count = 0
            while count < min(MAX_SHRUNK, len(least.entries)):
                if self._is_busy(least, len(least.entries) - count - 1):
                    break
                count += 1
            self._shrink(least, count)

    def _has_room(self, slab: Slab) -> bool:
        return bool(slab.free) or self._may_grow(slab)

    def _may_grow(self, slab: Slab) -> bool:
        return slab.device.used + slab.cost(1) <= slab.device.capacity and self._within_quota(slab)

    def _within_quota(self, slab: Slab) -> bool:
        """Returns True if one more place of the slab is within the quota of its tenant."""
        device, quota = slab.device, self._quotas.get(slab.tenant, 1.0)
        if quota >= 1.0:
            return True
        taken = sum(each.nbytes for each in device.slabs.values() if each.tenant == slab.tenant)
        return taken + slab.cost(1) <= quota * device.capacity

    def _take(self, slab: Slab) -> int:
        """Take a free place of the slab, which has room or has just given one up."""
        if slab.free:
            return slab.free.pop()
        slab.device.used += slab.cost(1)
        slab.entries.append(0)
        slab.generations.append(slab.newest)
        return len(slab.entries) - 1

    def _make_room(self, slab: Slab, now: float) -> None:
        """Shrink other slabs of the device by some places, if this slab may grow by the quota of its tenant: those of
        tenants with more than an equal part, for one with less, and those of the same tenant with more bytes for their
        use. Does nothing where that gives no room for one place."""
        device = slab.device
        if now < slab.cramped_until or not self._within_quota(slab):
            return
        must = device.used + slab.cost(1) - device.capacity
        ahead = max(1, min(SHRUNK, device.capacity // AHEAD_PART // slab.footprint))
        wanted = device.used + slab.cost(ahead) - device.capacity
        plan: list[tuple[Slab, int]] = []
        given = places = 0
        excess = self._excess(slab)
        for donor in sorted(device.slabs.values(), key=lambda each: -each.nbytes / self._use_of(each, now)):
            least = self._least(donor, slab, excess, now)
            count, nbytes = 0, donor.nbytes
            while given + donor.nbytes - nbytes < wanted and places + count < MAX_SHRUNK:
                fewer = slab_bytes(donor.slot_bytes, len(donor.entries) - count - 1)
                if count == len(donor.entries) or fewer < least or self._is_busy(donor, len(donor.entries) - count - 1):
                    break
                count, nbytes = count + 1, fewer
            if count:
                plan.append((donor, count))
                given, places = given + donor.nbytes - nbytes, places + count
                if donor.tenant in excess:
                    excess[donor.tenant] -= donor.nbytes - nbytes
        if given >= must:
            for donor, count in plan:
                self._shrink(donor, count)
        else:
            slab.cramped_until = now + CRAMPED_S

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
        fair = (slab.nbytes + slab.cost(1)) * self._use_of(donor, now) / self._use_of(slab, now)
        return fair if donor.nbytes > SLOWER * fair else donor.nbytes

    def _use_of(self, slab: Slab, now: float) -> float:
        """Bytes per second of the slab's size that memory evicted and that were read from disk, at least a little."""
        use = self._uses.get((slab.tenant, slab.slot_bytes))
        return LEAST_USE + (use.at(now) if use is not None else 0.0)

    def _count_use(self, tenant: TenantId, slot_bytes: int, nbytes: int, now: float) -> None:
        use = self._uses.get((tenant, slot_bytes))
        if use is None:
            use = self._uses[tenant, slot_bytes] = Rate(USE_HALF_LIFE_S)
            if len(self._uses) > MAX_USES:
                self._uses.popitem(last=False)
        self._uses.move_to_end((tenant, slot_bytes))
        use.add(nbytes, now)

    def _is_busy(self, slab: Slab, slot: int) -> bool:
        """True for a place that has to stay, because it is written, read, erased, or held for a reader."""
        entry = slab.entries[slot] - 1
        return entry in self._writing or entry in self._holds or (slab.number, slot) in self._reads

    def _shrink(self, slab: Slab, places: int) -> None:
        """Shorten a slab by its last places, which are not busy. A slab without places is dropped."""
        slab.device.used -= slab.nbytes - slab_bytes(slab.slot_bytes, len(slab.entries) - places)
        for _ in range(places):
            slot = len(slab.entries) - 1
            if slab.entries[slot]:
                self.evictions += 1
                self.forget(slab.entries[slot] - 1)
            slab.free.remove(slot)
            slab.newest = max(slab.newest, slab.generations.pop())
            slab.entries.pop()
        self._trimmed(slab)

    def _trimmed(self, slab: Slab) -> None:
        self.trimmed[slab.device.number, slab.tenant, slab.slot_bytes] = slab
        self._drop_empty(slab)

    def _drop_empty(self, slab: Slab) -> None:
        """Drop a slab of a device in use that has no places."""
        if not slab.entries:
            del self._slabs[slab.number], slab.device.slabs[slab.tenant, slab.slot_bytes]

    def _admission(self, tenant: TenantId, slot_bytes: int) -> Admission:
        return self._admissions.setdefault((tenant, slot_bytes), Admission())

    def _share_of_day(self, now: float) -> float:
        """Returns the share of the bytes evicted from memory that the budget of bytes per day allows to write, over all
        devices."""
        if not self._writes_per_day:
            return SHARE
        rate = sum(each.capacity for each in self.devices.values()) * self._writes_per_day / DAY_S
        return rate / max(1.0, self._evicted.at(now))

    # -- devices

    def ready(self, number: int, capacity: int, read_rate: float, write_rate: float, now: float) -> None:
        """A device can be read, or has another capacity now: then its rates stay."""
        device = self.devices.get(number)
        if device is None:
            device = self.devices[number] = Device(number, read_rate, write_rate)
        device.capacity = capacity
        device.budget.resize(capacity * self._writes_per_day, now)

    def found(
        self, number: int, tenant: TenantId, slot_bytes: int, key: SegmentKey, place: Place, shards: int, note: bytes
    ) -> int | None:
        """An earlier process wrote a segment to the device. Returns its entry, or None if it is not taken: another
        entry has its key or its place, the device has no room for its place, or its note is damaged. `settle` puts it
        in order."""
        device = self.devices[number]
        slab = self._slab_on(device, tenant, slot_bytes, 0.0)
        if slab is None:
            return None
        slab.newest = max(slab.newest, place.generation)
        try:
            self._notes.unpack(note)
        except ValueError:
            return None
        beyond = place.slot - len(slab.entries) + 1
        if beyond > 0 and device.used + slab.cost(beyond) > device.capacity:
            return None
        if self._index.find(tenant, key) >= 0 or (beyond <= 0 and slab.entries[place.slot]):
            return None
        if beyond > 0:
            device.used += slab.cost(beyond)
            slab.entries.extend([0] * beyond)
            slab.generations.extend([0] * beyond)
        entry = self._index.add(key, slab.number, place.slot, shards, note)
        slab.entries[place.slot] = entry + 1
        slab.generations[place.slot] = place.generation
        return entry

    def settle(self, entry: int, now: float) -> None:
        """Put an entry that was found in order."""
        self._settle(self.slab(entry), entry, now, now)

    def recovered(self, number: int) -> None:
        """Everything on the device was found: it may be written from now on."""
        device = self.devices[number]
        device.writable = True
        for slab in device.slabs.values():
            slab.free = array("I", (slot for slot, entry in enumerate(slab.entries) if not entry))
            for slot in slab.free:
                slab.generations[slot] = slab.newest
        for slab in list(device.slabs.values()):
            # An earlier process may have had more space for it.
            self._trimmed(slab)

    def gone(self, number: int) -> None:
        """A device cannot be used any more: its segments are not found from now on. `sweep` removes them."""
        device = self.devices.pop(number, None)
        for slab in device.slabs.values() if device is not None else ():
            slab.void = True
            for segment, _ in slab.resident.values():
                segment.disk = NO_ENTRY
            slab.resident.clear()
            self._voids.append((slab, 0))

    def erases_when_written(self, entry: int) -> bool:
        """True for an entry that is being written and whose segment must never be found."""
        return entry in self._erased_when_written

    def sweep(self, entries: int) -> list[tuple[TenantId, SegmentKey]]:
        """Remove some entries of devices that have gone. Returns their tenants and keys; an empty list at the end."""
        removed: list[tuple[TenantId, SegmentKey]] = []
        while self._voids and len(removed) < entries:
            slab, slot = self._voids.popleft()
            while slot < len(slab.entries) and len(removed) < entries:
                entry = slab.entries[slot] - 1
                if entry >= 0 and entry not in self._writing:
                    removed.append((slab.tenant, self.key(entry)))
                    self.forget(entry)
                slot += 1
            if slot < len(slab.entries):
                self._voids.appendleft((slab, slot))
            else:
                self._drop_void(slab)
        return removed

    def _drop_void(self, slab: Slab) -> None:
        """Drop a slab of a device that has gone when its last entry was removed, and nothing is read from it."""
        # Its number may be that of another slab already (test_a_slab_is_dropped_once).
        known = self._slabs.get(slab.number) is slab
        read = any(number == slab.number for number, _ in self._reads)
        if known and slab.void and not read and not any(slab.entries):
            del self._slabs[slab.number]

    def usage(self) -> Iterator[SlabUse]:
        """Yields the use of each slab. Until a device was searched whole, its places without a segment count too."""
        for device in self.devices.values():
            for slab in device.slabs.values():
                count = len(slab.entries) - len(slab.free)
                yield SlabUse(device.number, slab.tenant, slab.slot_bytes, count, count * slab.footprint)

    def budgets(self, now: float) -> dict[int, float]:
        """The bytes that may be written now by the budget of bytes per day, by device; empty where there is none."""
        return {each.number: each.budget.left(now) for each in self.devices.values() if self._writes_per_day}

    # -- checks

    def check_integrity(self) -> None:
        """Raises AssertionError when an entry is in two states or in none, or when places or bytes do not add up."""
        self._index.check_integrity()
        counted = 0
        for slab in self._slabs.values():
            slab.order.check_integrity()
            free = set(slab.free)
            assert len(free) == len(slab.free)
            for slot, number in enumerate(slab.entries):
                reading = (slab.number, slot) in self._reads
                if not number:
                    assert slab.void or (slot in free) != reading or not slab.device.writable
                    continue
                entry = number - 1
                counted += 1
                assert self._index.holds(entry)
                assert (self._index.slabs[entry], self._index.slots[entry]) == (slab.number, slot)
                assert slot not in free
                ordered = bool(self._index.groups[entry])
                others = [entry in slab.resident, reading or entry in self._holds, entry in self._writing]
                assert slab.void or not slab.device.writable or ordered != any(others), f"entry {entry}: {others}"
            for entry, (segment, _) in slab.resident.items():
                assert segment.disk == entry
                assert segment.key == self.key(entry)
        assert counted == len(self._index)
        for device in self.devices.values():
            assert device.used == sum(slab.nbytes for slab in device.slabs.values())
            assert device.writing == sum(
                self.slab(each).footprint for each in self._writing if self.slab(each).device is device
            )
