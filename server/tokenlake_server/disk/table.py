"""The table of a slab: which place has which segment, as one record of 128 bytes per place, which is changed in place.

::

    0           4096
    | identity  | record of place 0 | of place 1 | ...

Each record has a checksum of its own, and none crosses a sector. So a write that was cut off and a damaged sector spoil
the records there, whose segments are lost, and no others. A place without a segment has a record of zeros. Records need
no new space on the device, because the table grows before its slab does. Nothing is kept in memory per segment.
"""

from __future__ import annotations

import errno
import struct
import zlib
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.disk.places import ALIGNMENT, NOTE_BYTES, RECORD_BYTES
from tokenlake.keys import KEY_BYTES
from tokenlake_server.disk.files import File

BLOCK_BYTES = 4096
"""Bytes of the identity in front of a slab and of its table."""
RECORD = np.dtype(
    [
        ("kind", "u1"),
        ("shards", "u1"),
        ("unused", "V2"),
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("encryption", "<u4"),
        ("key", f"V{KEY_BYTES}"),
        ("note", f"V{NOTE_BYTES}"),
        ("reserved", "V24"),
        ("check", "<u8"),
    ]
)
"""One record. `encryption`: number of the key of the setting `disk_keys`, 0 for none."""
assert RECORD.itemsize == RECORD_BYTES
Records = NDArray[np.void]
STORED = 1
"""`kind` of the record of a place with a segment."""

_NUMBERS = RECORD_BYTES // 8
_ODD = (0x9E3779B97F4A7C15 * (2 * at + 3) for at in range(_NUMBERS - 1))
_MULTIPLIERS = np.array([each % 2**64 | 1 for each in _ODD], np.uint64)
_SEED = np.uint64(0xC2B2AE3D27D4EB4F)
_READ_RECORDS = 1 << 16
_HEAD = struct.Struct("<8sII")
_MAGIC = b"tlslab02"


class Slab(NamedTuple):
    """A slab: its number on the device, and the segments that it has places for."""

    number: int
    tenant: str
    slot_bytes: int


class Scanned(NamedTuple):
    """The content of a table."""

    stored: Records
    """The sound records of places with a segment."""
    damaged: list[int]
    """Places whose record is damaged."""


def pack_slab(slab: Slab) -> bytes:
    """The identity of a slab, in a block."""
    body = msgspec.json.encode([slab.tenant, slab.slot_bytes])
    return (_HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body).ljust(BLOCK_BYTES, b"\0")


def read_slab(number: int, block: bytes | memoryview) -> Slab | None:
    """The slab of a block; None where it is damaged."""
    if len(block) < _HEAD.size:
        return None
    magic, length, crc = _HEAD.unpack_from(block)
    body = bytes(block[_HEAD.size : _HEAD.size + length])
    if magic != _MAGIC or len(body) != length or zlib.crc32(body) != crc:
        return None
    try:
        tenant, slot_bytes = msgspec.json.decode(body, type=tuple[str, int])
    except msgspec.MsgspecError:
        return None
    return Slab(number, tenant, slot_bytes)


def table_bytes(places: int) -> int:
    """Bytes of the table of so many places."""
    records = places * RECORD_BYTES
    return BLOCK_BYTES + records + -records % ALIGNMENT


def seal(records: Records) -> Records:
    """The records with their checksums."""
    records["check"] = _checks(records)
    return records


def _checks(records: Records) -> NDArray[np.uint64]:
    numbers = np.ascontiguousarray(records).view("<u8").reshape(-1, _NUMBERS)[:, :-1]
    sums: NDArray[np.uint64] = (numbers * _MULTIPLIERS).sum(axis=1, dtype=np.uint64) + _SEED
    sums ^= sums >> np.uint64(29)
    return sums


def scan(file: File, places: int) -> Scanned:
    """Read the records of the first `places` places. Raises OSError."""
    stored: list[Records] = []
    damaged: list[int] = []
    for first in range(0, places, _READ_RECORDS):
        count = min(_READ_RECORDS, places - first)
        data = memoryview(bytearray(count * RECORD_BYTES))
        size = read_sound(file, BLOCK_BYTES + first * RECORD_BYTES, data)
        whole = size // RECORD_BYTES
        records = np.frombuffer(data, RECORD, whole)
        used = np.frombuffer(data, "<u8", whole * _NUMBERS).reshape(-1, _NUMBERS).any(axis=1)
        sound = (records["check"] == _checks(records)) & (records["kind"] == STORED)
        sound &= records["slot"] == np.arange(first, first + whole)
        stored.append(records[sound])
        damaged += (np.flatnonzero(used & ~sound) + first).tolist()
    return Scanned(np.concatenate(stored) if stored else np.zeros(0, RECORD), damaged)


def read_sound(file: File, at: int, data: memoryview) -> int:
    """As `File.read`, but blocks that the device cannot read have other bytes than any record."""
    try:
        return file.read(at, [data])
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    size = 0
    for start in range(0, len(data), ALIGNMENT):
        block = data[start : start + ALIGNMENT]
        try:
            size += file.read(at + start, [block])
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            block[:] = b"\xff" * len(block)
            size += len(block)
    return size


def write_records(file: File, slots: list[int], records: Records | None) -> None:
    """Write the records of some places, in the order of the places; None: they have no segment. Raises OSError."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and slots[order[stop]] == slots[order[stop - 1]] + 1:
            stop += 1
        run = order[start:stop]
        data = bytes(RECORD_BYTES * len(run)) if records is None else records[run].tobytes()
        file.write(BLOCK_BYTES + slots[run[0]] * RECORD_BYTES, [data])
        start = stop
