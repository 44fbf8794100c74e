"""One socket of the query engine: a thread reads it, and sends never block.

A send that does not fit into the socket's buffer is finished by a thread of the connection. Reading threads and the
computing thread therefore never wait for a peer: two query engines that send to each other cannot deadlock, and a peer
that stands still delays no other connection.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from tokenlake.errors import TokenLakeError
from tokenlake.wire import FrameDecoder, pack_frame
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.query import MAX_FRAME, Refused
from tokenlake.wire.records import LENGTH_BYTES, RecordReader, RecordWriter
from tokenlake_client.descriptors import SPACE, ReceivedDescriptors

log = logging.getLogger(__name__)

READ_BYTES = 64 << 10
STALLED_S = 10
"""Seconds after which a connection is closed whose other side reads nothing, or stops within a frame."""
MAX_UNSENT_BYTES = 1 << 30
"""A connection with a peer is closed when more bytes than this wait to be sent because the peer does not read. Queries
to peers wait in the memory that their engine shares; results wait in memory of this process, and `PeerServer` stops
reading queries long before results reach this bound (`wait_unsent`)."""
MAX_BUFFERS = 512
"""Maximum number of buffers that are passed to one call of `sendmsg`; Linux accepts at most 1,024."""


class FrameReader:
    """Reads a socket: frames, the raw bytes that follow some frames, and the file descriptors sent with some frames.
    Calls block, and only one thread may make them.

    Raises EOFError at the end of the stream, OSError when the socket fails, and ProtocolRefused for a frame after which
    the stream cannot be read any further."""

    def __init__(
        self,
        sock: socket.socket,
        pace: Callable[[], None] = lambda: None,
        keep: Callable[[int], None] = lambda nbytes: None,
        key: bytes = b"",
    ) -> None:
        """`key`: of the records of the stream; empty for a plain stream. `pace` is called before each frame and after
        each read of the socket; it may pause the thread. `keep` is called with the bytes of an incomplete frame that
        are about to be kept, and with negative bytes when they are kept no longer; it may raise LimitReached."""
        self._sock = sock
        self._pace = pace
        self._keep = keep
        self._kept = 0
        self._records = RecordReader(key) if key else None
        self._encrypted = bytearray()
        self._decoder = FrameDecoder(MAX_FRAME)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._descriptors = ReceivedDescriptors() if sock.family == socket.AF_UNIX else None

    def frame(self) -> bytes:
        """The body of the next frame. Raises TimeoutError when a frame that has begun stands still for `STALLED_S`."""
        while True:
            self._pace()
            body = self._decoder.next_frame()
            self._account(len(self._decoder))
            if body is not None:
                return body
            if len(self._decoder):
                self._await_rest()
            self._decoder.add(self._buffer[: self._receive(self._buffer)])

    def into(self, target: memoryview) -> None:
        """Fill `target` (bytes) with the raw bytes that come next in the stream. Bytes that this reader has not
        buffered yet are received directly into `target`. Raises TimeoutError when they stand still for `STALLED_S`."""
        filled = self._decoder.take(target)
        while filled < len(target):
            self._await_rest()
            filled += self._receive(target[filled:])

    def skip(self, size: int) -> None:
        """Discard the next `size` raw bytes of the stream."""
        target = memoryview(bytearray(min(size, READ_BYTES)))
        while size:
            self.into(target[: min(size, READ_BYTES)])
            size -= min(size, READ_BYTES)

    def descriptor(self) -> int:
        """The file descriptor that was sent with the frame that `frame` returned last; the caller owns it. Raises
        ProtocolRefused if no descriptor was sent."""
        return (self._descriptors or ReceivedDescriptors()).take()

    def close(self) -> None:
        """Close the file descriptors that were received and not taken; no bytes are kept any more."""
        self._account(0)
        if self._descriptors is not None:
            self._descriptors.close()

    def _account(self, nbytes: int) -> None:
        """Report how many bytes are kept now, in multiples of `READ_BYTES`."""
        kept = nbytes - nbytes % READ_BYTES
        if kept != self._kept:
            self._keep(kept - self._kept)
            self._kept = kept

    def _await_rest(self) -> None:
        """Wait for further bytes of the frame that has begun."""
        if self._records is not None and self._records.pending:
            return
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if not poller.poll(STALLED_S * 1e3):
            raise TimeoutError(f"an incomplete frame stood still for {STALLED_S} s")

    def _receive_record(self, target: memoryview) -> None:
        """Fill `target` with encrypted bytes. The stream may stand still between records, not within one."""
        filled = 0
        while filled < len(target):
            if filled or len(target) > LENGTH_BYTES:
                self._await_rest()
            count = self._sock.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError("closed by the other side")
            filled += count

    def _receive(self, target: memoryview) -> int:
        if self._records is not None:
            return self._records.some(target, self._receive_record, self._encrypted)
        if self._descriptors is None:
            count = self._sock.recv_into(target)
        else:
            count, ancillary, _, _ = self._sock.recvmsg_into([target], SPACE, socket.MSG_CMSG_CLOEXEC)
            self._descriptors.add(ancillary)
        if not count:
            raise EOFError("closed by the other side")
        return count


class Connection:
    """One connection of the query engine: sends and receives frames over the socket `sock`, which it owns. `serve`
    reads the socket in a thread of the connection; `send` may be called from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        max_unsent: int = MAX_UNSENT_BYTES,
        pace: Callable[[], None] = lambda: None,
        keep: Callable[[int], None] = lambda nbytes: None,
        keys: RecordKeys | None = None,
    ) -> None:
        """`keys`: of the records of the connection; None for a plain one. `max_unsent`: the connection is closed when
        more bytes than this wait to be sent. `pace`, `keep`: as for `FrameReader`, called in the thread of the
        connection that reads."""
        self.name = name
        self._max_unsent = max_unsent
        self._sock = sock
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALLED_S, 0))
        self.reader = FrameReader(sock, pace, keep, keys.receiving if keys is not None else b"")
        self._records = RecordWriter(keys.sending) if keys is not None else None
        self._changed = threading.Condition()
        self._open = True
        self._sender: threading.Thread | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def open(self) -> bool:
        """False once this side closed the connection, or a read or write of its socket found the end of the stream or
        an error."""
        return self._open

    def serve(self, handle: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Start the thread that reads the connection: it calls `handle(body)` for every frame, and `on_end()` once. An
        exception of `handle` ends the connection; a `TokenLakeError` is first sent to the other side as `Refused`.
        Where no thread can be started the connection ends at once."""

        def read() -> None:
            try:
                while True:
                    handle(self.reader.frame())
            except (EOFError, OSError) as error:
                log.debug("%s ended: %s", self.name, error)
            except TokenLakeError as error:
                log.warning("closing the connection with %s: %s", self.name, error)
                self.send(Refused(0, type(error).__name__, str(error)))
            except Exception:
                log.exception("closing the connection with %s", self.name)
            finally:
                end()

        def end() -> None:
            self.close()
            self._sock.close()
            self.reader.close()
            on_end()

        try:
            threading.Thread(target=read, name=f"read {self.name}", daemon=True).start()
        except RuntimeError as error:
            log.error("closing the connection with %s: %s", self.name, error)
            end()

    def send(self, message: msgspec.Struct, payload: Sequence[memoryview] = ()) -> int:
        """Send a frame and the raw bytes that follow it. Never blocks: a thread sends later what the socket does not
        take now. `payload` is borrowed: it must not change until it was sent, and the caller is not notified of the
        end. A closed connection sends nothing. Returns the number of bytes of the frame and the payload."""
        buffers = deque([memoryview(pack_frame(message)), *payload])
        nbytes = sum(map(len, buffers))
        with self._changed:
            if self._open and self._records is not None:
                # Under the lock: records are sent in the order in which they are made.
                buffers = deque(self._records.sealed(buffers))
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
        """Block until at most `most` bytes wait to be sent, or the connection is closed. Called by the reading thread
        alone, so that it reads no further requests while the other side does not read the answers."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent_bytes <= most or not self._open)

    def close(self) -> None:
        """Shut the connection down; its reading thread then ends and closes the socket. Idempotent."""
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
        if self._unsent_bytes > self._max_unsent:
            self._end(f"the other side left {self._unsent_bytes} bytes unread")
            return
        if self._sender is None:
            sender = threading.Thread(target=self._send_rest, name=f"send {self.name}", daemon=True)
            try:
                sender.start()
            except RuntimeError as error:
                self._end(f"the rest of a frame cannot be sent: {error}")
                return
            self._sender = sender
        self._changed.notify_all()

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or not self._open)
                if not self._open:
                    return
                # At most `MAX_BUFFERS` are copied: the time for a copy of all waiting buffers would grow with their
                # number.
                buffers = deque(itertools.islice(self._unsent, MAX_BUFFERS))
            before = sum(map(len, buffers))
            error: OSError | None = None
            try:
                # The unsent frames are sent without the lock, from a copy of `_unsent`: other threads only append to it
                # or clear it meanwhile.
                self._send_some(buffers, 0)
            except OSError as failed:
                error = failed
            with self._changed:
                if error is not None:
                    stalled = isinstance(error, BlockingIOError)
                    self._end(f"the other side read nothing for {STALLED_S} s" if stalled else f"write failed: {error}")
                    return
                # If the connection was closed during the send, `_unsent` is empty already and nothing is dropped.
                sent = before - sum(map(len, buffers))
                self._unsent_bytes -= sent
                _drop(self._unsent, sent)
                self._changed.notify_all()

    def _send_some(self, buffers: deque[memoryview], flags: int) -> None:
        """Send as much of `buffers` as one system call takes, and remove the bytes that were sent from `buffers`."""
        chunk = list(itertools.islice(buffers, MAX_BUFFERS))
        _drop(buffers, self._sock.sendmsg(chunk, [], flags | socket.MSG_NOSIGNAL))


def _drop(buffers: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes from `buffers`, and all buffers at the front that are then empty."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.popleft())
    if buffers and count:
        buffers[0] = buffers[0][count:]
