"""The disk tier: which segments are written, which leave their place for others, and what is found on devices.

Where no slab may grow, segments that are on disk alone and not in use leave by FIFO with a second chance: they queue in
the order in which they left memory, and one that was accessed since goes to the end once. The order by the values of
memory's model (`memory.eviction.odds`) found 0.9 points more tokens on the conversation trace, 0.4 fewer on the
toolagent-like one, and 2.6 fewer on agents' sessions (docs/results/disk-simulation.md).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from tokenlake.disk.admission import DAY_S, SHARE, TOGETHER_S, Admission, Refusal
from tokenlake.disk.entries import Entries
from tokenlake.disk.index import NO_ENTRY, EntryState
from tokenlake.disk.notes import Note
from tokenlake.disk.places import Place, slab_bytes
from tokenlake.disk.slab import Device, Slab, SlabUse
from tokenlake.disk.space import Shrinks
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import PoolId, Segment
from tokenlake.memory.eviction.odds import EDGES, Odds
from tokenlake.memory.removals import DISK_GONE_RULE, DISK_RULE
from tokenlake.rate import Rate

EVICTIONS_HALF_LIFE_S = 300.0
MAX_PASSED_OVER = 1024
"""Maximum number of segments that one search for a segment to evict from disk passes over: 1 ms."""
_ALONE, _RESIDENT = EntryState.ALONE, EntryState.RESIDENT


class DiskTier(Entries):
    """All entries of a node, and the decisions about them. Slabs that became shorter are to be taken after each event
    (`take_trimmed`)."""

    def __init__(
        self,
        odds: Callable[[PoolId], Odds],
        writes_per_day: float,
        quotas: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`odds`: returns the model of re-use of a pool. `writes_per_day`: how often
        a device may be written whole per day; 0: no limit. `quotas`: as of `Space`."""
        super().__init__(quotas)
        self._odds = odds
        self._writes_per_day = writes_per_day
        self._sweeping: deque[tuple[Slab, int]] = deque()
        """Slabs of devices that have gone, and how many of their places were looked at to remove the entries."""
        self._admissions: dict[tuple[TenantId, int], Admission] = {}
        self._evicted = Rate(EVICTIONS_HALF_LIFE_S)
        """Bytes that memory evicts per second."""
        self._trimmed: dict[tuple[int, TenantId, int], Slab] = {}

    def take_trimmed(self) -> list[Slab]:
        """Returns the slabs that became shorter since the last call."""
        trimmed, self._trimmed = list(self._trimmed.values()), {}
        return trimmed

    # -- writing

    def evicted(self, tenant: TenantId, slot_bytes: int, segments: int, now: float) -> None:
        """Count segments that memory evicted, whether or not they are on disk."""
        self._admission(tenant, slot_bytes).evicted(segments)
        self._evicted.add(segments * slot_bytes, now)
        self._space.count_use(tenant, slot_bytes, segments * slot_bytes, now)

    def admit(self, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        """Choose a place for a READY segment of this retention value that memory will evict soon. Returns its entry,
        which is being written from now on, or the reason why it is not written."""
        slab = self._slab_to_write(segment, now)
        if isinstance(slab, Refusal):
            return slab
        if not self._space.has_room(slab):
            self._shrink(self._space.room_for_place(slab, now))
        verdict = self._admit(slab, segment, accesses, value, now)
        self._space.drop_empty(slab)
        return verdict

    def _admit(self, slab: Slab, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        victim = None if self._space.has_room(slab) else self._next_to_leave(slab)
        if victim == NO_ENTRY:
            return Refusal.QUEUE
        if self._writes_per_day and slab.device.budget.left(now) < slab.footprint:
            return Refusal.DAY
        request = segment.hints, int(segment.touched / TOGETHER_S)
        admission = self._admission(segment.tenant, segment.slot_bytes)
        refusal = admission.asks(request, accesses, value, self._share_of_day(now))
        return refusal or self._write(slab, segment, accesses, victim, now)

    def save(self, segment: Segment, accesses: int, value: float, now: float) -> int | Refusal:
        """As `admit`, before the daemon ends: only the space of the devices and their writes under way limit what is
        written. The next segment to leave gives its place to one of more value."""
        slab = self._slab_to_write(segment, now)
        if isinstance(slab, Refusal):
            return slab
        victim = None if self._space.has_room(slab) else self._next_to_leave(slab)
        if victim is not None and (victim == NO_ENTRY or self._value_on_disk(slab, victim, now) > value):
            if victim != NO_ENTRY:
                slab.queue.pass_over(victim)
            self._space.drop_empty(slab)
            return Refusal.VALUE
        return self._write(slab, segment, accesses, victim, now)

    def _slab_to_write(self, segment: Segment, now: float) -> Slab | Refusal:
        if self._index.find(segment.tenant, segment.key) >= 0:
            # An earlier copy, which left memory while it was written, is still to be erased.
            return Refusal.VALUE
        device = self._space.device_to_write()
        if device is None:
            return Refusal.QUEUE
        slab = self._space.slab_on(device, segment.tenant, segment.slot_bytes)
        if slab is None:
            self._shrink(self._space.room_for_slab(device, segment.tenant, segment.slot_bytes, now))
            return Refusal.SLABS
        return slab

    def _next_to_leave(self, slab: Slab) -> int:
        """Moves segments that stay to the end of the queue, until the first one may leave. Returns its entry, or
        `NO_ENTRY` if there is none among those that one search passes over."""
        queue, index = slab.queue, self._index
        for _ in range(min(2 * len(queue), MAX_PASSED_OVER)):
            entry = queue.first
            if index.states[entry] == _ALONE and not self._is_busy(slab, index.slots[entry]):
                if not index.again[entry]:
                    return entry
                index.again[entry] = 0
            queue.pass_over(entry)
        return NO_ENTRY

    def _value_on_disk(self, slab: Slab, entry: int, now: float) -> float:
        note, unused_s = self.note(entry), now - self._index.accessed[entry]
        odds = self._odds(PoolId(slab.tenant, slab.slot_bytes))
        values = odds.retention_value(odds.features(note.accesses, note.hints))
        return values[bisect_right(EDGES, max(0.0, unused_s)) - 1]

    def _write(self, slab: Slab, segment: Segment, accesses: int, victim: int | None, now: float) -> int:
        if victim is not None:
            self.forget(victim, DISK_RULE, evicted=True)
        self._admission(segment.tenant, segment.slot_bytes).wrote(1)
        slab.device.budget.spend(slab.footprint, now)
        return self.begin_write(slab, segment, Note(segment.depth, accesses, segment.hints))

    # -- space

    def _shrink(self, shrinks: Shrinks) -> None:
        """Shorten slabs by their last places, which are not busy. A slab without places is dropped."""
        for slab, places in shrinks:
            slab.device.used -= slab.nbytes - slab_bytes(slab.slot_bytes, len(slab.entries) - places)
            for _ in range(places):
                slot = len(slab.entries) - 1
                if slab.entries[slot]:
                    self.forget(slab.entries[slot] - 1, DISK_RULE, evicted=True)
                slab.free.remove(slot)
                slab.newest = max(slab.newest, slab.generations.pop())
                slab.entries.pop()
            self._trim(slab)

    def _trim(self, slab: Slab) -> None:
        self._trimmed[slab.device.number, slab.tenant, slab.slot_bytes] = slab
        self._space.drop_empty(slab)

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
        self, number: int, tenant: TenantId, slot_bytes: int, segment: tuple[SegmentKey, Place, int, bytes], now: float
    ) -> int | None:
        """An earlier process wrote a segment (key, place, number of shards, note) to the device. Returns its entry, or
        None if it is not taken: another entry has its key or its place, the device has no room for its place, or its
        note is damaged."""
        key, place, shards, note = segment
        device = self.devices[number]
        slab = self._space.slab_on(device, tenant, slot_bytes)
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
            slab.grow(beyond, 0)
        entry = self._index.add(key, slab.number, place.slot, shards, note, now)
        self._be_alone(slab, entry)
        slab.entries[place.slot] = entry + 1
        slab.generations[place.slot] = place.generation
        return entry

    def recovered(self, number: int) -> None:
        """Everything on the device was found: it may be written from now on."""
        device = self.devices[number]
        device.writable = True
        for slab in list(device.slabs.values()):
            slab.free = array("I", (slot for slot, entry in enumerate(slab.entries) if not entry))
            for slot in slab.free:
                slab.generations[slot] = slab.newest
            # An earlier process may have had more space for it.
            self._trim(slab)

    def gone(self, number: int) -> None:
        """A device cannot be used any more: its segments are not found from now on. `sweep` removes them."""
        device = self.devices.pop(number, None)
        for slab in device.slabs.values() if device is not None else ():
            slab.void = True
            for segment, _ in slab.resident.values():
                segment.disk = NO_ENTRY
            slab.resident.clear()
            self._sweeping.append((slab, 0))

    def sweep(self, entries: int) -> list[tuple[TenantId, SegmentKey]]:
        """Remove some entries of devices that have gone. Returns their tenants and keys; an empty list at the end."""
        removed: list[tuple[TenantId, SegmentKey]] = []
        while self._sweeping and len(removed) < entries:
            slab, slot = self._sweeping.popleft()
            while slot < len(slab.entries) and len(removed) < entries:
                entry = slab.entries[slot] - 1
                if entry >= 0 and self._index.states[entry] >= _RESIDENT:
                    removed.append((slab.tenant, self.key(entry)))
                    self.forget(entry, DISK_GONE_RULE)
                slot += 1
            if slot < len(slab.entries):
                self._sweeping.appendleft((slab, slot))
            else:
                self._drop_void(slab)
        return removed

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
        """Raises AssertionError when an entry has another state than its place, or when places or bytes do not add
        up."""
        self._index.check_integrity()
        counted = 0
        writing: dict[int, int] = {}
        for slab in self._space.slabs.values():
            slab.queue.check_integrity()
            free = set(slab.free)
            assert len(free) == len(slab.free)
            for slot, number in enumerate(slab.entries):
                if not number:
                    used = (slab.number, slot) in self._in_use
                    assert slab.void or (slot in free) != used or not slab.device.writable
                    continue
                entry = number - 1
                counted += 1
                assert self._index.holds(entry)
                assert (self._index.slabs[entry], self._index.slots[entry]) == (slab.number, slot)
                assert slot not in free
                state = self._index.states[entry]
                assert slab.void or (state == _RESIDENT) == (entry in slab.resident), f"entry {entry}: {state}"
                if state < _RESIDENT:
                    writing[id(slab.device)] = writing.get(id(slab.device), 0) + slab.footprint
            for entry, (segment, _) in slab.resident.items():
                assert segment.disk == entry
                assert segment.key == self.key(entry)
        assert counted == len(self._index)
        for device in self.devices.values():
            assert device.used == sum(slab.nbytes for slab in device.slabs.values())
            assert device.writing == writing.get(id(device), 0)
