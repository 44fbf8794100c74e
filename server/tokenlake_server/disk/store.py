"""One device of the disk tier, open: its slabs and its index.

The directory has these files, all with mode 0600::

    tokenlake-disk.json   version of the format, cluster, node; whether segments are encrypted
    log-N, snapshot-N     the index (`index`)
    slab-N                the places of one tenant and slot size (`segments`)
    lock                  locked by the daemon that uses the directory
    aside-K-...           files of another version or cluster, which no daemon uses

A segment is stored in this order: its bytes are written, the slab is synced, the record is appended to the index, the
index is synced. So the bytes of each segment in the index were on the device. Each read verifies that a later segment
has not replaced them.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tokenlake.core.events import MAX_FOUND
from tokenlake.disk.places import NOTE_BYTES, stride
from tokenlake.keys import KEY_BYTES
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import File, Files
from tokenlake_server.disk.index import RECORD, Index, Kind, Records, is_index_name, live_records, read_index
from tokenlake_server.disk.segments import Mismatch, SegmentIO, Stored, StoredSegment

__all__ = [
    "FORMAT",
    "DiskStore",
    "Found",
    "Identity",
    "Place",
    "Slab",
    "SurveyedSlab",
    "WrongKeys",
    "aside_names",
    "own_names",
    "read_identity",
    "survey",
]

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format of all files in the directory."""
IDENTITY = "tokenlake-disk.json"
_FRESH_IDENTITY = "tokenlake-disk.new"
_SLAB = re.compile(r"slab-([0-9]{5})")
_ASIDE = re.compile(r"aside-([0-9]+)-(.+)")
_TENANT_BYTES = KEY_BYTES + NOTE_BYTES
GROWTH_BYTES = 64 << 20


class WrongKeys(Exception):
    """The segments in the directory are encrypted, and the daemon has no keys; the message names the directory's
    state."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a directory and the format of its files, in a file of their own. Another format may have other
    fields than `format`. A daemon uses a directory of its format and its cluster."""

    format: int
    cluster: str = ""
    node: str = ""
    device: str = ""
    """A random name of the directory, for people."""
    encrypted: bool = False


class Slab(NamedTuple):
    """A slab: its number on the device, and the segments that it has places for."""

    number: int
    tenant: str
    slot_bytes: int


class Place(NamedTuple):
    """One entry of a batch: the place of a segment, and the facts about the segment that the index keeps."""

    slot: int
    generation: int
    shards: int
    key: bytes
    note: bytes


class Found(NamedTuple):
    """Segments of one slab that were in the index, at most `MAX_FOUND`."""

    slab: Slab
    shards: int
    keys: bytes
    places: bytes
    """Slot and generation of each, packed as in `tokenlake.disk.places`."""
    notes: bytes


def read_identity(files: Files) -> Identity | None:
    """The identity of a directory; None where it has none, or a damaged one. Raises OSError."""
    if IDENTITY not in files.names():
        return None
    file = files.open(IDENTITY)
    try:
        data = bytearray(file.size())
        file.read(0, [memoryview(data)])
    finally:
        file.close()
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(bytes(data), type=Identity)
    return None


def own_names(files: Files) -> list[str]:
    """The names of the files of the tier that are in use, the identity last: a crash while they are renamed or removed
    one after the other leaves a directory that is treated in the same way again."""
    names = [name for name in files.names() if name == _FRESH_IDENTITY or is_index_name(name) or _SLAB.fullmatch(name)]
    return sorted(names) + [name for name in files.names() if name == IDENTITY]


def aside_names(files: Files) -> list[str]:
    """The names of the files that were kept aside."""
    return sorted(name for name in files.names() if _ASIDE.fullmatch(name))


class SurveyedSlab(NamedTuple):
    """A slab as the index has it."""

    slab: Slab
    name: str
    """Name of its file."""
    stored: Records


