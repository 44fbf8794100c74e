"""A segment at its place on a device: the bytes that a write stores there, and their verification by a read.

::

    0                                4096                                    stride
    | header | tags | sealed | CRC |  the bytes of the segment, padded      |

The header names the key and the generation, so that a read of a place that has another segment meanwhile is a miss;
that of a segment that was erased has zeros. The sealed part has the checksums of the shards and the content
(`tokenlake.content`), if one is known. A write that was cut off leaves a header or bytes that do not fit: the CRC of
the header block, or the checksums, differ, and the read is a miss.

With encryption the sealed part and the segment, in chunks, are encrypted with AES-256-GCM (`encryption`). The tag of
the sealed part also covers the header; those of the chunks are behind the header.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import Any, NamedTuple

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tokenlake.disk.places import ALIGNMENT, HEADER_BYTES, NOTE_BYTES
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake_server.disk.encryption import NO_KEY, SALT_BYTES, TAG_BYTES, DiskKeys, nonce
from tokenlake_server.disk.files import File

_MAGIC = b"tlplace2"
_FIXED = struct.Struct(f"<8sIIIHHQ32s32s{NOTE_BYTES}sI")
"""Magic, number of the key, slot, generation, shards, chunks, slot_bytes, key, salt, note, bytes of the sealed part."""
_CRC = struct.Struct("<I")
CHUNK_BYTES = 1 << 20
"""Least bytes of a chunk, which has a tag of its own."""
MAX_CHUNKS = 64


class Mismatch(Exception):
    """The place does not hold the segment, or not all bytes of it: a miss. The message says what differs."""


class StoredSegment(NamedTuple):
    """A segment and its place in the slab of `tenant` and `slot_bytes`."""

    tenant: str
    slot_bytes: int
    shards: int
    key: bytes
    slot: int
    generation: int


class Stored(NamedTuple):
    """What a place holds beside the bytes of the segment."""

    checksums: bytes
    """8 bytes per shard."""
    content: bytes
    """The encoded content; empty where none was known, or it did not fit."""
    note: bytes = bytes(NOTE_BYTES)
    """The note of the rules when the segment was written."""


def aligned_memory(nbytes: int) -> memoryview:
    """Zeroed memory that begins at a page, as direct I/O requires."""
    return memoryview(mmap.mmap(-1, nbytes))


class SegmentIO:
    """Writes segments to their places and reads them. For one thread, whose buffers it owns."""

    def __init__(self, keys: DiskKeys) -> None:
        self._keys = keys
        self._header = aligned_memory(HEADER_BYTES)
        self._room = aligned_memory(ALIGNMENT)
        """A chunk and its tag; it grows to the largest chunk."""

    def write(self, file: File, at: int, where: StoredSegment, segment: memoryview, stored: Stored) -> None:
        """Write a segment to its place, which begins at the offset `at`, with the current key. A content that does not
        fit beside the checksums is left out. Raises OSError."""
        number = self._keys.current
        if number == NO_KEY and where.slot_bytes % ALIGNMENT == 0:
            self._fill_header(where, number, bytes(SALT_BYTES), stored, None, [])
            file.write(at, [self._header, segment])
            return
        salt = os.urandom(SALT_BYTES) if number else bytes(SALT_BYTES)
        cipher = self._keys.cipher(number, where.tenant, salt) if number else None
        size = _chunk_bytes(where.slot_bytes)
        room = self._chunk_room(size)
        tags: list[bytes] = []
        for chunk, start in enumerate(range(0, where.slot_bytes, size), 1):
            plain = segment[start : start + size]
            stop = len(plain)
            if cipher is None:
                room[:stop] = plain
            else:
                cipher.encrypt_into(nonce(chunk), plain, None, room[: stop + TAG_BYTES])
                tags.append(bytes(room[stop : stop + TAG_BYTES]))
            whole = stop + -stop % ALIGNMENT
            room[stop:whole] = bytes(whole - stop)
            file.write(at + HEADER_BYTES + start, [room[:whole]])
        self._fill_header(where, number, salt, stored, cipher, tags)
        file.write(at, [self._header])

    def read(self, file: File, at: int, where: StoredSegment, segment: memoryview) -> Stored:
        """Fill `segment`, of `slot_bytes`, with the segment at a place, which begins at the offset `at`, and verify it.
        Raises `Mismatch` and OSError; `segment` may have any bytes then."""
        if self._keys.current == NO_KEY and where.slot_bytes % ALIGNMENT == 0:
            if file.read(at, [self._header, segment]) < HEADER_BYTES + where.slot_bytes:
                raise Mismatch("the slab ends before the segment does")
            stored = self._opened(where)[0]
        else:
            if file.read(at, [self._header]) < HEADER_BYTES:
                raise Mismatch("the slab ends before the segment")
            stored, cipher, tags = self._opened(where)
            self._read_chunks(file, at + HEADER_BYTES, where, segment, cipher, tags)
        _require_checksums(segment, where.shards, stored.checksums)
        return stored

    def erase(self, file: File, at: int) -> None:
        """Let the place that begins at the offset `at` have no segment. Raises OSError."""
        self._header[:] = bytes(HEADER_BYTES)
        file.write(at, [self._header])

    def _fixed(self) -> tuple[Any, ...]:
        """The fixed part of the header without its magic. Raises `Mismatch` where the header is damaged."""
        magic, *fixed = _FIXED.unpack_from(self._header)
        block = self._header[: -_CRC.size]
        if magic != _MAGIC or _CRC.unpack(self._header[-_CRC.size :])[0] != zlib.crc32(block):
            raise Mismatch("the place has no whole header")
        return tuple(fixed)

    def _read_chunks(
        self, file: File, at: int, where: StoredSegment, segment: memoryview, cipher: AESGCM | None, tags: memoryview
    ) -> None:
        size = _chunk_bytes(where.slot_bytes)
        room = self._chunk_room(size)
        for chunk, start in enumerate(range(0, where.slot_bytes, size), 1):
            target = segment[start : start + size]
            stop = len(target)
            whole = stop + -stop % ALIGNMENT
            if file.read(at + start, [room[:whole]]) < whole:
                raise Mismatch("the slab ends before the segment does")
            if cipher is None:
                target[:] = room[:stop]
                continue
            room[stop : stop + TAG_BYTES] = tags[(chunk - 1) * TAG_BYTES : chunk * TAG_BYTES]
            try:
                cipher.decrypt_into(nonce(chunk), room[: stop + TAG_BYTES], None, target)
            except InvalidTag:
                raise Mismatch("the segment has other bytes than were encrypted") from None

    def _fill_header(
        self,
        where: StoredSegment,
        number: int,
        salt: bytes,
        stored: Stored,
        cipher: AESGCM | None,
        tags: list[bytes],
    ) -> None:
        room = HEADER_BYTES - _CRC.size - _FIXED.size - len(tags) * TAG_BYTES - (TAG_BYTES if cipher else 0)
        sealed = stored.checksums + stored.content
        if len(sealed) > room:
            sealed = stored.checksums
        length = len(sealed) + (TAG_BYTES if cipher else 0)
        fixed = _FIXED.pack(
            _MAGIC,
            number,
            where.slot,
            where.generation,
            where.shards,
            len(tags),
            where.slot_bytes,
            where.key,
            salt,
            stored.note,
            length,
        )
        if cipher is not None:
            sealed = cipher.encrypt(nonce(0), sealed, fixed)
        block = b"".join([fixed, *tags, sealed]).ljust(HEADER_BYTES - _CRC.size, b"\0")
        self._header[:] = block + _CRC.pack(zlib.crc32(block))

    def _opened(self, where: StoredSegment) -> tuple[Stored, AESGCM | None, memoryview]:
        """Check the header against `where`. Returns its sealed part, the cipher of the place, and the tags of its
        chunks. Raises `Mismatch`."""
        block = self._header[: -_CRC.size]
        number, slot, generation, shards, chunks, slot_bytes, key, salt, note, length = self._fixed()
        found = StoredSegment(where.tenant, slot_bytes, shards, key, slot, generation)
        if found != where:
            raise Mismatch("the place has another segment, or another generation of it")
        if number not in self._keys.readable:
            raise Mismatch(f"the key {number:08x} is not configured" if number else "the segment is not encrypted")
        cipher = self._keys.cipher(number, where.tenant, salt) if number else None
        start = _FIXED.size + chunks * TAG_BYTES
        tags, sealed = block[_FIXED.size : start], bytes(block[start : start + length])
        if cipher is not None:
            try:
                sealed = cipher.decrypt(nonce(0), sealed, bytes(block[: _FIXED.size]))
            except InvalidTag:
                raise Mismatch("the header has other bytes than were encrypted") from None
        split = shards * CHECKSUM_BYTES
        return Stored(sealed[:split], sealed[split:], note), cipher, tags

    def _chunk_room(self, size: int) -> memoryview:
        need = size + ALIGNMENT
        if len(self._room) < need:
            self._room = aligned_memory(need)
        return self._room


def _chunk_bytes(slot_bytes: int) -> int:
    """Bytes of each chunk of a segment but the last, a multiple of `ALIGNMENT`: at most `MAX_CHUNKS` chunks."""
    least = -(-slot_bytes // MAX_CHUNKS)
    return max(CHUNK_BYTES, least + -least % ALIGNMENT)


def _require_checksums(segment: memoryview, shards: int, checksums: bytes) -> None:
    size = len(segment) // shards
    for shard in range(shards):
        expected = int.from_bytes(checksums[shard * CHECKSUM_BYTES : (shard + 1) * CHECKSUM_BYTES], "little")
        if xxhash.xxh3_64_intdigest(segment[shard * size : (shard + 1) * size]) != expected:
            raise Mismatch(f"the checksum of shard {shard} differs")
