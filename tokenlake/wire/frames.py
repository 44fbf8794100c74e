"""Frames: 4 bytes of length (little-endian, of the body alone), then a MessagePack body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from tokenlake.errors import ProtocolRefused

HEADER_BYTES = 4
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Returns a message as MessagePack, without the header of a frame."""
    return _encoder.encode(message)


def pack_frame(message: msgspec.Struct) -> bytes:
    """Returns a message as a whole frame: the header with the length, then the body."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class FrameDecoder:
    """Cuts a byte stream into frame bodies, and into the raw bytes that follow some frames. It does no I/O.

    A reader of a socket that handles every frame at once iterates over `feed(data)`. A reader that waits for one frame
    calls `add(data)` until `next_frame()` has a body, and may then `take` raw bytes. A reader that must leave the bytes
    behind a frame in the socket receives at most `missing` bytes at a time.

    The decoder holds what was added and not yet read: at most one frame of at most `max_frame` bytes and one addition.
    """

    __slots__ = ("_buffer", "max_frame")

    def __init__(self, max_frame: int) -> None:
        self._buffer = bytearray()
        self.max_frame = max_frame

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add `data` at the first step of the iteration, and iterate over the bodies of all frames that are complete. A
        step raises `ProtocolRefused` where `next_frame` does."""
        if (
            not self._buffer
            and len(data) - HEADER_BYTES == int.from_bytes(data[:HEADER_BYTES], "little") <= self.max_frame
        ):
            # `data` is nearly always exactly one frame, which need not be buffered.
            yield data[HEADER_BYTES:]
            return
        self.add(data)
        while (body := self.next_frame()) is not None:
            yield body

    def add(self, data: bytes | memoryview) -> None:
        """Append received bytes of the stream to the decoder's buffer."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Remove and return the body of the next frame; None while it is not whole. Raises `ProtocolRefused` for a
        frame over the bound: the stream cannot be read on after that."""
        buffer = self._buffer
        if not buffer or (size := self._size()) is None:
            return None
        end = HEADER_BYTES + size
        if len(buffer) < end:
            return None
        body = bytes(buffer[HEADER_BYTES:end])
        # Removed before the body is returned, because the caller may then ask for `rest`, the bytes after the frame.
        del buffer[:end]
        return body

    @property
    def missing(self) -> int:
        """Number of bytes that are still missing from the header or, once that was added, from the body of the next
        frame; 0 when the frame is complete. Raises `ProtocolRefused` as `next_frame`."""
        size = self._size()
        whole = HEADER_BYTES if size is None else HEADER_BYTES + size
        return max(0, whole - len(self._buffer))

    def take(self, target: memoryview) -> int:
        """Move raw bytes that were added into `target`, as many as fit; returns their number."""
        count = min(len(target), len(self._buffer))
        with memoryview(self._buffer) as view:
            target[:count] = view[:count]
        del self._buffer[:count]
        return count

    def __len__(self) -> int:
        """Number of bytes that were added and not yet read."""
        return len(self._buffer)

    def rest(self) -> bytes:
        """Returns the bytes that were added and not yet read, without removing them."""
        return bytes(self._buffer)

    def _size(self) -> int | None:
        """Returns the length in bytes of the next body; None while its header is not complete."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
        if size > self.max_frame:
            raise ProtocolRefused(f"a frame of {size} bytes; at most {self.max_frame} are accepted")
        return size


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Decode the body of one frame. Returns the message; raises `ProtocolRefused` with the reason for a body that is
    none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolRefused(f"a frame that this protocol does not know: {error}") from error
