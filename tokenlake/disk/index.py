"""The index of the segments on all devices of a node: the key, slab, place and note of each, in compact arrays.

An entry is a number. The numbers of entries that left are used again. A hash table with open addressing finds an entry
by its key; nothing depends on the order of the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum

from tokenlake.disk.places import NOTE_BYTES
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES

NO_ENTRY = -1
_LEAST_TABLE = 64


class EntryState(IntEnum):
    """State of an entry. Only the last two are found."""

    NONE = 0
    """No entry has this number."""
    WRITING = 1
    """The file layer writes the segment, which is in memory."""
    TO_ERASE = 2
    """Likewise, but the segment has left memory by a rule after which its bytes must never be found: they are erased
    once the write has ended."""
    RESIDENT = 3
    """On disk and in memory."""
    ALONE = 4
    """On disk only."""


class Index:
    """Entries by key. An entry takes about 110 bytes, those of its slab included."""

    def __init__(self, same_tenant: Callable[[int, str], bool]) -> None:
        """`same_tenant(slab, tenant)`: whether the slab with this number is the tenant's."""
        self._same_tenant = same_tenant
        self._keys = bytearray()
        self._notes = bytearray()
        self.slabs = array("H")
        """By entry: the number of its slab."""
        self.slots = array("I")
        """By entry: the place in its slab."""
        self.shards = array("H")
        """By entry: the number of shards of the segment."""
        self.states = bytearray()
        """By number: the `EntryState`, which the owner of the index sets."""
        self.previous, self.next, self.queued = array("I"), array("I"), bytearray()
        """By entry: its neighbours in the queue (`queue.py`), and 1 if it is there."""
        self.again = bytearray()
        """By entry: 1 if the segment was accessed since it was passed over in the queue."""
        self.accessed = array("d")
        """By entry: the time in seconds of the last access."""
        self._unused = array("I")
        """Numbers of entries that left."""
        self._table = array("I", [0]) * _LEAST_TABLE
        """Entry + 1; 0 where there is none."""
        self._mask = _LEAST_TABLE - 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def limit(self) -> int:
        """A number greater than that of each entry."""
        return len(self.slots)

    def find(self, tenant: str, key: SegmentKey) -> int:
        """Returns the entry of the tenant's segment, or `NO_ENTRY`."""
        table, mask, keys = self._table, self._mask, self._keys
        at = hash(key) & mask
        while entry := table[at]:
            start = (entry - 1) * KEY_BYTES
            if bytes(keys[start : start + KEY_BYTES]) == key and self._same_tenant(self.slabs[entry - 1], tenant):
                return entry - 1
            at = (at + 1) & mask
        return NO_ENTRY

    def add(self, key: SegmentKey, slab: int, slot: int, shards: int, note: bytes, accessed: float) -> int:
        """Add an entry, which must not exist; its state is WRITING. Returns its number."""
        if self._unused:
            entry = self._unused.pop()
            self._keys[entry * KEY_BYTES : (entry + 1) * KEY_BYTES] = key
            self._notes[entry * NOTE_BYTES : (entry + 1) * NOTE_BYTES] = note
            self.slabs[entry], self.slots[entry], self.shards[entry] = slab, slot, shards
            self.states[entry], self.again[entry], self.queued[entry] = EntryState.WRITING, 0, 0
            self.accessed[entry] = accessed
        else:
            entry = len(self.slots)
            self._keys += key
            self._notes += note
            self.slabs.append(slab)
            self.slots.append(slot)
            self.shards.append(shards)
            self.states.append(EntryState.WRITING)
            self.again.append(0)
            self.queued.append(0)
            self.previous.append(0)
            self.next.append(0)
            self.accessed.append(accessed)
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            self._rehash()
        else:
            self._put(entry, key)
        return entry

    def remove(self, entry: int) -> None:
        """Remove an entry."""
        table, mask = self._table, self._mask
        at = hash(self.key(entry)) & mask
        while table[at] != entry + 1:
            at = (at + 1) & mask
        # The entries behind it move up, so that no search ends at the hole.
        hole = at
        while True:
            at = (at + 1) & mask
            if not table[at]:
                break
            home = hash(self.key(table[at] - 1)) & mask
            if (at - home) & mask >= (at - hole) & mask:
                table[hole] = table[at]
                hole = at
        table[hole] = 0
        self.states[entry] = EntryState.NONE
        self._unused.append(entry)
        self._count -= 1

    def holds(self, entry: int) -> bool:
        """Returns True if an entry has this number."""
        return entry < len(self.states) and self.states[entry] != EntryState.NONE

    def key(self, entry: int) -> SegmentKey:
        """The key of an entry."""
        return SegmentKey(bytes(self._keys[entry * KEY_BYTES : (entry + 1) * KEY_BYTES]))

    def note(self, entry: int) -> bytes:
        """The packed note of an entry."""
        return bytes(self._notes[entry * NOTE_BYTES : (entry + 1) * NOTE_BYTES])

    def set_note(self, entry: int, note: bytes) -> None:
        """Replace the packed note of an entry."""
        self._notes[entry * NOTE_BYTES : (entry + 1) * NOTE_BYTES] = note

    def _put(self, entry: int, key: SegmentKey) -> None:
        table, mask = self._table, self._mask
        at = hash(key) & mask
        while table[at]:
            at = (at + 1) & mask
        table[at] = entry + 1

    def _rehash(self) -> None:
        self._table = array("I", [0]) * (2 * len(self._table))
        self._mask = len(self._table) - 1
        for entry in range(len(self.slots)):
            if self.states[entry]:
                self._put(entry, self.key(entry))

    def check_integrity(self) -> None:
        """Raises AssertionError when an entry cannot be found by its key."""
        found = [entry - 1 for entry in self._table if entry]
        assert sorted(found) == [entry for entry in range(self.limit) if self.holds(entry)]
        assert len(found) == self._count == self.limit - len(self._unused)
        for entry in found:
            at = hash(self.key(entry)) & self._mask
            while self._table[at] != entry + 1:
                assert self._table[at], f"entry {entry} cannot be found"
                at = (at + 1) & self._mask
