"""Frames: 4 bytes of length (little-endian, of the body alone), then a MessagePack body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from tokenlake.errors import ProtocolRefused

__all__ = ["HEADER_BYTES", "FrameDecoder", "decode", "encode", "pack_frame"]

HEADER_BYTES = 4
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message's MessagePack, without a header."""
    return _encoder.encode(message)


def pack_frame(message: msgspec.Struct) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class FrameDecoder:
    """Cuts a byte stream into frame bodies. Holds at most one frame of at most `max_frame` bytes."""

    __slots__ = ("_buffer", "max_frame")

    def __init__(self, max_frame: int) -> None:
        self._buffer = bytearray()
        self.max_frame = max_frame

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by `data`. Raises `ProtocolRefused` for a frame over the bound: the stream cannot
        be read on after that."""
        buffer = self._buffer
        if not buffer and len(data) - HEADER_BYTES == int.from_bytes(data[:HEADER_BYTES], "little") <= self.max_frame:
            # Exactly one frame, as nearly always.
            yield data[HEADER_BYTES:]
            return
        buffer += data
        while len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "little")
            if size > self.max_frame:
                raise ProtocolRefused(f"a frame of {size} bytes; at most {self.max_frame} are accepted")
            end = HEADER_BYTES + size
            if len(buffer) < end:
                return
            body = bytes(buffer[HEADER_BYTES:end])
            # Before the caller sees it: it may ask for the `rest`.
            del buffer[:end]
            yield body

    def rest(self) -> bytes:
        """What was fed and is not a whole frame yet."""
        return bytes(self._buffer)


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Decode one body. Raises `ProtocolRefused` with the reason."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolRefused(f"a frame that this protocol does not know: {error}") from error
