"""One connection to a query engine: frames out, answers in, from several threads and with no thread of its own.

A caller that waits reads, and hands others their answers, as in `tokenlake_client.channel`. A query engine that let a
deadline pass makes the link *overdue*: until it says anything, further calls give up at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable

import msgspec

from tokenlake.errors import DeadlinePassed, TokenLakeError, Unreachable
from tokenlake.wire.frames import FrameDecoder, decode, pack_frame
from tokenlake.wire.query import Answered, QueryReply, Refused, Viewed, query_reply_decoder

__all__ = ["Expected", "QueryLink"]

READ_BYTES = 64 << 10
MAX_FRAME = 1 << 20
"""Of a reply: one byte per segment of a view is the longest part of one."""
SEND_S = 1.0
"""Frames are far smaller than the socket's buffer: only a query engine that reads nothing makes a send wait."""


class Expected:
    """An answer to come, in time or late, or one that will never come."""

    __slots__ = ("given_up", "reply")

    def __init__(self) -> None:
        self.reply: QueryReply | None = None
        self.given_up = False
        """Nobody waits for it any more."""


class QueryLink:
    """`send` raises `Unreachable` once the connection ended; `wait` never raises."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the connected `sock` over."""
        self._sock = sock
        self._sock.settimeout(SEND_S)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._waiting: dict[Hashable, Expected] = {}
        self._changed = threading.Condition()
        self._reading = False
        self._sending = threading.Lock()
        self._process = os.getpid()
        self.ended = ""
        """Why the connection ended; empty while it is there."""
        self.overdue = False
        self.late_views: deque[int] = deque()
        """That were opened when nobody waited for them any more."""

    def __del__(self) -> None:
        self._sock.close()

    @property
    def alive(self) -> bool:
        """There, as far as anybody noticed, and of this process."""
        return not self.ended and self._process == os.getpid()

    def check(self) -> None:
        """Raises `Unreachable` when the connection ended, `DeadlinePassed` while an earlier answer is overdue."""
        if self.alive and self.overdue:
            self._read_some(None, 0.0)
        if not self.alive:
            raise Unreachable(f"the connection to the query engine ended: {self.ended or 'it is the parent process'}")
        if self.overdue:
            raise DeadlinePassed("the query engine still owes an earlier answer")

    def expect(self, key: Hashable) -> Expected:
        """Before the request is sent: its answer goes to `wait`. `key`: ("view", number) or
        (buffer, step, layer, attempt)."""
        expected = Expected()
        with self._changed:
            self._waiting[key] = expected
        return expected

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send one frame, with a descriptor beside it. Raises `Unreachable`."""
        frame = memoryview(pack_frame(message))
        with self._sending:
            if not self.alive:
                raise Unreachable(f"the connection to the query engine ended: {self.ended}")
            try:
                sent = socket.send_fds(self._sock, [frame], [descriptor]) if descriptor is not None else 0
                if sent < len(frame):
                    self._sock.sendall(frame[sent:])
            except OSError as error:
                # Part of a frame may be out: the stream cannot be used any more.
                self._end(f"it does not read: {error}")
                raise Unreachable(f"the query engine does not read: {error}") from error

    def wait(self, expected: Expected, deadline_s: float) -> QueryReply | None:
        """The answer; None when the deadline passed or the connection ended. A late one comes all the same."""
        until = time.monotonic() + deadline_s
        while expected.reply is None and self.alive:
            left = max(0.0, until - time.monotonic())
            self._read_some(expected, left)
            if not left:
                break
        with self._changed:
            if expected.reply is None and not self.ended:
                expected.given_up = self.overdue = True
        return expected.reply

    def close(self) -> None:
        """Idempotent. Those who wait get None."""
        self._end("it was closed")

    def _read_some(self, expected: Expected | None, wait_s: float) -> None:
        """Read what comes within `wait_s`, at least what is there now; or wait while another thread does."""
        with self._changed:
            if self._reading:
                if wait_s and (expected is None or expected.reply is None):
                    self._changed.wait(wait_s)
                return
            if expected is not None and expected.reply is not None:
                return
            self._reading = True
        try:
            if self._readable(wait_s):
                self._read()
        except (OSError, TokenLakeError, ValueError) as error:
            self._end(str(error))
        finally:
            with self._changed:
                self._reading = False
                if self.ended:
                    self._sock.close()
                self._changed.notify_all()

    def _readable(self, wait_s: float) -> bool:
        # poll, because select takes no descriptor beyond 1023. Rounded up: a short wait must not spin.
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(math.ceil(wait_s * 1e3)))

    def _read(self) -> None:
        data = self._sock.recv(READ_BYTES)
        if not data:
            raise Unreachable("the query engine closed it")
        replies = [decode(query_reply_decoder, body) for body in self._decoder.feed(data)]
        with self._changed:
            self.overdue = False
            for reply in replies:
                self._deliver(reply)

    def _deliver(self, reply: QueryReply) -> None:
        if isinstance(reply, Refused) and not reply.view:
            # About a step or a query, and it does not say which: whoever waits for a result has lost it.
            for key in [key for key in self._waiting if not _is_view(key)]:
                self._waiting.pop(key).reply = reply
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
                    # Not in a forked child: that would end its parent's connection.
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
                if not self._reading:
                    self._sock.close()
            self._waiting.clear()
            self._changed.notify_all()


def _key_of(reply: QueryReply) -> Hashable:
    if isinstance(reply, Viewed | Refused):
        return "view", reply.view
    assert isinstance(reply, Answered)
    return reply.buffer, reply.step, reply.layer, reply.attempt


def _is_view(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] == "view"
