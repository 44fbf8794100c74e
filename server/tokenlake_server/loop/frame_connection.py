"""A socket of the control loop that receives and sends frames and never blocks.

It uses reader and writer callbacks of the loop, because asyncio's transports cannot pass descriptors.

A connection may be encrypted (`start_tls`). The steps of the TLS handshake run in a thread, and nothing is read from
the socket during a step.

The connections of a loop share its time. A slice of time of a connection, in which it handles frames, ends after
`SLICE_S`. The frames that are left are handled in its next slices, and nothing more is read from the socket until then.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

from tokenlake.errors import LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.wire import FrameDecoder
from tokenlake_server.loop.loop_share import LoopShare
from tokenlake_server.peers.tls import TlsSession

READ_BYTES = 64 << 10
"""Bytes that one read of the socket may return. From 128 KiB on Python would map and unmap memory for each read, which
costs more than the read."""
SLICE_S = 0.001
"""Seconds after which a slice of a connection ends. It ends between two frames, or two parts of the work on one frame,
so it lasts longer by at most one of them."""
MAX_UNSENT_BYTES = 16 << 20
"""Limit of the unsent bytes of a connection: it is closed when its other side leaves more than this unread, so that
memory is bounded."""
MAX_UNSENT_DESCRIPTORS = 8
"""Number of unsent descriptors from which on a connection with a `pause_bytes` handles no further frames."""

JOINED_BYTES = 64 << 10
"""Unsent bytes up to which further frames are appended to the same buffer: a buffer for each of many short frames would
take several times their bytes."""

Unsent = tuple[bytearray, tuple[int, ...]]
"""Unsent bytes, and the descriptors that are sent with the first of them, which the connection owns."""


class FrameConnection:
    """A socket of the control loop that sends and receives frames; it owns the socket `sock`. Callbacks run on the
    loop. `on_closed(reason)` is called exactly once, unless the socket is detached."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        max_frame: int,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        on_broken: Callable[[ProtocolRefused], None] | None = None,
        *,
        max_unsent: int = MAX_UNSENT_BYTES,
        pause_bytes: int = 0,
        charge: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_frame(body)` handles a frame. `on_broken(error)` is called before the connection closes because a frame
        exceeds `max_frame`; it may send the reason to the other side.

        `max_unsent`: limit of the unsent bytes, beyond which the connection closes. `pause_bytes`: above 0, no frame is
        handled while more bytes than this are unsent, so that the other side, which does not read, causes no further
        answers. Not for a connection whose two sides both pause: each could wait for the other. `charge(nbytes)` is
        called when the connection keeps `nbytes` more, or fewer if negative, of unsent answers and of frames that are
        not whole; it raises `LimitReached` for more than may be kept, and the connection closes."""
        self.sock = sock
        self.on_frame = on_frame
        self.on_closed = on_closed
        self.on_broken = on_broken
        self.on_first: Callable[[bytes], None] | None = None
        """Called with the first bytes of the connection, before they are handled; it may call `start_tls`."""
        self.on_refused: Callable[[TokenLakeError], None] | None = None
        """Called before the connection closes because the other side refused this node's certificate, or because
        encrypted bytes were changed."""
        self._tls: TlsSession | None = None
        self._secured: Callable[[TokenLakeError | None], None] | None = None
        """Called when the TLS handshake has ended; None before and afterwards."""
        self._threads: Executor | None = None
        self._stepping: asyncio.Future[None] | None = None
        """The last step of the TLS handshake."""
        self._loop = loop
        self._max_unsent = max_unsent
        self._pause_bytes = pause_bytes
        self._charge = charge
        self._charged = 0
        self._clock = clock
        self._decoder = FrameDecoder(max_frame)
        self._bodies: Iterator[bytes] = iter(())
        """The frames that were read and are not handled yet."""
        self._waiting = False
        """True while frames may be left for a later slice; nothing is read from the socket meanwhile."""
        self._scheduled = False
        self.share: LoopShare | None = None
        """The time of the loop that this connection shares with others; None: it has a slice of its own in each pass of
        the loop."""
        self._unsent: deque[Unsent] = deque()
        self._unsent_bytes = 0
        self._unsent_descriptors = 0
        self._open = True
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    @property
    def max_frame(self) -> int:
        """Limit of the bytes of a frame that this side accepts."""
        return self._decoder.max_frame

    @max_frame.setter
    def max_frame(self, value: int) -> None:
        self._decoder.max_frame = value

    def start_tls(
        self, session: TlsSession, threads: Executor, on_secured: Callable[[TokenLakeError | None], None]
    ) -> None:
        """Encrypt the connection from now on: before the first bytes are sent and handled. No frame may be sent before
        `on_secured(None)`. `on_secured(error)` is called instead if the handshake failed; the connection then closes.
        `threads` run the steps of the handshake."""
        self._tls, self._threads, self._secured = session, threads, on_secured
        if not session.server:
            self._step()

    def _step(self) -> None:
        """Do the next step of the TLS handshake, in a thread. The socket is not read meanwhile."""
        assert self._tls is not None
        assert self._threads is not None
        self._loop.remove_reader(self.sock)
        self._stepping = self._loop.run_in_executor(self._threads, self._tls.handshake)
        self._stepping.add_done_callback(self._stepped)

    def _stepped(self, step: asyncio.Future[None]) -> None:
        if not self._open or step.cancelled():
            return
        assert self._tls is not None
        error = step.exception()
        self._loop.add_reader(self.sock, self._readable)
        data = self._tls.to_send()
        if data:
            self._send_raw(data, ())
        if not self._open or (error is None and self._tls.peer is None):
            return
        self._end_handshake(
            error if error is None or isinstance(error, TokenLakeError) else ProtocolRefused(str(error))
        )
        if self._open:
            # The other side may have sent frames right behind its last message of the handshake.
            self._received(b"")

    def _end_handshake(self, error: TokenLakeError | None) -> None:
        on_secured, self._secured = self._secured, None
        assert on_secured is not None
        on_secured(error)
        if error is not None:
            self.close(str(error))

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send the frame; the part that does not fit into the socket's buffer is queued. Does nothing once closed.
        `descriptors` are sent with the frame's first byte and stay the caller's; not on an encrypted connection."""
        if self._open:
            self._send_raw(frame if self._tls is None else self._tls.write(frame), descriptors)

    def _send_raw(self, frame: bytes, descriptors: Sequence[int]) -> None:
        sent = 0
        if not self._unsent:
            try:
                sent = _send(self.sock, frame, descriptors)
            except BlockingIOError:
                pass
            except OSError as error:
                self.close(f"write failed: {error}")
                return
            if sent == len(frame):
                return
            self._loop.add_writer(self.sock, self._writable)
        try:
            kept = () if sent else _duplicates(descriptors)
        except OSError as error:
            self.close(f"a descriptor could not be kept until the other side reads: {error}")
            return
        if self._unsent and not kept and len(self._unsent[-1][0]) < JOINED_BYTES:
            self._unsent[-1][0].extend(frame)
        else:
            self._unsent.append((bytearray(memoryview(frame)[sent:]), kept))
        self._unsent_bytes += len(frame) - sent
        self._unsent_descriptors += len(kept)
        if self._unsent_bytes > self._max_unsent:
            self.close(f"the other side left {self._unsent_bytes} bytes unread")
        self._settle()

    def _writable(self) -> None:
        until = self._clock() + SLICE_S
        try:
            while self._unsent and self._clock() < until:
                data, descriptors = self._unsent[0]
                sent = _send(self.sock, data, descriptors)
                self._unsent_bytes -= sent
                self._unsent_descriptors -= len(descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                if sent < len(data):
                    del data[:sent]
                    self._unsent[0] = data, ()
                    break
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"write failed: {error}")
            return
        if not self._unsent:
            self._loop.remove_writer(self.sock)
        self._settle()
        if self._waiting and not self._paused:
            self._slice_soon()

    @property
    def _paused(self) -> bool:
        """True while the other side has to read answers before further frames of it are handled."""
        if not self._pause_bytes:
            return False
        return self._unsent_bytes > self._pause_bytes or self._unsent_descriptors >= MAX_UNSENT_DESCRIPTORS

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
        if self.on_first is not None:
            on_first, self.on_first = self.on_first, None
            on_first(data)
            if not self._open:
                return
        self._received(data)

    def _received(self, data: bytes) -> None:
        """Handle bytes that were read from the socket."""
        if self._tls is not None:
            try:
                if data:
                    self._tls.receive(data)
                if self._tls.peer is None:
                    self._step()
                    return
                data = self._tls.read()
            except TokenLakeError as error:
                if self._secured is not None:
                    self._end_handshake(error)
                elif self.on_refused is not None:
                    self.on_refused(error)
                self.close(str(error))
                return
        self._bodies = self._decoder.feed(data)
        if self.share is not None and self.share.used_up:
            self._wait(True)
            self._slice_soon()
        else:
            self._slice()

    def _slice(self) -> None:
        """Handle the frames that were read. Those that are left when the slice ends are handled in later slices."""
        began = self._clock()
        try:
            self._handle_until(began + SLICE_S)
        finally:
            if self.share is not None:
                self.share.spent(self._clock() - began)

    def _handle_until(self, until: float) -> None:
        try:
            while not self._paused:
                body = next(self._bodies, None)
                if body is None:
                    self._wait(False)
                    break
                self.on_frame(body)
                if not self._open:
                    return
                if self._clock() >= until:
                    self._wait(True)
                    self._slice_soon()
                    break
            else:
                self._wait(True)
            self._settle()
        except ProtocolRefused as error:
            if self.on_broken is not None:
                self.on_broken(error)
            self.close(str(error))

    def _settle(self) -> None:
        """Charge the bytes that the connection keeps now."""
        if self._charge is None or not self._open:
            return
        kept = self._unsent_bytes + len(self._decoder)
        if kept == self._charged:
            return
        try:
            self._charge(kept - self._charged)
        except LimitReached as error:
            self.close(str(error))
        else:
            self._charged = kept

    def _slice_soon(self) -> None:
        """Handle further frames after the callbacks that are due now."""
        if not self._scheduled:
            self._scheduled = True
            if self.share is None:
                self._loop.call_soon(self._next_slice)
            else:
                self.share.later(self._next_slice)

    def _next_slice(self) -> None:
        self._scheduled = False
        if self._open:
            self._slice()

    def _wait(self, waiting: bool) -> None:
        """Record whether frames are left for a later slice: the socket is read only when none are."""
        if waiting is not self._waiting:
            self._waiting = waiting
            if waiting:
                self._loop.remove_reader(self.sock)
            else:
                self._loop.add_reader(self.sock, self._readable)

    def detach(self) -> tuple[socket.socket, bytes]:
        """Remove the callbacks. Returns the socket, which is the caller's from now on, and the bytes that were read and
        are not a whole frame. Not for a connection with unsent bytes."""
        self._open = False
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        return self.sock, self._decoder.rest()

    def close(self, reason: str) -> None:
        """Close the socket of the connection. Idempotent."""
        if not self._open:
            return
        self.detach()
        self.sock.close()
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()
        self._bodies = iter(())
        if self._stepping is not None:
            # A step that waits for a thread is not done any more: it would delay the handshakes of other connections.
            self._stepping.cancel()
        if self._charge is not None:
            self._charge(-self._charged)
        self.on_closed(reason)


def _send(sock: socket.socket, data: bytes | bytearray, descriptors: Sequence[int]) -> int:
    """Send some of `data`, with `descriptors` beside the first byte. Returns the number of bytes that were sent."""
    return socket.send_fds(sock, [data], list(descriptors)) if descriptors else sock.send(data)


def _duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """Duplicates of the descriptors, for a frame that is sent later. Raises OSError and keeps none when the process has
    no descriptor left."""
    made: list[int] = []
    try:
        made.extend(map(os.dup, descriptors))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    return tuple(made)
