"""The object of a segment: how its bytes are sealed, and how they are verified.

::

    0                              4096
    | head | sealed part | zeros   | 1 MiB + tag | 1 MiB + tag | ... |

The head names the object, the segment's size and its shards. The sealed part has the note of the rules, the checksums
of the shards, and the content (`tokenlake.content`) where one is known; its AES-256-GCM tag covers the head too. The
segment follows in pieces with a tag each. Each object has a key of its own (`names.py`), so that no piece can be taken
from another object, from another place of this one, or from another tenant; a cut is found by the size.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import xxhash
from cryptography.exceptions import InvalidTag

from tokenlake.disk import NOTE_BYTES
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake_server.cold.base import Reader, Unfit
from tokenlake_server.cold.names import NAME_BYTES, ColdTenant

HEAD_BYTES = 4096
PIECE_BYTES = 1 << 20
TAG_BYTES = 16
SALT_BYTES = 32
_MAGIC = b"tlcold01"
_HEAD = struct.Struct(f"<8sQ{NAME_BYTES}s{SALT_BYTES}sQII")
"""Magic, tag of the tenant, name, salt, bytes of the segment, shards, bytes of the sealed part."""
MOST_SLOT_BYTES = 1 << 40


class Head(NamedTuple):
    """What the head of an object says, not verified."""

    tag: int
    name: bytes
    salt: bytes
    slot_bytes: int
    shards: int
    sealed: int


class Stored(NamedTuple):
    """What an object holds beside the bytes of the segment."""

    note: bytes
    checksums: bytes
    content: bytes
    """Empty where none was known, or it did not fit."""


class Gate(Protocol):
    """Says when the slot of a segment may be touched."""

    def touching(self) -> AbstractContextManager[None]:
        """Within it the slot stays as it is. Raises where the operation was given up."""


def object_bytes(slot_bytes: int) -> int:
    """Bytes of the object of a segment of this size."""
    return HEAD_BYTES + slot_bytes + TAG_BYTES * -(-slot_bytes // PIECE_BYTES)


def room_for_piece() -> memoryview:
    """Memory for one piece with its tag, and for the head."""
    return memoryview(bytearray(PIECE_BYTES + TAG_BYTES))


def read_head(block: bytes | memoryview) -> Head:
    """The head in the first bytes of an object. Raises `Unfit`."""
    if len(block) < _HEAD.size:
        raise Unfit("it ends before its head")
    magic, *fields = _HEAD.unpack_from(block)
    head = Head(*fields)
    if magic != _MAGIC or not 0 < head.slot_bytes <= MOST_SLOT_BYTES or not head.shards > 0:
        raise Unfit("it is no object of a cold tier")
    if head.sealed > HEAD_BYTES - _HEAD.size:
        raise Unfit("its head is damaged")
    return head


def parts(
    tenant: ColdTenant,
    name: bytes,
    segment: memoryview,
    shards: int,
    stored: Stored,
    room: memoryview,
    gate: Gate,
) -> Iterator[memoryview]:
    """The parts of an object, in order, each in `room` or new."""
    salt = os.urandom(SALT_BYTES)
    cipher = tenant.cipher(salt)
    plain = stored.note + stored.checksums + stored.content
    if _HEAD.size + len(plain) + TAG_BYTES > HEAD_BYTES:
        plain = stored.note + stored.checksums
    head = _HEAD.pack(_MAGIC, tenant.tag, name, salt, len(segment), shards, len(plain) + TAG_BYTES)
    yield memoryview((head + cipher.encrypt(_nonce(0), plain, head)).ljust(HEAD_BYTES, b"\0"))
    for number, start in enumerate(range(0, len(segment), PIECE_BYTES), 1):
        with gate.touching():
            piece = segment[start : start + PIECE_BYTES]
            size = len(piece) + TAG_BYTES
            cipher.encrypt_into(_nonce(number), piece, None, room[:size])
        yield room[:size]


def read(
    reader: Reader,
    tenant: ColdTenant,
    name: bytes,
    segment: memoryview,
    shards: int,
    room: memoryview,
    gate: Gate,
) -> Stored:
    """Fill `segment` with the bytes of an object, and verify all of them. `room`: of `room_for_piece`. Raises `Unfit`
    and OSError; `segment` may have any bytes then."""
    if reader.nbytes != object_bytes(len(segment)):
        raise Unfit(f"it has {reader.nbytes} bytes; {object_bytes(len(segment))} expected")
    block = room[:HEAD_BYTES]
    reader.read(block)
    head = read_head(block)
    if (head.name, head.slot_bytes, head.shards) != (name, len(segment), shards):
        raise Unfit("it is of another segment, or of other shards")
    cipher = tenant.cipher(head.salt)
    sealed = bytes(block[_HEAD.size : _HEAD.size + head.sealed])
    try:
        plain = cipher.decrypt(_nonce(0), sealed, bytes(block[: _HEAD.size]))
        split = NOTE_BYTES + shards * CHECKSUM_BYTES
        stored = Stored(plain[:NOTE_BYTES], plain[NOTE_BYTES:split], plain[split:])
        if len(stored.checksums) != shards * CHECKSUM_BYTES:
            raise Unfit("its head is damaged")
        for number, start in enumerate(range(0, len(segment), PIECE_BYTES), 1):
            size = min(PIECE_BYTES, len(segment) - start)
            piece = room[: size + TAG_BYTES]
            reader.read(piece)
            with gate.touching():
                cipher.decrypt_into(_nonce(number), piece, None, segment[start : start + size])
    except InvalidTag:
        raise Unfit("it has other bytes than were sealed") from None
    with gate.touching():
        _require_checksums(segment, shards, stored.checksums)
    return stored


def _nonce(part: int) -> bytes:
    """The nonce of a part of an object, whose key is used for nothing else."""
    return part.to_bytes(12, "little")


def _require_checksums(segment: memoryview, shards: int, checksums: bytes) -> None:
    size = len(segment) // shards
    for shard in range(shards):
        expected = int.from_bytes(checksums[shard * CHECKSUM_BYTES : (shard + 1) * CHECKSUM_BYTES], "little")
        if xxhash.xxh3_64_intdigest(segment[shard * size : (shard + 1) * size]) != expected:
            raise Unfit(f"the checksum of shard {shard} differs")
