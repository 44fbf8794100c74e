"""Segments as replies to engines carry them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.store import Segment
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import NO_SLOT_BYTES

__all__ = ["pack"]


def pack(segments: Sequence[Segment | None], shards: int, *, checksums: bool) -> tuple[bytes, bytes]:
    """(slots, checksums); zeros where there is no segment. No checksums unless they are wanted."""
    slots = b"".join([NO_SLOT_BYTES if segment is None else segment.packed for segment in segments])
    if not checksums:
        return slots, b""
    none = bytes(CHECKSUM_BYTES * shards)
    return slots, b"".join([none if segment is None else segment.checksums for segment in segments])