def survey(files: Files) -> list[SurveyedSlab]:
    """The slabs in the index of a directory; changes nothing. Raises OSError."""
    live = live_records(read_index(files)[0])
    return [
        SurveyedSlab(slab, _slab_name(slab.number), live.stored[live.stored["slab"] == slab.number])
        for slab in map(slab_of, live.slabs)
    ]


class _OpenSlab:
    """A slab, its file, and the bytes that were allocated for it."""

    def __init__(self, slab: Slab, file: File) -> None:
        self.slab = slab
        self.file = file
        self.bytes = file.size()
        self.dirty = False
        """True while bytes were written that are not synced."""


class DiskStore:
    """The files of one device in use. `write` and `read` may be called from several threads, each with its own
    `SegmentIO`; `slab_bytes`, `will_write` and `will_trim` on the control loop: they never block and raise nothing; the
    other methods from one thread at a time. All raise OSError, after which the device is to be closed and opened
    anew."""

    def __init__(self, files: Files, index: Index | None = None, growth_bytes: int = GROWTH_BYTES) -> None:
        """`files`: closed by `close`. `open` comes before everything else. `growth_bytes`: a slab grows by so many
        bytes at a time, or by a place if that is more."""
        self._files = files
        self._index = index or Index(files)
        self._growth_bytes = growth_bytes
        self._slabs: dict[tuple[str, int], _OpenSlab] = {}
        self._lock = threading.Lock()
        """Guards `_slabs` and the size of slabs. It is held while the file system makes or resizes a slab."""
        self._ends: dict[tuple[str, int], int] = {}
        """Number of places that each slab is to keep at least, by the orders so far. Changed on the control loop."""
        self._new_slabs: list[Slab] = []
        """Slabs whose record is not in the index yet."""
        self._names_changed = False
        self.keys = DiskKeys()
        self.aside = ""
        """The reason why `open` kept the former files of the directory aside; empty if it used them."""
        self.unreadable = 0
        """Segments in the index at `open` whose key of the setting `disk_keys` is missing."""

    def open(self, cluster: str, node: str, keys: DiskKeys) -> Iterator[Found]:
        """Read the index and begin to use the directory. Files of another version or cluster are renamed first. Returns
        the segments that can be read. Raises `WrongKeys`."""
        self.keys = keys
        names = own_names(self._files)
        identity = read_identity(self._files)
        reason = _refusal(identity, cluster) if names else ""
        if reason:
            self._keep_aside(names, reason)
            identity = None
        if identity is not None and identity.encrypted and not keys.current:
            raise WrongKeys("its segments are encrypted, and the setting 'disk_keys' is empty")
        if identity is not None and keys.current and not identity.encrypted:
            log.warning(
                "the segments of disk %s of node '%s' were stored without encryption, and 'disk_keys' is set now: they "
                "are removed",
                identity.device,
                identity.node,
            )
            for name in names:
                self._files.remove(name)
            self._files.sync_names()
            identity = None
        if identity is None:
            self._write_identity(
                Identity(
                    format=FORMAT, cluster=cluster, node=node, device=uuid.uuid4().hex, encrypted=bool(keys.current)
                )
            )
        live = self._index.recover()
        self._open_slabs(live.slabs)
        stored = live.stored
        readable = np.isin(
            stored["encryption"], [number for number in np.unique(stored["encryption"]) if number in keys]
        )
        readable &= np.isin(stored["slab"], [each.slab.number for each in self._slabs.values()])
        self.unreadable = len(stored) - int(readable.sum())
        return self._found(stored[readable])

    def _keep_aside(self, names: Sequence[str], reason: str) -> None:
        matches = map(_ASIDE.fullmatch, aside_names(self._files))
        number = max((int(match[1]) for match in matches if match is not None), default=0) + 1
        for name in names:
            self._files.rename(name, f"aside-{number}-{name}")
        self._files.sync_names()
        self.aside = f"{reason}; its files are kept aside as aside-{number}-*"

    def _write_identity(self, identity: Identity) -> None:
        if _FRESH_IDENTITY in self._files.names():
            self._files.remove(_FRESH_IDENTITY)
        file = self._files.open(_FRESH_IDENTITY, create=True)
        try:
            file.write(0, [msgspec.json.encode(identity)])
            file.sync()
        finally:
            file.close()
        self._files.rename(_FRESH_IDENTITY, IDENTITY)
        self._files.sync_names()

    def _open_slabs(self, records: Records) -> None:
        names = set(self._files.names())
        for slab in map(slab_of, records):
            name = _slab_name(slab.number)
            if name in names:
                self._slabs[slab.tenant, slab.slot_bytes] = _OpenSlab(slab, self._files.open(name, direct=True))
                names.remove(name)
        # A slab without a record was made shortly before a crash: it has no segments.
        for name in names:
            if _SLAB.fullmatch(name):
                self._files.remove(name)

    def _found(self, stored: Records) -> Iterator[Found]:
        for each in list(self._slabs.values()):
            of_slab = stored[stored["slab"] == each.slab.number]
            for shards in np.unique(of_slab["shards"]).tolist():
                same = of_slab[of_slab["shards"] == shards]
                for at in range(0, len(same), MAX_FOUND):
                    part = same[at : at + MAX_FOUND]
                    places = np.stack([part["slot"], part["generation"]], axis=1).astype("<u4")
                    yield Found(each.slab, shards, part["key"].tobytes(), places.tobytes(), part["note"].tobytes())

    # -- orders

    def will_write(self, tenant: str, slot_bytes: int, places: int) -> None:
        """A write to some of the first `places` places of a slab is ordered: a trim that was ordered before and is
        still to be carried out keeps these."""
        self._ends[tenant, slot_bytes] = max(places, self._ends.get((tenant, slot_bytes), 0))

    def will_trim(self, tenant: str, slot_bytes: int, places: int) -> None:
        """A `trim` is ordered; no write behind the first `places` places is under way."""
        self._ends[tenant, slot_bytes] = places

    # -- segments

    def write(self, segment_io: SegmentIO, where: StoredSegment, segment: memoryview, stored: Stored) -> None:
        """Write a segment to its place; the slab is made or grows where needed. Raises OSError, with ENOSPC where the
        device has no space for the place."""
        size = stride(where.slot_bytes)
        slab = self._slab(where.tenant, where.slot_bytes)
        end = (where.slot + 1) * size
        with self._lock:
            if end > slab.bytes:
                growth = max(self._growth_bytes // size, 1) * size
                try:
                    slab.file.allocate(end + -end % growth)
                except OSError:
                    slab.file.allocate(end)
                slab.bytes = slab.file.size()
        segment_io.write(slab.file, where.slot * size, where, segment, stored)
        # Behind the write: a sync that begins before its end does not count for it.
        slab.dirty = True

    def read(self, segment_io: SegmentIO, where: StoredSegment, segment: memoryview) -> Stored:
        """Fill `segment` with a segment and verify it. Raises `Mismatch` and OSError."""
        slab = self._slabs.get((where.tenant, where.slot_bytes))
        if slab is None:
            raise Mismatch("there is no slab of this tenant and slot size")
        return segment_io.read(slab.file, where.slot * stride(where.slot_bytes), where, segment)

    def _slab(self, tenant: str, slot_bytes: int) -> _OpenSlab:
        with self._lock:
            slab = self._slabs.get((tenant, slot_bytes))
            if slab is None:
                taken = {each.slab.number for each in self._slabs.values()}
                number = next(number for number in range(1 << 16) if number not in taken)
                fresh = Slab(number, tenant, slot_bytes)
                file = self._files.open(_slab_name(number), create=True, direct=True)
                slab = self._slabs[tenant, slot_bytes] = _OpenSlab(fresh, file)
                self._new_slabs.append(fresh)
                self._names_changed = True
            return slab

    @property
    def slab_bytes(self) -> int:
        """Bytes that are allocated for all slabs."""
        # Not under the lock, which is held for as long as a device that hangs does not answer.
        return sum(each.bytes for each in list(self._slabs.values()))

    def space(self) -> tuple[int, int]:
        """Returns (bytes that are allocated for all slabs, bytes that the file system has left), both while no slab
        changes its size."""
        with self._lock:
            return self.slab_bytes, self._files.free_bytes()

    # -- the index

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
        self._record_new_slabs()
        records = np.zeros(len(places), RECORD)
        records["kind"] = Kind.STORED
        records["slab"] = self._slabs[tenant, slot_bytes].slab.number
        records["encryption"] = self.keys.current
        for field in ("slot", "generation", "shards"):
            records[field] = [getattr(place, field) for place in places]
        records["key"] = np.frombuffer(b"".join(place.key for place in places), RECORD["key"])
        records["note"] = np.frombuffer(b"".join(place.note for place in places), RECORD["note"])
        self._index.append(records)

    def forget(self, tenant: str, slot_bytes: int, slots: Sequence[int]) -> None:
        """Record that places have no segment any more. The record is on the device after `sync`."""
        slab = self._slabs.get((tenant, slot_bytes))
        if slab is not None and slots:
            records = np.zeros(len(slots), RECORD)
            records["kind"], records["slab"], records["slot"] = Kind.FORGOTTEN, slab.slab.number, slots
            self._index.append(records)

    def trim(self, tenant: str, slot_bytes: int, places: int) -> None:
        """Void all segments behind the first `places` places of a slab that were recorded before, and cut the slab off
        there, or behind the writes that were ordered since `will_trim`."""
        slab = self._slabs.get((tenant, slot_bytes))
        if slab is None:
            return
        record = np.zeros(1, RECORD)
        record["kind"], record["slab"], record["slot"] = Kind.TRIMMED, slab.slab.number, places
        self._index.append(record)
        self._index.sync()
        with self._lock:
            # Read under the lock: a write that is ordered later takes the lock later, and lets the slab grow again.
            kept = max(places, self._ends.get((tenant, slot_bytes), 0))
            slab.file.truncate(kept * stride(slot_bytes))
            slab.bytes = slab.file.size()

    def sync(self) -> None:
        """Return when all records are on the device; make a snapshot where the logs have grown."""
        self._index.sync()
        if self._index.wants_snapshot:
            self._index.snapshot()

    def _record_new_slabs(self) -> None:
        with self._lock:
            slabs, self._new_slabs = self._new_slabs, []
        if slabs:
            records = np.zeros(len(slabs), RECORD)
            records["kind"] = Kind.SLAB
            for record, slab in zip(records, slabs, strict=True):
                name = slab.tenant.encode().ljust(_TENANT_BYTES, b"\0")
                record["slab"] = slab.number
                record["slot"], record["generation"] = slab.slot_bytes & 0xFFFFFFFF, slab.slot_bytes >> 32
                record["key"], record["note"] = np.void(name[:KEY_BYTES]), np.void(name[KEY_BYTES:])
            self._index.append(records)

    def close(self) -> None:
        """Close all files."""
        for each in self._slabs.values():
            each.file.close()
        self._slabs.clear()
        self._index.close()
        self._files.close()


def slab_of(record: np.void) -> Slab:
    """The slab that a record of kind `SLAB` names."""
    name = record["key"].tobytes() + record["note"].tobytes()
    slot_bytes = int(record["slot"]) | int(record["generation"]) << 32
    return Slab(int(record["slab"]), name.rstrip(b"\0").decode(), slot_bytes)


def _slab_name(number: int) -> str:
    return f"slab-{number:05}"


def _refusal(identity: Identity | None, cluster: str) -> str:
    """The reason why a daemon of this cluster must not use the files of a directory; empty if it may."""
    if identity is None:
        return f"the directory has no whole {IDENTITY}"
    if identity.format != FORMAT:
        return f"the directory has format {identity.format}, and this daemon writes format {FORMAT}"
    if identity.cluster != cluster:
        return f"the directory belongs to cluster '{identity.cluster}', and this node to cluster '{cluster}'"
    return ""
