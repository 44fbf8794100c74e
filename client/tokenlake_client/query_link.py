"""One connection to a query engine, used by several threads and without a thread of its own.

A caller that waits reads the socket and delivers the other callers' answers too, and sends never block, as in
`tokenlake_client.channel`. While the query engine is overdue (`tokenlake.liveness`), further calls fail at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable

import msgspec

from tokenlake.errors import DeadlinePassed, TokenLakeError, Unreachable
from tokenlake.liveness import Liveness
from tokenlake.wire import query as wire
from tokenlake.wire.frames import FrameDecoder, decode, pack_frame
from tokenlake.wire.query import Answered, QueryReply, Refused, Viewed, query_reply_decoder
from tokenlake_client.arguments import poll_ms

__all__ = ["Expected", "QueryLink"]

log = logging.getLogger(__name__)

READ_BYTES = 64 << 10
MAX_FRAME = 1 << 20
"""Limit of the bytes of a reply from the query engine; the longest field of a reply has one byte per segment of a
view."""
UNSENT_BYTES = wire.MAX_FRAME + (1 << 20)
"""The connection ends when more bytes than this wait because the query engine does not read; more than one frame."""


class Expected:
    """A request to the query engine whose answer is awaited. `reply` is None until the answer arrives, which may be
    late or never."""

    __slots__ = ("given_up", "reply")

    def __init__(self) -> None:
        self.reply: QueryReply | None = None
        self.given_up = False
        """True: no caller waits for the answer any more."""


class QueryLink:
    """A connection to the query engine of this node. Thread-safe. `send` raises `Unreachable` once the connection has
    ended; `wait` never raises."""

    def __init__(self, sock: socket.socket) -> None:
        """Makes the connection from `sock`, which is connected to the query engine; the object owns it from now on."""
        self._sock = sock
        self._sock.setblocking(False)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._waiting: dict[Hashable, Expected] = {}
        self._changed = threading.Condition()
        self._reading = False
        self._sending = threading.Lock()
        """Guards `_unsent`, and is held while the socket is written or closed."""
        self._unsent = bytearray()
        self._process = os.getpid()
        self.ended = ""
        """The reason why the connection to the query engine ended; empty while it exists."""
        self._liveness = Liveness()
        self.late_views: deque[int] = deque()
        """The numbers of views that the query engine opened after their caller had given up."""

    def __del__(self) -> None:
        self._sock.close()

    @property
    def alive(self) -> bool:
        """True while the connection to the query engine exists, as far as is known; always False in a forked
        process."""
        return not self.ended and self._process == os.getpid()

    @property
    def overdue(self) -> bool:
        """True when a caller's deadline has passed and the query engine has sent nothing since."""
        return self._liveness.overdue

    def check(self) -> None:
        """Raises `Unreachable` when the connection has ended, `DeadlinePassed` while the query engine is overdue."""
        if self.alive and self.overdue:
            self._read_some(None, 0.0)
        if not self.alive:
            raise Unreachable(
                f"the connection to the query engine ended: {self.ended or 'a forked process must connect on its own'}"
            )
        if self.overdue:
            raise DeadlinePassed("the query engine still owes an earlier answer")

    def expect(self, key: Hashable) -> Expected:
        """Register a request before it is sent; `wait` then returns its answer. `key`: ("view", number) or
        (buffer, step, layer, attempt)."""
        expected = Expected()
        with self._changed:
            self._waiting[key] = expected
        return expected

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send one frame and beside it `descriptor`, which the caller continues to own. Never waits: bytes that the
        socket does not take are sent by later calls. Raises `Unreachable`; with a `descriptor` also `DeadlinePassed`
        while earlier bytes wait."""
        frame = pack_frame(message)
        error = ""
        with self._sending:
            if not self.alive:
                raise Unreachable(f"the connection to the query engine ended: {self.ended}")
            try:
                self._send_unsent()
                if descriptor is not None:
                    # A descriptor belongs to the bytes that are sent with it.
                    if self._unsent:
                        raise DeadlinePassed("the query engine has not read earlier requests")
                    frame = frame[self._send_with(frame, descriptor) :]
                self._unsent += frame
                self._send_unsent()
            except OSError as broken:
                error = str(broken)
            if len(self._unsent) > UNSENT_BYTES:
                error = f"{len(self._unsent)} bytes wait to be sent"
        if error:
            # A part of a frame may have been sent, so the query engine could not find the next frame in the stream.
            self._end(f"the query engine does not read: {error}")
            raise Unreachable(f"the query engine does not read: {error}")

    def _send_with(self, frame: bytes, descriptor: int) -> int:
        try:
            return socket.send_fds(self._sock, [frame], [descriptor])
        except BlockingIOError:
            raise DeadlinePassed("the query engine has not read earlier requests") from None

    def _send_unsent(self) -> None:
        """Send bytes of `_unsent` as far as the socket takes them. The caller holds `_sending`."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]

    def wait(self, expected: Expected, deadline_s: float) -> QueryReply | None:
        """Wait for the answer and return it; None when the deadline passed or the connection ended. A late answer still
        sets `expected.reply`."""
        until = time.monotonic() + deadline_s
        while expected.reply is None and self.alive:
            left = max(0.0, until - time.monotonic())
            self._read_some(expected, left)
            if not left:
                break
        with self._changed:
            if expected.reply is None and not self.ended:
                expected.given_up = True
                self._liveness.deadline_missed()
        return expected.reply

    def close(self) -> None:
        """Close the connection to the query engine. Idempotent. `wait` in other threads returns None."""
        self._end("it was closed here")

    def _read_some(self, expected: Expected | None, wait_s: float) -> None:
        """Read the socket once, and deliver the answers: wait for data for at most `wait_s`. While another thread
        reads, wait instead until that thread has read, for at most `wait_s`."""
        with self._changed:
            if self._reading:
                if wait_s and (expected is None or expected.reply is None):
                    self._changed.wait(wait_s)
                return
            if expected is not None and expected.reply is not None:
                return
            self._reading = True
        try:
            ready = self._ready(wait_s)
            if ready & select.POLLOUT:
                with self._sending:
                    self._send_unsent()
            if ready & ~select.POLLOUT:
                self._read()
        except (OSError, TokenLakeError, ValueError) as error:
            self._end(str(error))
        finally:
            with self._changed:
                self._reading = False
                if self.ended:
                    self._close_socket()
                self._changed.notify_all()

    def _ready(self, wait_s: float) -> int:
        """Wait at most `wait_s` until the socket can be read, or written where bytes are unsent. Returns poll's events;
        0: none."""
        # poll and not select, which takes no descriptor beyond 1023.
        poller = select.poll()
        poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = poller.poll(poll_ms(wait_s))
        return events[0][1] if events else 0

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise Unreachable("the query engine closed the connection")
        replies = [decode(query_reply_decoder, body) for body in self._decoder.feed(data)]
        with self._changed:
            self._liveness.heard(time.monotonic())
            for reply in replies:
                self._deliver(reply)

    def _deliver(self, reply: QueryReply) -> None:
        if isinstance(reply, Refused) and not reply.view:
            # The refusal of a buffer, a step or a query; each query concerned is answered besides, without codes.
            log.warning("the query engine refused a step: %s: %s", reply.kind, reply.reason)
            return
        expected = self._waiting.pop(_key_of(reply), None)
        if expected is None:
            return
        expected.reply = reply
        if expected.given_up and isinstance(reply, Viewed):
            self.late_views.append(reply.view)

    def _end(self, reason: str) -> None:
        with self._changed:
            if not self.ended:
                self.ended = reason
                if self._process == os.getpid():
                    # A forked child must not shut the socket down: that would end the connection of its parent.
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
                if not self._reading:
                    self._close_socket()
            self._waiting.clear()
            self._changed.notify_all()

    def _close_socket(self) -> None:
        # A thread that is about to write must not find another file under the descriptor's number.
        with self._sending:
            self._sock.close()
            self._unsent.clear()


def _key_of(reply: QueryReply) -> Hashable:
    if isinstance(reply, Viewed | Refused):
        return "view", reply.view
    assert isinstance(reply, Answered)
    return reply.buffer, reply.step, reply.layer, reply.attempt
