"""The ledger of a daemon: what its memory holds, in a memfd of its own that no engine gets.

::

    0        PAGE                                    records_at
    | header | table of regions | numbers of locks | records of a region | records of another | ...

Each entry of the table has a checksum, so that one that was being written when the process ended does not count. The
order of writes is that of this process: a process that is killed leaves what it had written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import LimitReached
from tokenlake.memory.ledger import stride
from tokenlake.memory.region import PAGE, RegionShape
from tokenlake.wire.slots import SlotRef

FORMAT = 1
"""Version of the ledger and of the records in it: a daemon with another one starts empty."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK
_MAGIC = b"tlledger"
_HEADER = struct.Struct("<8sIIIIQIIQ64s64s")
"""Magic number, format, clean, complete, huge pages, incarnation, next region, number of places in the table,
time of the last eviction, node and cluster."""
_CLEAN_AT, _COMPLETE_AT, _INCARNATION_AT, _NEXT_AT, _EVICTED_AT = 12, 16, 24, 32, 40
_ENTRY = struct.Struct("<IIQQQQQ64s16s")
"""Number of the region, its state, bytes, bytes of a slot, incarnation of the daemon that made it, place and bytes of
its records, name and digest of the tenant."""
ENTRY_BYTES = 144
_CRC = struct.Struct("<I")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SPARE, _CUT = 1, 2
MOST_REGIONS = 1024
"""Least number of places in the table of regions."""
MOST_LOCKS = 16384
"""Maximum number of locks in the ledger."""


class LedgerRefused(Exception):
    """The ledger of the daemon before cannot be used; the text says why."""


class Owner(NamedTuple):
    """The node whose memory a ledger describes."""

    node: str
    cluster: str
    huge_pages: bool


class Entry(NamedTuple):
    """A region in the ledger."""

    number: int
    nbytes: int
    slot_bytes: int
    """0 for a region that belongs to no tenant."""
    maker: int
    """Incarnation of the daemon that made the region: with the number the name of its descriptor."""
    records_at: int
    records_bytes: int
    tenant: str
    digest: bytes
    """16 bytes that follow from the tenant's secret: a tenant of the same name with another secret is another one."""


