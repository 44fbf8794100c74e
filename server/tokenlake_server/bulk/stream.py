"""A bulk connection: a blocking socket that carries plain bytes or encrypted records (`tokenlake.wire.records`)."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import msgspec

from tokenlake.wire import FrameDecoder, pack_frame
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.records import LENGTH_BYTES, OVERHEAD_BYTES, RECORD_BYTES, Receive, RecordReader, RecordWriter
from tokenlake_server.bulk.blocking_sockets import ended, read_frame

ROOM_BYTES = RECORD_BYTES + OVERHEAD_BYTES
"""Bytes of the longest record. Segments are sent in the longest records: one of 1 MiB takes a fifth less processor time
than four of 256 KiB."""


class BulkStream:
    """One side of a bulk connection. It owns the socket `sock`. For one thread at a time."""

    def __init__(self, sock: socket.socket, keys: RecordKeys | None) -> None:
        """`keys`: of the records of the connection; None for a plain one."""
        self.sock = sock
        self._writer = RecordWriter(keys.sending) if keys is not None else None
        self._reader = RecordReader(keys.receiving) if keys is not None else None

    def send_frame(self, message: msgspec.Struct) -> None:
        """Send one frame. Raises OSError."""
        frame = pack_frame(message)
        self.sock.sendall(frame if self._writer is None else b"".join(self._writer.sealed([frame])))

    def read_frame(self, max_frame: int) -> bytes:
        """Read the next frame and return its body. Raises the errors of `blocking_sockets.read_frame`, and
        `ProtocolRefused` for a record that is not the next one."""
        if self._reader is None:
            return read_frame(self.sock, max_frame)
        decoder = FrameDecoder(max_frame)
        buffer = bytearray()
        while (body := decoder.next_frame()) is None:
            part = memoryview(bytearray(decoder.missing))
            self._reader.into(part, self._receive, buffer)
            decoder.add(part)
        return body

    def fill(self, target: memoryview, receive: Receive, buffer: bytearray) -> None:
        """Fill `target` with the next plain bytes. `receive` reads the socket; `buffer` holds encrypted bytes during
        the call. Raises the errors of `receive`, and `ProtocolRefused` for a record that is not the next one."""
        if self._reader is None:
            receive(target)
        else:
            self._reader.into(target, receive, buffer)

    def outgoing(
        self, message: msgspec.Struct, views: Sequence[memoryview], room: bytearray
    ) -> Iterator[list[memoryview]]:
        """The bytes to send for a frame and the raw bytes behind it, in order. Each part must be sent as a whole before
        the next one is made: encrypted parts lie in `room`, which has `ROOM_BYTES`."""
        frame = pack_frame(message)
        if self._writer is None:
            yield [memoryview(frame), *views]
            return
        with memoryview(room) as free:
            used = 0
            pieces = [memoryview(frame)]
            pieces += [view[at : at + RECORD_BYTES] for view in views for at in range(0, len(view), RECORD_BYTES)]
            for piece in pieces:
                if used + len(piece) + OVERHEAD_BYTES > len(free):
                    yield [free[:used]]
                    used = 0
                used += len(self._writer.seal(piece, free[used:]))
            yield [free[:used]]

    def _receive(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            received = self.sock.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            if not received:
                raise ended()
            filled += received


def is_length(target: memoryview) -> bool:
    """True if `target` receives the length of a record; False if it receives bytes of the record."""
    return len(target) == LENGTH_BYTES
