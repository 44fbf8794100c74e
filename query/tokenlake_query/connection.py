"""One socket of the query engine: a thread that reads, and sends that nobody waits in.

Neither a thread that reads nor the one that computes ever waits in a send: two query engines that send to each other
cannot wait for each other, and a peer that stands still costs nobody else anything.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import HEADER_BYTES, pack_frame
from tokenlake.wire.query import Refused

__all__ = ["MAX_FRAME", "Connection", "FrameReader"]

log = logging.getLogger(__name__)

MAX_FRAME = 4 << 20
"""32 bytes per key: a view of 131,072 segments."""
READ_BYTES = 64 << 10
STALLED_S = 10
"""A connection that takes nothing for so long is cut off."""
MAX_UNSENT_BYTES = 1 << 30
"""Of which only results are memory of this process, and whoever computes those waits before it has many."""
MAX_BUFFERS = 512
"""In one system call; Linux takes 1,024."""
MAX_DESCRIPTORS = 8
"""That came and no frame has claimed."""
_FD_SPACE = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class FrameReader:
    """Frames of a socket, the raw bytes that follow some, and the descriptors beside them. Blocks; for one thread.

    Raises EOFError at the end of the stream, OSError, and ProtocolRefused for what cannot be read on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._passes_descriptors = sock.family == socket.AF_UNIX
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._start = self._end = 0
        self._descriptors: deque[int] = deque()

    def frame(self) -> bytes:
        """The next body."""
        size = int.from_bytes(self._take(HEADER_BYTES), "little")
        if size > MAX_FRAME:
            raise ProtocolRefused(f"a frame of {size} bytes; at most {MAX_FRAME} are accepted")
        return self._take(size)

    def into(self, target: memoryview) -> None:
        """Fill `target` (bytes) with what comes next."""
        held = min(len(target), self._end - self._start)
        target[:held] = self._buffer[self._start : self._start + held]
        self._start += held
        while held < len(target):
            held += self._receive(target[held:])

    def skip(self, size: int) -> None:
        """Drop so many bytes."""
        target = memoryview(bytearray(min(size, READ_BYTES)))
        while size:
            self.into(target[: min(size, READ_BYTES)])
            size -= min(size, READ_BYTES)

    def descriptor(self) -> int:
        """The one beside the frame that was read; the caller owns it."""
        if not self._descriptors:
            raise ProtocolRefused("a frame came without the descriptor that belongs to it")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the descriptors that nobody claimed."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _take(self, size: int) -> bytes:
        if size > READ_BYTES:
            body = bytearray(size)
            self.into(memoryview(body))
            return bytes(body)
        if self._start + size > READ_BYTES:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        while self._end - self._start < size:
            if self._start == self._end:
                self._start = self._end = 0
            self._end += self._receive(self._buffer[self._end :])
        self._start += size
        return bytes(self._buffer[self._start - size : self._start])

    def _receive(self, target: memoryview) -> int:
        if not self._passes_descriptors:
            count = self._sock.recv_into(target)
        else:
            count, ancillary, _, _ = self._sock.recvmsg_into([target], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                    self._descriptors.extend(received)
            if len(self._descriptors) > MAX_DESCRIPTORS:
                raise ProtocolRefused(f"{len(self._descriptors)} descriptors that belong to no frame")
        if not count:
            raise EOFError("closed by the other side")
        return count


class Connection:
    """Owns `sock`. `serve` reads in a thread of its own; `send` from any thread."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self._sock = sock
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALLED_S, 0))
        self.reader = FrameReader(sock)
        self._changed = threading.Condition()
        self._open = True
        self._sender: threading.Thread | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def open(self) -> bool:
        """Not closed, as far as anybody noticed."""
        return self._open

    def serve(self, handle: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Start reading: `handle(body)` for every frame, `on_end()` once, both in the reading thread. What `handle`
        raises of `TokenLakeError` is told the other side; everything it raises ends the connection."""

        def read() -> None:
            try:
                while True:
                    handle(self.reader.frame())
            except (EOFError, OSError) as error:
                log.debug("%s ended: %s", self.name, error)
            except TokenLakeError as error:
                log.warning("%s is cut off: %s", self.name, error)
                self.send(Refused(0, type(error).__name__, str(error)))
            except Exception:
                log.exception("%s is cut off", self.name)
            finally:
                self.close()
                self._sock.close()
                self.reader.close()
                on_end()

        threading.Thread(target=read, name=f"read {self.name}", daemon=True).start()

    def send(self, message: msgspec.Struct, payload: Sequence[memoryview] = ()) -> int:
        """Send a frame and the bytes that follow it, now as far as the socket takes them. The rest is sent by a thread
        and must stay as it is until then; nobody learns when. Never waits; nothing is sent once it is closed. Returns
        how many bytes it all is."""
        buffers = deque([memoryview(pack_frame(message)), *payload])
        nbytes = sum(map(len, buffers))
        with self._changed:
            if self._open and not self._unsent:
                try:
                    while buffers:
                        self._send_some(buffers, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._end(f"write failed: {error}")
            if self._open and buffers:
                self._keep(buffers)
        return nbytes

    def wait_unsent(self, most: int) -> None:
        """Until at most so many bytes wait to be sent, or it is closed. For the reading thread alone: it stops asking
        for more work, as the other side does not take what it has asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent_bytes <= most or not self._open)

    def close(self) -> None:
        """Idempotent. The reading thread ends, and frees the socket."""
        with self._changed:
            self._end("closed here")

    def _end(self, reason: str) -> None:
        if self._open:
            log.debug("%s: %s", self.name, reason)
            self._open = False
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _keep(self, buffers: deque[memoryview]) -> None:
        self._unsent += buffers
        self._unsent_bytes += sum(map(len, buffers))
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._end(f"it left {self._unsent_bytes} bytes unread")
            return
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_rest, name=f"send {self.name}", daemon=True)
            self._sender.start()
        self._changed.notify_all()

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or not self._open)
                if not self._open:
                    return
                buffers = deque(self._unsent)
            before = sum(map(len, buffers))
            error: OSError | None = None
            try:
                # Others only append meanwhile.
                self._send_some(buffers, 0)
            except OSError as failed:
                error = failed
            with self._changed:
                if error is not None:
                    stalled = isinstance(error, BlockingIOError)
                    self._end(f"it took nothing for {STALLED_S} s" if stalled else f"write failed: {error}")
                    return
                # Nothing is left to drop when it was closed meanwhile.
                sent = before - sum(map(len, buffers))
                self._unsent_bytes -= sent
                _drop(self._unsent, sent)
                self._changed.notify_all()

    def _send_some(self, buffers: deque[memoryview], flags: int) -> None:
        """One system call; what was sent leaves `buffers`."""
        chunk = list(itertools.islice(buffers, MAX_BUFFERS))
        _drop(buffers, self._sock.sendmsg(chunk, [], flags | socket.MSG_NOSIGNAL))


def _drop(buffers: deque[memoryview], count: int) -> None:
    """Take `count` bytes off the front, and empty buffers there."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.popleft())
    if buffers and count:
        buffers[0] = buffers[0][count:]