class LedgerFile:
    """A ledger that this process maps. `write` takes some 2 us for each record; `complete` and `clean` are the words of
    a daemon to the next one."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)
        self._places: int = _HEADER.unpack_from(self._view)[7]
        self._regions: dict[int, tuple[int, Entry]] = {}
        """The place in the table, and the entry, of each region."""
        self._locks: dict[int, int] = {}
        """The place in the table of each lock, by its number."""
        self._free = list(range(MOST_LOCKS - 1, -1, -1))
        """The other places, the next one last."""
        self._records: dict[int, tuple[int, int, int]] = {}
        """Where the records of a region begin, their stride, the number of its slots."""

    @classmethod
    def make(cls, owner: Owner, incarnation: int, regions: int, memory: int) -> LedgerFile:
        """A new ledger. `regions`: the number of regions that `memory` is divided into at first. Raises
        `LimitReached`."""
        places = max(MOST_REGIONS, 4 * regions)
        try:
            descriptor = os.memfd_create("tokenlake-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(descriptor, 0o400)
            os.ftruncate(descriptor, _size(places, regions, memory))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise LimitReached(f"the kernel gave no memory for the ledger: {error.strerror}") from error
        header = _HEADER.pack(
            _MAGIC,
            FORMAT,
            0,
            1,
            owner.huge_pages,
            incarnation,
            0,
            places,
            0,
            owner.node.encode(),
            owner.cluster.encode(),
        )
        os.pwrite(descriptor, header, 0)
        return cls(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def adopt(cls, descriptor: int, owner: Owner, regions: int, memory: int) -> LedgerFile:
        """The ledger of the daemon before. Owns `descriptor` unless it raises. Raises `LedgerRefused`."""
        nbytes = os.fstat(descriptor).st_size
        if nbytes < PAGE or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise LedgerRefused("its ledger is not one of a daemon")
        magic, version, _, complete, huge, _, _, places, _, node, cluster = _HEADER.unpack(
            os.pread(descriptor, _HEADER.size, 0)
        )
        if magic != _MAGIC or version != FORMAT:
            raise LedgerRefused(f"its ledger has the format {version}, and this version of tokenlake reads {FORMAT}")
        found = Owner(_text(node), _text(cluster), bool(huge))
        if (found.node, found.cluster) != (owner.node, owner.cluster):
            raise LedgerRefused(
                f"it is of node {found.node} of cluster {found.cluster}, and this is node {owner.node} of cluster "
                f"{owner.cluster}"
            )
        if found.huge_pages != owner.huge_pages:
            raise LedgerRefused("the setting 'huge_pages' has changed")
        if not complete:
            raise LedgerRefused("the daemon before ended before all of its descriptors were handed over")
        if nbytes < _table_end(places):
            raise LedgerRefused("its ledger is too short")
        wanted = _size(places, regions, memory)
        if wanted > nbytes:
            os.ftruncate(descriptor, wanted)
            nbytes = wanted
        ledger = cls(descriptor, nbytes)
        ledger._read_table()
        numbers = np.frombuffer(ledger._view, np.uint64, MOST_LOCKS, _locks_at(ledger._places))
        ledger._locks = {int(numbers[place]): place for place in np.flatnonzero(numbers).tolist()}
        taken = dict.fromkeys(ledger._locks.values())
        ledger._free = [place for place in ledger._free if place not in taken]
        return ledger

    # -- the words to the next daemon

    @property
    def incarnation(self) -> int:
        """Incarnation of the daemon that wrote the ledger last."""
        return int(_U64.unpack_from(self._view, _INCARNATION_AT)[0])

    @property
    def evicted(self) -> int:
        """The time of the last eviction by an operator that the segments have followed, in nanoseconds."""
        return int(_U64.unpack_from(self._view, _EVICTED_AT)[0])

    @evicted.setter
    def evicted(self, evicted: int) -> None:
        _U64.pack_into(self._view, _EVICTED_AT, evicted)

    @property
    def next_region(self) -> int:
        """A number above that of every region so far."""
        return int(_U32.unpack_from(self._view, _NEXT_AT)[0])

    @property
    def clean(self) -> bool:
        """True: the daemon ended in order, and the bytes of all segments are right."""
        return bool(_U32.unpack_from(self._view, _CLEAN_AT)[0])

    @clean.setter
    def clean(self, clean: bool) -> None:
        _U32.pack_into(self._view, _CLEAN_AT, clean)

    def set_complete(self, complete: bool) -> None:
        """Record whether the store has all descriptors. Without those of the locks that engines hold, the next daemon
        could not know which slots are read."""
        _U32.pack_into(self._view, _COMPLETE_AT, complete)

    def take_over(self, incarnation: int) -> None:
        """This daemon writes the ledger from now on: a crash finds it so."""
        self.clean = False
        _U64.pack_into(self._view, _INCARNATION_AT, incarnation)

    # -- locks

    @property
    def locks(self) -> list[int]:
        """The numbers of the locks that the store has: one of them that the next daemon does not get was lost."""
        return list(self._locks)

    def add_lock(self, number: int) -> bool:
        """Record a lock, once the store has it. Returns False if there is no place for it."""
        if not self._free:
            return False
        place = self._locks[number] = self._free.pop()
        _U64.pack_into(self._view, _locks_at(self._places) + 8 * place, number)
        return True

    def remove_lock(self, number: int) -> None:
        """Record that a lock is not needed any more, before the store lets it go."""
        place = self._locks.pop(number, None)
        if place is not None:
            _U64.pack_into(self._view, _locks_at(self._places) + 8 * place, 0)
            self._free.append(place)

    # -- regions

    def entries(self) -> list[Entry]:
        """The regions, in order of their numbers."""
        return [self._regions[number][1] for number in sorted(self._regions)]

    def entry(self, number: int) -> Entry | None:
        """The entry of a region."""
        found = self._regions.get(number)
        return None if found is None else found[1]

    def add_region(self, number: int, nbytes: int, maker: int) -> bool:
        """Record a region whose memory is there, and that belongs to no tenant. Returns False if there is no place for
        it: the region is not kept."""
        used = {place for place, _ in self._regions.values()}
        place = next((each for each in range(self._places) if each not in used), None)
        if place is None:
            return False
        self._write(place, Entry(number, nbytes, 0, maker, 0, 0, "", bytes(16)))
        return True

    def note_number(self, number: int) -> None:
        """Record that a region has the number, whether it is kept or not: no later region may get it, because engines
        map regions by their numbers."""
        _U32.pack_into(self._view, _NEXT_AT, max(self.next_region, number + 1))

    def cut(self, number: int, nbytes: int, slot_bytes: int, tenant: str, digest: bytes) -> bool:
        """Record that a region was cut into slots for a tenant. Its records are empty. Returns False if there is no
        room for them: the entry is removed then, and the region is not kept."""
        found = self._regions.get(number)
        if found is None:
            return False
        slots = RegionShape(nbytes, slot_bytes).slots
        size = -(-slots * stride(slot_bytes) // PAGE) * PAGE
        at = self._room(size)
        if at is None:
            self.remove(number)
            return False
        # A daemon that was killed in `remove` left records there.
        self._map.madvise(mmap.MADV_REMOVE, at, size)
        self._write(found[0], Entry(number, nbytes, slot_bytes, found[1].maker, at, size, tenant, digest))
        return True

    def remove(self, number: int) -> None:
        """Remove the entry of a region, and free its records."""
        found = self._regions.pop(number, None)
        if found is None:
            return
        self._records.pop(number, None)
        place, entry = found
        at = PAGE + place * ENTRY_BYTES
        self._view[at : at + ENTRY_BYTES] = bytes(ENTRY_BYTES)
        if entry.records_bytes:
            self._map.madvise(mmap.MADV_REMOVE, entry.records_at, entry.records_bytes)

    def _write(self, place: int, entry: Entry) -> None:
        state = _CUT if entry.slot_bytes else _SPARE
        fields = _ENTRY.pack(
            entry.number,
            state,
            entry.nbytes,
            entry.slot_bytes,
            entry.maker,
            entry.records_at,
            entry.records_bytes,
            entry.tenant.encode(),
            entry.digest,
        )
        at = PAGE + place * ENTRY_BYTES
        self._view[at : at + _CRC.size + _ENTRY.size] = _CRC.pack(zlib.crc32(fields)) + fields
        self._note(place, entry)

    def _note(self, place: int, entry: Entry) -> None:
        self._regions[entry.number] = place, entry
        if entry.slot_bytes:
            slots = RegionShape(entry.nbytes, entry.slot_bytes).slots
            self._records[entry.number] = entry.records_at, stride(entry.slot_bytes), slots

    def _room(self, size: int) -> int | None:
        """Where `size` bytes of records fit between those of other regions."""
        at = _table_end(self._places)
        taken = sorted((each.records_at, each.records_bytes) for _, each in self._regions.values())
        for start, length in taken:
            if length and start - at >= size:
                return at
            at = max(at, start + length)
        return at if at + size <= len(self._view) else None

    def _read_table(self) -> None:
        for place in range(self._places):
            raw = self._view[PAGE + place * ENTRY_BYTES :][:ENTRY_BYTES]
            fields = raw[_CRC.size : _CRC.size + _ENTRY.size]
            if _CRC.unpack_from(raw)[0] != zlib.crc32(fields):
                continue
            number, state, nbytes, slot_bytes, maker, at, size, tenant, digest = _ENTRY.unpack(fields)
            inside = _table_end(self._places) <= at <= at + size <= len(self._view)
            if (state == _SPARE and not slot_bytes) or (state == _CUT and slot_bytes and inside):
                shape = RegionShape(nbytes, slot_bytes or 1)
                if state == _SPARE or shape.slots * stride(slot_bytes) <= size:
                    self._note(place, Entry(number, nbytes, slot_bytes, maker, at, size, _text(tenant), digest))

    # -- records

    def write(self, place: SlotRef, record: bytes) -> None:
        """Write the record of a slot; an empty one clears it. No effect for a region that is not in the ledger."""
        found = self._records.get(place.region)
        if found is None or place.slot >= found[2]:
            return
        at = found[0] + place.slot * found[1]
        self._view[at : at + found[1]] = record.ljust(found[1], b"\0")

    def records(self, number: int) -> NDArray[np.uint8]:
        """The records of a region, shape [slots, stride]: an array over the ledger."""
        at, size, slots = self._records[number]
        return np.frombuffer(self._view, np.uint8, slots * size, at).reshape(slots, size)

    def close(self) -> None:
        """Unmap the ledger in this process. Raises `BufferError` while an array over it exists."""
        self._view.release()
        self._map.close()
        os.close(self.descriptor)


def found_records(records: NDArray[np.uint8], generations: NDArray[np.uint64]) -> Iterator[tuple[int, bytes]]:
    """The slots of a region whose record has the slot's generation, with the record. `generations`: one per slot."""
    written = records[:, 4:12].copy().view(np.uint64)[:, 0]
    for slot in np.flatnonzero((written != 0) & (written == generations)).tolist():
        yield slot, records[slot].tobytes()


def clear_void(records: NDArray[np.uint8], generations: NDArray[np.uint64]) -> None:
    """Clear the records of a region that have not the slot's generation, so that they do not count when the slot
    reaches it. `generations`: one per slot."""
    written = records[:, 4:12].copy().view(np.uint64)[:, 0]
    records[(written != 0) & (written != generations)] = 0


def _locks_at(places: int) -> int:
    return PAGE + -(-places * ENTRY_BYTES // PAGE) * PAGE


def _table_end(places: int) -> int:
    return _locks_at(places) + 8 * MOST_LOCKS


def _size(places: int, regions: int, memory: int) -> int:
    """Bytes of the file, most of which are never touched: room for the records of the smallest slots."""
    return _table_end(places) + -(-memory // 8 // PAGE) * PAGE + (places + 4 * regions) * (4 << 20)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
