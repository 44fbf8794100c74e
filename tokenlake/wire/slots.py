"""Packed slot references: region (uint32), slot (uint32), generation (uint64), little-endian; 16 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES

_KEY = np.dtype(f"V{KEY_BYTES}")
_SLOT = struct.Struct("<IIQ")
SLOT_BYTES = _SLOT.size
_SLOT_DTYPE = np.dtype([("region", "<u4"), ("slot", "<u4"), ("generation", "<u8")])
NO_SLOT_BYTES = bytes(SLOT_BYTES)
"""Packed in place of a slot reference where a key has no slot."""


class SlotRef(NamedTuple):
    """A slot of a node's arena, and the generation of its content."""

    region: int
    slot: int
    generation: int

    def pack(self) -> bytes:
        """Returns the slot reference packed into 16 bytes."""
        return _SLOT.pack(self.region, self.slot, self.generation)


def unpack_slots(packed: bytes) -> list[SlotRef]:
    """Inverse of concatenated `SlotRef.pack`. Raises ValueError for a length that is not a multiple of 16."""
    if len(packed) % SLOT_BYTES:
        raise ValueError(f"slots take {len(packed)} bytes, which is no multiple of {SLOT_BYTES}")
    return [SlotRef._make(fields) for fields in _SLOT.iter_unpack(packed)]


def slot_array(packed: bytes | bytearray) -> NDArray[np.void]:
    """As `unpack_slots`, but an array over `packed` of records with the fields of `SlotRef`, shape [slots]. Raises
    ValueError for a length that is not a multiple of 16."""
    return np.frombuffer(packed, _SLOT_DTYPE)


def split_keys(packed: bytes) -> list[SegmentKey]:
    """Returns the list of the segment keys that a message has concatenated. Raises ValueError for a length that is not
    a multiple of 32."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"keys take {len(packed)} bytes, which is no multiple of {KEY_BYTES}")
    # numpy cuts the keys four times as fast as slices in Python would.
    keys: list[SegmentKey] = np.frombuffer(packed, _KEY).tolist()
    return keys


def join_keys(keys: Iterable[SegmentKey]) -> bytes:
    """Returns the segment keys concatenated, as messages carry them; the inverse of `split_keys`."""
    return b"".join(keys)
