"""Records of the ledger, from which the next daemon of a node finds the segments in the memory of the one before.

::

    a slot of a region        its place in the ledger: `stride(slot_bytes)` bytes
    +------------------+      +-----------------------+---------------------+--------+
    | a READY segment  |      | record, RECORD_BYTES  | 8 bytes per shard   | unused |
    +------------------+      +-----------------------+---------------------+--------+
    | anything else    |      | zeros: no segment                                    |
    +------------------+      +------------------------------------------------------+

A record is written when its segment becomes READY and cleared when the segment leaves the index. It counts only if its
checksum is right, and its generation is that of the slot: the new generation of a reissued slot voids a record that was
not cleared. No engine sees the ledger.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from tokenlake.disk.places import NOTE_BYTES
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire.fields import CHECKSUM_BYTES

RECORD_BYTES = 128
"""Bytes of a record without the checksums of the shards."""
LARGE_SLOT_BYTES = 128 << 10
"""Slots from this size on have room for the checksums of `MANY_SHARDS` shards, which takes at most 0.5 % of a slot."""
MANY_SHARDS, FEW_SHARDS = 64, 8
"""Maximum numbers of shards of a segment that has a record, in large and in other slots."""
MAX_GENERATION = 1 << 62
"""Generations above it are no daemon's: a process that maps the region has overwritten the table of generations."""

_CRC = struct.Struct("<I")
_FIELDS = struct.Struct(f"<Q{KEY_BYTES}sBBI{NOTE_BYTES}sff")
_PADDING = bytes(RECORD_BYTES - _CRC.size - _FIELDS.size)
_PRIMARY = 1


class Record(NamedTuple):
    """The record of one READY segment."""

    generation: int
    key: SegmentKey
    primary: bool
    """Is the copy a primary copy? Otherwise it is a cached one."""
    source: int
    """`name_digest` of the node that owns the segment; 0 where this node owns it."""
    note: bytes
    """`NOTE_BYTES`: depth, accesses and hints of the segment (`tokenlake.disk.notes`)."""
    pinned_s: float
    """Seconds for which the segment stays pinned, from the writing of the record on; 0: it is not pinned."""
    age_s: float
    """Seconds since the last access, when the record was written."""
    checksums: bytes
    """8 bytes per shard."""


def max_shards(slot_bytes: int) -> int:
    """Returns the maximum number of shards of a segment of this size that has a record. Segments with more shards are
    not kept."""
    return MANY_SHARDS if slot_bytes >= LARGE_SLOT_BYTES else FEW_SHARDS


def stride(slot_bytes: int) -> int:
    """Returns the bytes that the ledger has for each slot of this size."""
    return RECORD_BYTES + CHECKSUM_BYTES * max_shards(slot_bytes)


def name_digest(node: NodeId | None) -> int:
    """Returns the number that stands for the name of a node in a record, never 0; 0 for None."""
    return 0 if node is None else zlib.crc32(node.encode()) or 1


def pack(record: Record) -> bytes:
    """Returns the record in `RECORD_BYTES` and 8 bytes per shard."""
    shards = len(record.checksums) // CHECKSUM_BYTES
    fields = _FIELDS.pack(
        record.generation,
        record.key,
        _PRIMARY if record.primary else 0,
        shards,
        record.source,
        record.note,
        record.pinned_s,
        record.age_s,
    )
    body = fields + _PADDING + record.checksums
    return _CRC.pack(zlib.crc32(body)) + body


def unpack(raw: bytes) -> Record | None:
    """Returns the record at the beginning of `raw`, which may be longer; None where there is none, or it is damaged."""
    if len(raw) < RECORD_BYTES:
        return None
    generation, key, flags, shards, source, note, pinned_s, age_s = _FIELDS.unpack_from(raw, _CRC.size)
    end = RECORD_BYTES + CHECKSUM_BYTES * shards
    (crc,) = _CRC.unpack_from(raw)
    # A cleared record, of zeros alone, has the generation 0, which no segment has.
    if not generation or len(raw) < end or zlib.crc32(raw[_CRC.size : end]) != crc:
        return None
    checksums = raw[RECORD_BYTES:end]
    return Record(generation, SegmentKey(key), bool(flags & _PRIMARY), source, note, pinned_s, age_s, checksums)
