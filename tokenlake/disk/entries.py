"""The entries of the segments on the devices of one node: one for each place that has a segment.

::

    (place free) -> WRITING -> RESIDENT <-> ALONE -> (place free)
                       |
                       +-> TO_ERASE -> (place free)

A place is in use while it is read or erased, or held for a reader: its segment, or nothing, stays there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from tokenlake.disk.index import NO_ENTRY, EntryState, Index
from tokenlake.disk.notes import Note, Notes
from tokenlake.disk.places import Place
from tokenlake.disk.slab import Slab
from tokenlake.disk.space import Space
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.memory.removals import DISK_RULE

MAX_PASSED = 32
"""Maximum number of segments that one search for a segment to evict from memory passes over."""
MAX_HELD = 1 << 14
"""Maximum number of entries that are held for readers at a time."""
_RESIDENT = EntryState.RESIDENT


class Forgotten(NamedTuple):
    """A segment that is void on disk."""

    slab: Slab
    key: SegmentKey
    place: Place
    rule: str
    """Why; see `tokenlake.memory.removals`."""
    erase: bool = False
    """True if the bytes must never be found again. The place counts as read until the caller ends that (`end_read`)."""
    evicted: bool = False
    """True if it left for want of space."""


class Entries:
    """The entries of a node, and what readers and memory do with their segments. Changes nothing outside itself but the
    field `disk` of segments. Its caller takes the segments that became void after each event (`take_void`)."""

    def __init__(self, quotas: Mapping[str, float]) -> None:
        """`quotas`: as of `Space`."""
        self._index = Index(self._has_tenant)
        self._space = Space(quotas, self._is_busy, self._index)
        self.devices = self._space.devices
        self._notes = Notes()
        self._in_use: dict[tuple[int, int], int] = {}
        """Number of reads and erasures under way, by (number of the slab, place)."""
        self._holds: OrderedDict[int, float] = OrderedDict()
        """Time in seconds until which each entry is held for a reader, the earliest first."""
        self._forgotten: list[Forgotten] = []

    def __len__(self) -> int:
        return len(self._index)

    def take_void(self) -> list[Forgotten]:
        """Returns the segments that became void since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    # -- looking up

    def find(self, tenant: TenantId, key: SegmentKey) -> int:
        """Returns the entry of a segment that can be read from a device, or `NO_ENTRY`."""
        if not self._index:
            return NO_ENTRY
        entry = self._index.find(tenant, key)
        return entry if entry >= 0 and self._index.states[entry] >= _RESIDENT else NO_ENTRY

    def slab(self, entry: int) -> Slab:
        """The slab of an entry."""
        return self._space.slabs[self._index.slabs[entry]]

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
        """Returns (access record of the request that accessed the segment of an entry last, seconds since then). An
        entry in use is accessed now."""
        alone = self._index.states[entry] == EntryState.ALONE
        in_use = not alone or self._is_busy(self.slab(entry), self._index.slots[entry])
        return self.note(entry).hints.access, 0.0 if in_use else max(0.0, now - self._index.accessed[entry])

    def walk(self, start: int, entries: int) -> tuple[list[int], int | None]:
        """Examines the `entries` numbers of entries from `start` on. Returns those of segments on devices, and the
        number at which the walk continues (None at the end)."""
        states, limit = self._index.states, min(self._index.limit, start + entries)
        found = [entry for entry in range(start, limit) if states[entry] >= _RESIDENT and not self.slab(entry).void]
        return found, limit if limit < self._index.limit else None

    def _has_tenant(self, slab: int, tenant: str) -> bool:
        """Returns True if the slab of this number is the tenant's, and its device is in use."""
        return self._space.slabs[slab].tenant == tenant and not self._space.slabs[slab].void

    # -- writing

    def begin_write(self, slab: Slab, segment: Segment, note: Note) -> int:
        """A segment is written to a place of the slab, which has room, from now on. Returns its entry."""
        slot, shards = slab.take(), len(segment.checksums) // 8
        entry = self._index.add(segment.key, slab.number, slot, shards, self._notes.pack(note), segment.touched)
        slab.entries[slot] = entry + 1
        slab.generations[slot] += 1
        segment.disk = entry
        slab.device.writing += slab.footprint
        return entry

    def written(self, entry: int, segment: Segment, done: bool) -> None:
        """Handle the end of the write of an entry. `done`: its bytes are on the device. The segment is then on disk,
        unless it left memory during the write."""
        slab, state = self.slab(entry), self._index.states[entry]
        slab.device.writing -= slab.footprint
        erase = state == EntryState.TO_ERASE
        if slab.void or not (done or erase):
            if not erase:
                segment.disk = NO_ENTRY
            self._remove(slab, entry)
            self._drop_void(slab)
        elif erase:
            self.forget(entry, segment.left_by, erase=True)
        else:
            self._become_resident(slab, entry, segment)

    def erases_when_written(self, entry: int) -> bool:
        """True for an entry that is being written and whose segment must never be found."""
        return self._index.states[entry] == EntryState.TO_ERASE

    # -- memory

    def arrived(self, segment: Segment) -> None:
        """A segment became READY in memory: note that it is on disk, if it is."""
        entry = self.find(segment.tenant, segment.key)
        if entry >= 0 and (slab := self.slab(entry)).slot_bytes == segment.slot_bytes:
            self._index.again[entry] = 1
            segment.disk = entry
            self._become_resident(slab, entry, segment)

    def _become_resident(self, slab: Slab, entry: int, segment: Segment) -> None:
        self._index.states[entry] = _RESIDENT
        slab.resident[entry] = segment, segment.touched

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

    def left(self, segment: Segment, accesses: int, *, keep: bool, erase: bool = False) -> bool:
        """A segment with an entry left memory. `keep`: its bytes on disk still count; `erase`: they must never be found
        again, which holds for each segment that leaves while it is written. Returns True if it stays on disk."""
        entry, segment.disk = segment.disk, NO_ENTRY
        slab, index = self.slab(entry), self._index
        slab.resident.pop(entry, None)
        if index.states[entry] == EntryState.WRITING:
            assert erase, "a write pins its segments"
            index.states[entry] = EntryState.TO_ERASE
            return False
        if not keep or slab.void:
            self.forget(entry, segment.left_by or DISK_RULE, erase=erase)
            return False
        index.set_note(entry, self._notes.pack(Note(segment.depth, accesses, segment.hints)))
        index.accessed[entry] = segment.touched
        self._be_alone(slab, entry)
        return True

    def _be_alone(self, slab: Slab, entry: int) -> None:
        self._index.states[entry] = EntryState.ALONE
        if not self._index.queued[entry]:
            slab.queue.append(entry)

    # -- reading

    def begin_read(self, entry: int) -> tuple[Slab, int]:
        """A read of an entry begins. Returns its slab and its place, which gets no other segment until `end_read`."""
        slab, slot = self.slab(entry), self._index.slots[entry]
        self._index.again[entry] = 1
        self._use(slab, slot)
        return slab, slot

    def _use(self, slab: Slab, slot: int) -> None:
        self._in_use[slab.number, slot] = self._in_use.get((slab.number, slot), 0) + 1

    def end_read(self, slab: Slab, slot: int, now: float) -> None:
        """A read of a place, or its erasure, has ended."""
        at = slab.number, slot
        self._in_use[at] -= 1
        if self._in_use[at]:
            return
        del self._in_use[at]
        entry = slab.entries[slot] - 1
        if entry >= 0:
            self._space.count_use(slab.tenant, slab.slot_bytes, slab.slot_bytes, now)
            self._index.accessed[entry] = now
        elif not slab.void:
            slab.free.append(slot)
        else:
            self._drop_void(slab)

    def hold(self, entry: int, until: float) -> None:
        """Keep an entry until this time, because a reader was told of it. The time must not be before that of any hold
        that stands. Does nothing while too many entries are held."""
        if entry in self._holds or len(self._holds) < MAX_HELD:
            self._index.again[entry] = 1
            self._holds[entry] = until
            self._holds.move_to_end(entry)

    def expire(self, now: float) -> None:
        """End the holds whose time has passed: until then the segments count as accessed."""
        while self._holds and next(iter(self._holds.values())) <= now:
            entry, _ = self._holds.popitem(last=False)
            self._index.accessed[entry] = now

    def touch(self, entry: int, hints: Hints | None, now: float) -> None:
        """Count an access of a segment that is on disk only."""
        note = self.note(entry)
        hints = note.hints if hints is None else hints.merged_over(note.hints)
        self._index.set_note(entry, self._notes.pack(Note(note.depth, note.accesses + 1, hints)))
        self._index.again[entry], self._index.accessed[entry] = 1, now

    def hint(self, entry: int, hints: Hints) -> None:
        """Apply hints that came after the last access of a segment on disk; no access."""
        note = self.note(entry)
        self._index.set_note(entry, self._notes.pack(note._replace(hints=hints.merged_over(note.hints))))

    # -- leaving

    def forget(self, entry: int, rule: str, *, erase: bool = False, evicted: bool = False) -> None:
        """Remove the entry of a segment, which is void on disk. Its place is free once nothing uses it. `erase`: its
        bytes must never be found again, whatever happens to the index. `evicted`: it leaves for want of space."""
        slab = self.slab(entry)
        if entry in slab.resident:
            slab.resident.pop(entry)[0].disk = NO_ENTRY
        if not slab.void:
            place = self.place(entry)
            self._forgotten.append(Forgotten(slab, self.key(entry), place, rule, erase, evicted))
            if erase:
                # No other segment gets the place before its bytes are erased.
                self._use(slab, place.slot)
        self._holds.pop(entry, None)
        self._remove(slab, entry)

    def forget_place(self, slab: Slab, slot: int, rule: str) -> None:
        """The segment at a place is void, if it still has one; see `forget`. `sweep` removes that of a device that has
        gone."""
        if slab.entries[slot] and not slab.void:
            self.forget(slab.entries[slot] - 1, rule)

    def _remove(self, slab: Slab, entry: int) -> None:
        slot = self._index.slots[entry]
        if self._index.queued[entry]:
            slab.queue.remove(entry)
        self._index.remove(entry)
        slab.entries[slot] = 0
        if not slab.void and (slab.number, slot) not in self._in_use:
            slab.free.append(slot)

    def _is_busy(self, slab: Slab, slot: int) -> bool:
        """True for a place that has to stay, because it is written, read, erased, or held for a reader."""
        entry = slab.entries[slot] - 1
        written = entry >= 0 and self._index.states[entry] < _RESIDENT
        return written or entry in self._holds or (slab.number, slot) in self._in_use

    def _drop_void(self, slab: Slab) -> None:
        """Drop a slab of a device that has gone when its last entry was removed, and nothing is read from it."""
        # Its number may be that of another slab already (test_a_slab_is_dropped_once).
        known = self._space.slabs.get(slab.number) is slab
        read = any(number == slab.number for number, _ in self._in_use)
        if known and slab.void and not read and not any(slab.entries):
            del self._space.slabs[slab.number]
