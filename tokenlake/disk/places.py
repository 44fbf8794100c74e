"""Places of segments on a device, as instructions and events carry them.

A device has one slab per tenant and slot size. A slab is a sequence of places of `stride(slot_bytes)` bytes, each of
which has a record in the table of the slab. The generation of a place counts the segments that it has had.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT = 4096
"""Places begin at multiples of this number of bytes, as direct I/O requires."""
HEADER_BYTES = 4096
"""Bytes of each place beside those of the segment: its key, generation, checksums and note, and the additions of
encryption."""
NOTE_BYTES = 48
"""Bytes that the rules keep with each segment on disk. Their meaning is known to the rules only (`notes.py`)."""
RECORD_BYTES = 128
"""Bytes of the record of a place."""
SLAB_BYTES = 16 << 10
"""Bytes that a slab takes beside its places and their records: the begin of its files, the rest of a block of the
table, and what the file system needs for them."""
_PLACE = struct.Struct("<II")
PLACE_BYTES = _PLACE.size


class Place(NamedTuple):
    """One place of a slab, and the generation of its content."""

    slot: int
    generation: int


def pack_places(places: Iterable[Place]) -> bytes:
    """Returns the places packed into 8 bytes each: slot and generation, uint32, little-endian."""
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(packed: bytes) -> list[Place]:
    """Inverse of `pack_places`. Raises ValueError for a length that is not a multiple of 8."""
    if len(packed) % PLACE_BYTES:
        raise ValueError(f"places take {len(packed)} bytes, which is no multiple of {PLACE_BYTES}")
    return [Place._make(fields) for fields in _PLACE.iter_unpack(packed)]


def stride(slot_bytes: int) -> int:
    """Returns the bytes of a place for segments of `slot_bytes`."""
    return HEADER_BYTES + -(-slot_bytes // ALIGNMENT) * ALIGNMENT


def footprint(slot_bytes: int) -> int:
    """Returns the bytes that a place for segments of `slot_bytes` takes on a device, with its record."""
    return stride(slot_bytes) + RECORD_BYTES


def slab_bytes(slot_bytes: int, places: int) -> int:
    """Returns the bytes of a slab with so many places, and of its table; a slab without places has no files."""
    return SLAB_BYTES + places * footprint(slot_bytes) if places else 0
