"""One socket of the control loop: frames in, frames out, never blocking.

Not an asyncio transport, because those cannot pass descriptors; reader and writer callbacks of the loop are
all it needs.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import FrameDecoder

__all__ = ["FrameConnection"]

READ_BYTES = 64 << 10
"""At a time. From 128 KiB on each read would map memory and give it back, which costs more than the read."""
MAX_UNSENT_BYTES = 16 << 20
"""A peer or client that does not read this much is cut off: memory has a bound."""


class FrameConnection:
    """Owns `sock`. Callbacks run on the loop; `on_closed(reason)` exactly once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        max_frame: int,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        on_broken: Callable[[ProtocolRefused], None] | None = None,
    ) -> None:
        """`on_broken`: the stream cannot be read on; called before it closes, to tell the other side why."""
        self.sock = sock
        self.on_frame = on_frame
        self.on_closed = on_closed
        self.on_broken = on_broken
        self._loop = loop
        self._decoder = FrameDecoder(max_frame)
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._open = True
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send now what the socket takes, the rest when it can. `descriptors` travel with the frame's first
        byte and stay the caller's."""
        if not self._open:
            return
        if descriptors:
            self._send_with(frame, descriptors)
            return
        if not self._unsent:
            try:
                sent = self.sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.close(f"write failed: {error}")
                return
            if sent == len(frame):
                return
            self._loop.add_writer(self.sock, self._writable)
            self._keep(memoryview(frame)[sent:])
        else:
            self._keep(frame)

    def _send_with(self, frame: bytes, descriptors: Sequence[int]) -> None:
        # Descriptors cannot wait in a buffer. A client that does not read its replies gets none.
        try:
            if self._unsent:
                raise BlockingIOError
            sent = socket.send_fds(self.sock, [frame], list(descriptors))
        except OSError as error:
            self.close(f"a descriptor could not be sent: {error}")
            return
        if sent < len(frame):
            self._loop.add_writer(self.sock, self._writable)
            self._keep(memoryview(frame)[sent:])

    def _keep(self, data: bytes | memoryview) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.close(f"it left {self._unsent_bytes} bytes unread")

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = memoryview(self._unsent[0])[sent:]
                    return
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"write failed: {error}")
            return
        self._loop.remove_writer(self.sock)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"read failed: {error}")
            return
        if not data:
            self.close("closed by the other side")
            return
        try:
            for body in self._decoder.feed(data):
                self.on_frame(body)
                if not self._open:
                    return
        except ProtocolRefused as error:
            if self.on_broken is not None:
                self.on_broken(error)
            self.close(str(error))

    def detach(self) -> tuple[socket.socket, bytes]:
        """Stop watching and hand the socket over; (socket, bytes read but not yet a frame)."""
        self._open = False
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        return self.sock, self._decoder.rest()

    def close(self, reason: str) -> None:
        """Idempotent."""
        if not self._open:
            return
        self.detach()
        self.sock.close()
        self._unsent.clear()
        self.on_closed(reason)
