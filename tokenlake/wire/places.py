"""Packed places of segments in the memory of a node that another node reads by itself: address, length and generation
(uint64) and device (int32, -1 for the memory of the machine), little-endian; 28 bytes each."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tokenlake.where import HOST as HOST_NAME
from tokenlake.where import device_of

_PLACE = struct.Struct("<QQQi")
PLACE_BYTES = _PLACE.size
HOST = device_of(HOST_NAME)
"""The device of memory that is not on a GPU."""


class Place(NamedTuple):
    """Some bytes in the memory of another node."""

    address: int
    length: int
    generation: int
    """That of the slot (`SlotRef`)."""
    device: int

    def pack(self) -> bytes:
        """Returns the place packed into 28 bytes."""
        return _PLACE.pack(*self)


def unpack_places(packed: bytes) -> list[Place]:
    """Inverse of concatenated `Place.pack`. Raises ValueError for a length that is not a multiple of 28."""
    if len(packed) % PLACE_BYTES:
        raise ValueError(f"places take {len(packed)} bytes, which is no multiple of {PLACE_BYTES}")
    return [Place._make(fields) for fields in _PLACE.iter_unpack(packed)]
