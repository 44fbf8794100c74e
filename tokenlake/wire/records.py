"""Encrypted records: the bytes of a bulk or query connection between nodes that have certificates.

A record is 4 bytes of length (little-endian, of the plain bytes), the encrypted bytes, and a tag of 16 bytes. It is
encrypted with AES-128-GCM. The length is authenticated with the record. Each direction of a connection has a key of its
own, which no other connection has, so the nonce of a record is the number of records before it. A record that was
changed, repeated, left out or moved therefore does not match its tag.

`cryptography` before version 50 holds the interpreter's lock while it encrypts, so that the control loop would stand
still. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tokenlake.errors import ProtocolRefused

Receive = Callable[[memoryview], None]
"""Fills its argument with the next bytes of a connection, or raises."""
RECORD_BYTES = 1 << 20
"""Limit of the plain bytes of a record. A node closes a connection on which a longer one arrives."""
LENGTH_BYTES = 4
TAG_BYTES = 16
OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES
"""Bytes of a record in addition to its plain bytes."""
NONCE_BYTES = 12
JOINED_BYTES = 64 << 10
"""Buffers of fewer bytes are copied into a common record, since every record costs about 10 us."""


class RecordWriter:
    """Makes the records of one direction of a connection. They must be sent in the order in which they were made."""

    def __init__(self, key: bytes) -> None:
        """`key`: `RECORD_KEY_BYTES`, for this direction of this connection only."""
        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, plain: bytes | memoryview, record: memoryview) -> memoryview:
        """Encrypt 1 to `RECORD_BYTES` bytes into the first bytes of `record` and return that part of it. `record` must
        have `OVERHEAD_BYTES` more than `plain`, and share no memory with it."""
        size = len(plain)
        length = size.to_bytes(LENGTH_BYTES, "little")
        record[:LENGTH_BYTES] = length
        end = size + OVERHEAD_BYTES
        self._cipher.encrypt_into(_nonce(self._count), plain, length, record[LENGTH_BYTES:end])
        self._count += 1
        return record[:end]

    def sealed(self, buffers: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Encrypt these buffers, one behind the other, into as many new records as are needed."""
        return [
            self.seal(part, memoryview(bytearray(len(part) + OVERHEAD_BYTES)))
            for joined in _joined(buffers)
            for at in range(0, len(joined), RECORD_BYTES)
            if (part := joined[at : at + RECORD_BYTES])
        ]


def _joined(buffers: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in fewer buffers: short ones are joined."""
    short: list[bytes | memoryview] = []
    size = 0
    for buffer in buffers:
        if len(buffer) < JOINED_BYTES and size < RECORD_BYTES - JOINED_BYTES:
            short.append(buffer)
            size += len(buffer)
            continue
        yield memoryview(b"".join(short))
        short, size = ([buffer], len(buffer)) if len(buffer) < JOINED_BYTES else ([], 0)
        if not short:
            yield memoryview(buffer)
    yield memoryview(b"".join(short))


class RecordReader:
    """Reads the records of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        """`key`: as that of the `RecordWriter` of the other side."""
        self._cipher = AESGCM(key)
        self._count = 0
        self._length = memoryview(bytearray(LENGTH_BYTES))
        self._rest = memoryview(b"")
        """Plain bytes of the last record that were not read yet."""

    @property
    def pending(self) -> bool:
        """True while plain bytes of the last record were not read yet."""
        return len(self._rest) > 0

    def into(self, target: memoryview, receive: Receive, buffer: bytearray) -> None:
        """Fill `target`; see `some`."""
        filled = 0
        while filled < len(target):
            filled += self.some(target[filled:], receive, buffer)

    def some(self, target: memoryview, receive: Receive, buffer: bytearray) -> int:
        """Read at least one byte into `target`, at most up to the end of a record, and return the number. A record that
        fits into `target` is decrypted directly into it. `buffer` holds the encrypted bytes during the call; it grows
        up to the longest record. Raises `ProtocolRefused` for a record that is not the next one of the other side:
        `target` may then hold any bytes, and the connection must be closed."""
        if not self._rest:
            receive(self._length)
            size = int.from_bytes(self._length, "little")
            if not 0 < size <= RECORD_BYTES:
                raise ProtocolRefused(f"a record of {size} bytes; expected 1 to {RECORD_BYTES}")
            if size <= len(target):
                self._open(target[:size], receive, buffer)
                return size
            rest = memoryview(bytearray(size))
            self._open(rest, receive, buffer)
            self._rest = rest
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _open(self, target: memoryview, receive: Receive, buffer: bytearray) -> None:
        whole = len(target) + TAG_BYTES
        if len(buffer) < whole:
            buffer.extend(bytes(whole - len(buffer)))
        with memoryview(buffer) as view:
            receive(view[:whole])
            try:
                self._cipher.decrypt_into(_nonce(self._count), view[:whole], self._length, target)
            except InvalidTag:
                text = f"record {self._count} was changed, repeated or moved on its way"
                raise ProtocolRefused(text) from None
        self._count += 1


def _nonce(count: int) -> bytes:
    return count.to_bytes(NONCE_BYTES, "little")
