"""One device of the disk tier, open: its slabs and their tables.

The directory has these files, all with mode 0600::

    tokenlake-disk.json   version of the format, cluster, node; whether segments are encrypted (`directory`)
    slab-N                the places of one tenant and slot size (`segments`)
    table-N               the records of these places (`table`)
    orders                orders of operators (`tokenlake_server.start.standing_orders`)
    lock                  locked by the daemon that uses the directory

A segment is stored in this order: its bytes are written, the slab is synced, its record is written, the table is
synced. So the bytes of each segment with a record were on the device. Each read verifies that a later segment has not
replaced them. A segment that must never be found again is erased in this order: its header is written with zeros, the
slab is synced, then the record. Neither needs space that the files do not have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tokenlake.core.events import MAX_FOUND
from tokenlake.disk.places import RECORD_BYTES, slab_bytes, stride
from tokenlake_server.disk.directory import (
    FORMAT,
    FRESH_IDENTITY,
    Identity,
    own_names,
    read_identity,
    refusal_of,
    repair_identity,
    slab_name,
    slab_numbers,
    table_name,
    write_identity,
)
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import NO_SPACE, File, Files
from tokenlake_server.disk.segments import Mismatch, SegmentIO, Stored, StoredSegment, aligned_memory
from tokenlake_server.disk.table import (
    BLOCK_BYTES,
    RECORD,
    STORED,
    Records,
    Slab,
    pack_slab,
    read_slab,
    read_sound,
    scan,
    seal,
    table_bytes,
    write_records,
)

log = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20
"""Bytes of the file system that are left free, for other programs."""
FREE_SHARE = 0.95
"""Share of the free space that a device without a size takes."""
GROWTH_BYTES = 64 << 20
"""A slab grows by so many bytes at a time where the device has room."""
GROWTH_PARTS = 64
"""It grows by at most this part of the bytes that the device may take."""
OWN_BYTES = 4 << 20
"""Bytes that are taken beside slabs and tables, at most: the orders, the identity, and the file of a check."""
MAX_SLABS = 1 << 16


class Unusable(Exception):
    """The files in the directory are not for this daemon: another version or cluster wrote them, or they are encrypted
    and the daemon has no keys. The message names their state."""


class Place(NamedTuple):
    """One entry of a batch: the place of a segment, and the facts about the segment that the table keeps."""

    slot: int
    generation: int
    shards: int
    key: bytes
    note: bytes


class Found(NamedTuple):
    """Segments of one slab that have records, at most `MAX_FOUND`."""

    slab: Slab
    shards: int
    keys: bytes
    places: bytes
    """Slot and generation of each, packed as in `tokenlake.disk.places`."""
    notes: bytes


class _OpenSlab:
    """A slab and its table, and the bytes that were allocated for it."""

    def __init__(self, slab: Slab, file: File, table: File) -> None:
        self.slab = slab
        self.file = file
        self.table = table
        self.bytes = file.size()
        self.stride = stride(slab.slot_bytes)
        self.dirty = self.table_dirty = False
        """True while bytes were written that are not synced."""

    @property
    def places(self) -> int:
        """Number of places that the file has."""
        return max(0, self.bytes - BLOCK_BYTES) // self.stride

    def at(self, slot: int) -> int:
        """Offset of a place."""
        return BLOCK_BYTES + slot * self.stride

    def close(self) -> None:
        self.file.close()
        self.table.close()


class DiskStore:
    """The files of one device in use. `write`, `erase` and `read` may be called from several threads, each with its own
    `SegmentIO`; `slab_bytes`, `will_write` and `will_trim` on the control loop: they never block and raise nothing; the
    other methods from one thread at a time. All raise OSError. After one other than `NO_SPACE` in a method that changes
    records the device is to be closed and opened anew."""

    def __init__(self, files: Files, limit: int | None = None, growth_bytes: int = GROWTH_BYTES) -> None:
        """`files`: closed by `close`. `open` comes before everything else. `limit`: the most bytes of all slabs and
        tables; None: no limit. `growth_bytes`: a slab grows by so many bytes at a time, or by a place if that is more,
        where the limit allows it."""
        self._files = files
        self.limit = limit
        self._growth_bytes = growth_bytes if limit is None else min(growth_bytes, limit // GROWTH_PARTS)
        self._slabs: dict[tuple[str, int], _OpenSlab] = {}
        self._lock = threading.Lock()
        """Guards `_slabs` and the size of slabs. It is held while the file system makes or resizes a slab."""
        self._ends: dict[tuple[str, int], int] = {}
        """Number of places that each slab is to keep at least, by the orders so far."""
        self._ends_lock = threading.Lock()
        """Guards `_ends`. It is held for no operation on files, so that the control loop may take it."""
        self._names_changed = False
        self.keys = DiskKeys()
        self.unreadable = 0
        """Segments with a record at `open` whose key of the setting `disk_keys` is missing; they are forgotten."""
        self.lost = 0
        """Segments whose record or file was damaged; counted by `open`."""

    def open(self, cluster: str, node: str, keys: DiskKeys, *, empty: bool = False) -> Iterator[Found]:
        """Begin to use the directory. `empty`: all segments are removed first. Returns the segments that can be read.
        Raises `Unusable`."""
        self.keys = keys
        names = own_names(self._files)
        identity = read_identity(self._files)
        # A process that was killed at its first start leaves an identity that has not its name yet, and nothing else.
        reason = refusal_of(identity, cluster) if names and names != [FRESH_IDENTITY] else ""
        if reason:
            raise Unusable(reason)
        if identity is not None and identity.encrypted and not keys.current and not empty:
            raise Unusable("its segments are encrypted, and the setting 'disk_keys' is empty")
        plain = identity is not None and keys.current and not identity.encrypted
        if identity is not None and plain:
            log.warning(
                "the segments of disk %s of node '%s' were stored without encryption, and 'disk_keys' is set now: they "
                "are removed",
                identity.device,
                identity.node,
            )
        if plain or empty:
            for name in names:
                self._files.remove(name)
            self._files.sync_names()
            identity = None
        if identity is None:
            write_identity(
                self._files,
                Identity(
                    format=FORMAT, cluster=cluster, node=node, device=uuid.uuid4().hex, encrypted=bool(keys.current)
                ),
            )
        else:
            repair_identity(self._files, identity)
        for number in slab_numbers(self._files):
            self._open_slab(number)
        return self._found([(each, self._stored_in(each)) for each in self._slabs.values()])

    def _open_slab(self, number: int) -> None:
        names = self._files.names()
        paths = slab_name(number), table_name(number)
        files: list[File] = []
        if paths[0] not in names:
            files.append(self._files.open(paths[1]))
            self.lost += self._records_of(files[0])
            self._remove(number, files)
            return
        try:
            for path in paths:
                files.append(self._files.open(path, create=path not in names, direct=path == paths[0]))
            file, table = files
            blocks = [aligned_memory(BLOCK_BYTES) for _ in files]
            sizes = [read_sound(each, 0, block) for each, block in zip(files, blocks, strict=True)]
            found = [read_slab(number, block[:size]) for block, size in zip(blocks, sizes, strict=True)]
            slab = found[0] or found[1]
            if slab is None or (slab.tenant, slab.slot_bytes) in self._slabs:
                # Without its identity a slab is of no tenant. One that was made shortly before a crash has no segments.
                self.lost += self._records_of(table)
                self._remove(number, files)
                return
            opened = self._slabs[slab.tenant, slab.slot_bytes] = _OpenSlab(slab, file, table)
            self._ends[slab.tenant, slab.slot_bytes] = opened.places
        except BaseException:
            for each in files:
                each.close()
            raise
        for each, block in zip(files, found, strict=True):
            if block != slab:
                log.warning("the identity of slab %d was damaged, and is written anew", number)
                _write_block(each, slab)
                each.sync()
        # The records of a process that was killed may be in the kernel's cache only.
        table.sync()
        missing = table_bytes(opened.places) - table.size()
        if missing > 0:
            log.warning("the table of slab %d lacks %d bytes: the segments there are lost", number, missing)
            with contextlib.suppress(OSError):
                table.write(table.size(), [bytes(missing)])

    def _records_of(self, table: File) -> int:
        return len(scan(table, max(0, table.size() - BLOCK_BYTES) // RECORD_BYTES).stored)

    def _stored_in(self, slab: _OpenSlab) -> Records:
        """The sound records of a slab. The other ones are lost, and so are segments whose place is behind the end of
        the slab, because it was cut off."""
        in_table = max(0, slab.table.size() - BLOCK_BYTES) // RECORD_BYTES
        stored, damaged = scan(slab.table, max(in_table, slab.places))
        inside = stored["slot"] < slab.places
        self.lost += len(stored) - int(inside.sum()) + len(damaged)
        try:
            self._records(slab, damaged, None)
            slab.table.sync()
        except OSError as error:
            # They are counted again when the device is opened next.
            log.warning("damaged records of slab %d cannot be written anew: %s", slab.slab.number, error.strerror)
        return stored[inside]

    def _remove(self, number: int, files: Sequence[File]) -> None:
        for file in files:
            file.close()
        names = self._files.names()
        for name in (table_name(number), slab_name(number)):
            if name in names:
                self._files.remove(name)
        self._names_changed = True

    def _remove_slab(self, slab: _OpenSlab) -> None:
        self._slabs.pop((slab.slab.tenant, slab.slab.slot_bytes))
        self._remove(slab.slab.number, [slab.file, slab.table])

    def _found(self, slabs: list[tuple[_OpenSlab, Records]]) -> Iterator[Found]:
        for each, stored in slabs:
            readable = np.isin(stored["encryption"], self.keys.readable)
            self.unreadable += int((~readable).sum())
            self._records(each, stored["slot"][~readable].tolist(), None)
            yield from self._parts(each, stored[readable])
            if not readable.any():
                # The rules do not know of it, so they could not give its bytes to another slab.
                self._ends.pop((each.slab.tenant, each.slab.slot_bytes), None)
                self._remove_slab(each)

    def _parts(self, slab: _OpenSlab, readable: Records) -> Iterator[Found]:
        for shards in np.unique(readable["shards"]).tolist():
            same = readable[readable["shards"] == shards]
            for at in range(0, len(same), MAX_FOUND):
                part = same[at : at + MAX_FOUND]
                places = np.stack([part["slot"], part["generation"]], axis=1).astype("<u4")
                yield Found(slab.slab, shards, part["key"].tobytes(), places.tobytes(), part["note"].tobytes())

    # -- orders

    def will_write(self, tenant: str, slot_bytes: int, places: int) -> None:
        """A write to some of the first `places` places of a slab is ordered: a trim that was ordered before and is
        still to be carried out keeps these."""
        with self._ends_lock:
            self._ends[tenant, slot_bytes] = max(places, self._ends.get((tenant, slot_bytes), 0))

    def will_trim(self, tenant: str, slot_bytes: int, places: int) -> None:
        """A `trim` is ordered; no write behind the first `places` places is under way."""
        with self._ends_lock:
            self._ends[tenant, slot_bytes] = places

    # -- segments

    def write(self, segment_io: SegmentIO, where: StoredSegment, segment: memoryview, stored: Stored) -> None:
        """Write a segment to its place; the slab is made or grows where needed. Raises OSError, with one of `NO_SPACE`
        where the device has no space for the place."""
        with self._lock:
            slab = self._slab(where.tenant, where.slot_bytes)
            if where.slot >= slab.places:
                self._grow(slab, where.slot + 1)
        segment_io.write(slab.file, slab.at(where.slot), where, segment, stored)
        # Behind the write: a sync that begins before its end does not count for it.
        slab.dirty = True

    def read(self, segment_io: SegmentIO, where: StoredSegment, segment: memoryview) -> Stored:
        """Fill `segment` with a segment and verify it. Raises `Mismatch` and OSError."""
        slab = self._slabs.get((where.tenant, where.slot_bytes))
        if slab is None:
            raise Mismatch("there is no slab of this tenant and slot size")
        return segment_io.read(slab.file, slab.at(where.slot), where, segment)

    def erase(self, segment_io: SegmentIO, where: StoredSegment) -> None:
        """Overwrite the header of a place; `sync_slabs` and `forget` follow."""
        slab = self._slabs.get((where.tenant, where.slot_bytes))
        if slab is not None and where.slot < slab.places:
            segment_io.erase(slab.file, slab.at(where.slot))
            slab.dirty = True

    def _slab(self, tenant: str, slot_bytes: int) -> _OpenSlab:
        slab = self._slabs.get((tenant, slot_bytes))
        if slab is not None:
            return slab
        taken = {each.slab.number for each in self._slabs.values()}
        number = next((number for number in range(MAX_SLABS) if number not in taken), None)
        if number is None:
            raise OSError(NO_SPACE[0], "the device has too many slabs")
        fresh = Slab(number, tenant, slot_bytes)
        files: list[File] = []
        try:
            for name in (slab_name(number), table_name(number)):
                files.append(self._files.open(name, create=True, direct=not files))
                _write_block(files[-1], fresh)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(number, files)
            raise
        self._names_changed = True
        slab = self._slabs[tenant, slot_bytes] = _OpenSlab(fresh, *files)
        slab.dirty = slab.table_dirty = True
        return slab

    def _grow(self, slab: _OpenSlab, places: int) -> None:
        """Give a slab at least so many places; called with the lock."""
        step = max(self._growth_bytes // slab.stride, 1)
        wanted = places + -places % step
        if self.limit is not None and self._bytes(slab, wanted) > self.limit:
            self._give_back(slab)
            while wanted > places and self._bytes(slab, wanted) > self.limit:
                wanted = places
            if self._bytes(slab, wanted) > self.limit:
                raise OSError(NO_SPACE[0], "the slabs take all bytes that the device may take")
        try:
            self._resize(slab, wanted)
        except OSError:
            self._resize(slab, places)

    def _bytes(self, slab: _OpenSlab, places: int) -> int:
        """Bytes of all slabs and tables if one of them had so many places."""
        others = sum(each.bytes + table_bytes(each.places) for each in self._slabs.values() if each is not slab)
        return others + slab.at(places) + table_bytes(places)

    def _resize(self, slab: _OpenSlab, places: int) -> None:
        # The table first: a slab without its records would have to be searched after a crash.
        size, end = slab.table.size(), table_bytes(places)
        if size < end:
            slab.table.write(size, [bytes(end - size)])
            slab.table_dirty = True
        slab.file.allocate(slab.at(places))
        slab.bytes = slab.file.size()

    def _give_back(self, growing: _OpenSlab) -> None:
        """Cut all slabs off behind the places that orders need; called with the lock."""
        for name, each in self._slabs.items():
            if each is not growing:
                self._cut(each, self._ends.get(name, 0))

    def _cut(self, slab: _OpenSlab, places: int) -> None:
        if places < slab.places:
            # The table first, so that no record is for a place that is missing.
            slab.table.truncate(table_bytes(places))
            slab.file.truncate(slab.at(places))
            slab.bytes = slab.file.size()

    @property
    def slab_bytes(self) -> int:
        """Bytes that are allocated for all slabs and their tables."""
        # Not under the lock, which is held for as long as a device that hangs does not answer.
        return sum(each.bytes + table_bytes(each.places) for each in list(self._slabs.values()))

    def room(self, *, full: bool = False) -> int:
        """Bytes that segments may take, as the rules count them. `full`: no more than they take now."""
        with self._lock:
            used = sum(slab_bytes(each.slab.slot_bytes, each.places) for each in self._slabs.values())
            free = self._files.free_bytes()
        if full:
            return used if self.limit is None else min(self.limit, used)
        if self.limit is None:
            return used + max(0, int(free * FREE_SHARE) - RESERVE_BYTES)
        return min(self.limit, used + max(0, free - RESERVE_BYTES))

    # -- records

    def sync_slabs(self) -> None:
        """Return when all segments that were written before are on the device."""
        with self._lock:
            dirty = [each for each in self._slabs.values() if each.dirty]
            changed, self._names_changed = self._names_changed, False
            for each in dirty:
                each.dirty = False
        for each in dirty:
            each.file.sync()
        if changed:
            self._files.sync_names()

    def stored(self, tenant: str, slot_bytes: int, places: Sequence[Place]) -> None:
        """Record segments that were written, and synced by `sync_slabs`. The record is on the device after `sync`."""
        records = np.zeros(len(places), RECORD)
        records["kind"] = STORED
        records["encryption"] = self.keys.current
        for field in ("slot", "generation", "shards"):
            records[field] = [getattr(place, field) for place in places]
        records["key"] = np.frombuffer(b"".join(place.key for place in places), RECORD["key"])
        records["note"] = np.frombuffer(b"".join(place.note for place in places), RECORD["note"])
        self._records(self._slabs[tenant, slot_bytes], [place.slot for place in places], seal(records))

    def forget(self, tenant: str, slot_bytes: int, slots: Sequence[int]) -> None:
        """Record that places have no segment any more. The record is on the device after `sync`."""
        slab = self._slabs.get((tenant, slot_bytes))
        if slab is not None:
            self._records(slab, list(slots), None)

    def _records(self, slab: _OpenSlab, slots: list[int], records: Records | None) -> None:
        """Write the records of some places, but for those behind the end of the slab."""
        inside = [at for at, slot in enumerate(slots) if slot < slab.places]
        if inside:
            kept = records[inside] if records is not None else None
            write_records(slab.table, [slots[at] for at in inside], kept)
            slab.table_dirty = True

    def trim(self, tenant: str, slot_bytes: int, places: int) -> None:
        """Cut a slab off behind its first `places` places, whose segments are void, or behind the writes that were
        ordered since `will_trim`. A slab without places is removed."""
        with self._lock:
            slab = self._slabs.get((tenant, slot_bytes))
            if slab is None:
                return
            # Read under the lock: a write that is ordered later takes the lock later, and lets the slab grow again.
            with self._ends_lock:
                kept = max(places, self._ends.get((tenant, slot_bytes), 0))
                if not kept:
                    self._ends.pop((tenant, slot_bytes), None)
            if kept:
                self._cut(slab, kept)
            else:
                self._remove_slab(slab)

    def sync(self) -> None:
        """Return when all records are on the device."""
        with self._lock:
            dirty = [each for each in self._slabs.values() if each.table_dirty]
            for each in dirty:
                each.table_dirty = False
        for each in dirty:
            each.table.sync()

    def close(self) -> None:
        """Close all files."""
        for each in self._slabs.values():
            each.close()
        self._slabs.clear()
        self._files.close()


def _write_block(file: File, slab: Slab) -> None:
    block = aligned_memory(BLOCK_BYTES)
    block[:] = pack_slab(slab)
    file.write(0, [block])
