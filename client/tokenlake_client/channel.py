"""The connection to the daemon: blocking calls from several threads over one socket.

There is no reader thread: a caller that waits reads, and hands others their replies (leader and followers), so
a call costs two system calls and no wake-up of another thread.

A call that misses its deadline makes the channel *overdue*: until the daemon says anything, further calls give
up at once, so that a frozen daemon costs its engine one deadline.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tokenlake import errors
from tokenlake.errors import DeadlinePassed, ProtocolRefused, Refused, TokenLakeError, Unreachable
from tokenlake.wire import FrameDecoder, pack_frame
from tokenlake.wire.engine import EngineReply, EngineRequest, Failed, reply_decoder
from tokenlake.wire.frames import decode

__all__ = ["Channel", "Pending"]

READ_BYTES = 256 << 10
MAX_FRAME = 16 << 20
"""Of a reply; the daemon's own bound on requests is in its `Welcome`."""
SEND_S = 1.0
"""Requests are far smaller than the socket's buffer: only a daemon that reads nothing makes a send wait."""
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class Pending:
    """A reply to come. Read by `Channel.wait` and `Channel.poll` alone."""

    __slots__ = ("error", "reply")

    def __init__(self) -> None:
        self.reply: EngineReply | None = None
        self.error: TokenLakeError | None = None

    @property
    def done(self) -> bool:
        """The reply is here, or will never be."""
        return self.reply is not None or self.error is not None


class Channel:
    """Raises `Unreachable` from everything once the connection broke."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids = itertools.count(1)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._waiting: dict[int, Pending] = {}
        self._descriptors: deque[int] = deque()
        self._changed = threading.Condition()
        self._reading = False
        self._sending = threading.Lock()
        self._broken: Unreachable | None = None
        self.overdue = False
        self.timeouts = 0
        """Calls that waited for their whole deadline in vain."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(SEND_S)
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise Unreachable(f"no daemon listens at {path} ({error}); start one with `tokenlake serve`") from error

    @property
    def broken(self) -> bool:
        """No call can succeed any more."""
        return self._broken is not None

    def call(self, make: Callable[[int], EngineRequest], deadline_s: float) -> EngineReply:
        """Send `make(id)` and wait for its reply. Raises `DeadlinePassed`, `Unreachable`, or what the daemon
        refused it with."""
        pending = self.begin(make)
        return self.wait(pending, deadline_s)

    def begin(self, make: Callable[[int], EngineRequest]) -> Pending:
        """Send `make(id)`; its reply comes to `wait` or `poll`."""
        pending = Pending()
        number = next(self._ids)
        self._check()
        with self._changed:
            self._waiting[number] = pending
        self._send(make(number))
        return pending

    def tell(self, message: EngineRequest) -> None:
        """Send what is not answered."""
        self._check()
        self._send(message)

    def wait(self, pending: Pending, deadline_s: float) -> EngineReply:
        """The reply. After `DeadlinePassed` a late one is dropped."""
        until = time.monotonic() + deadline_s
        while not pending.done:
            left = until - time.monotonic()
            if left <= 0:
                self._give_up(pending, deadline_s)
            elif self._lead(pending, left):
                self._read_until(pending, until)
        return self._result(pending)

    def poll(self, pending: Pending) -> EngineReply | None:
        """The reply if it is here, without waiting."""
        if not pending.done and self._lead(pending, 0.0):
            self._read_until(pending, 0.0)
        return self._result(pending) if pending.done else None

    def drop(self, pending: Pending) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            for number in [number for number, other in self._waiting.items() if other is pending]:
                del self._waiting[number]

    def take_descriptor(self) -> int:
        """The oldest descriptor that came beside a reply; the caller owns it."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Idempotent. Calls that wait in other threads fail with `Unreachable`."""
        self._break(Unreachable(f"the connection to {self.path} was closed"))

    # -- inside

    def _check(self) -> None:
        if self._broken is not None:
            raise Unreachable(str(self._broken))
        if self.overdue and self._lead(None, 0.0):
            self._read_until(None, 0.0)
        if self.overdue:
            raise DeadlinePassed(f"the daemon at {self.path} still owes the answer to an earlier call")

    def _send(self, message: EngineRequest) -> None:
        with self._sending:
            try:
                self._sock.sendall(pack_frame(message))
            except OSError as error:
                # Part of a frame may be out: the stream cannot be used any more.
                self._break(Unreachable(f"the daemon at {self.path} does not read: {error}"))
        if self._broken is not None:
            raise Unreachable(str(self._broken))

    def _lead(self, pending: Pending | None, wait_s: float) -> bool:
        """Become the one that reads. False: somebody else reads; `pending` may have changed meanwhile."""
        with self._changed:
            if self._reading:
                if wait_s:
                    self._changed.wait(wait_s)
                return False
            if pending is not None and pending.done:
                return False
            self._reading = True
            return True

    def _read_until(self, pending: Pending | None, until: float) -> None:
        """Read and hand out replies until `pending` is done or the time has come; without `pending`, what is
        there now."""
        try:
            while self._broken is None and not (pending is not None and pending.done):
                left = max(0.0, until - time.monotonic())
                if not select.select([self._sock], [], [], left)[0]:
                    return
                self._read()
        except (OSError, TokenLakeError, ValueError) as error:
            self._break(Unreachable(f"the connection to the daemon at {self.path} broke: {error}"))
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _read(self) -> None:
        data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors.extend(received)
        if not data:
            raise Unreachable("the daemon closed it")
        replies = [decode(reply_decoder, body) for body in self._decoder.feed(data)]
        with self._changed:
            self.overdue = False
            for reply in replies:
                self._deliver(reply)
            self._changed.notify_all()

    def _deliver(self, reply: EngineReply) -> None:
        pending = self._waiting.pop(reply.id, None)
        if isinstance(reply, Failed):
            error = _as_error(reply)
            if pending is not None:
                pending.error = error
            else:
                # About the connection itself; the daemon closes it after this.
                self._broken = self._broken or Unreachable(str(error))
        elif pending is not None:
            pending.reply = reply

    def _give_up(self, pending: Pending, deadline_s: float) -> None:
        self.drop(pending)
        self.overdue = True
        self.timeouts += 1
        pending.error = DeadlinePassed(f"the daemon at {self.path} did not answer within {deadline_s * 1e3:.0f} ms")

    @staticmethod
    def _result(pending: Pending) -> EngineReply:
        if pending.error is not None:
            raise pending.error
        assert pending.reply is not None
        return pending.reply

    def _break(self, error: Unreachable) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = error
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._sock.close()
                while self._descriptors:
                    os.close(self._descriptors.popleft())
            for pending in self._waiting.values():
                pending.error = self._broken
            self._waiting.clear()
            self._changed.notify_all()


def _as_error(failed: Failed) -> TokenLakeError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, Refused):
        return kind(failed.reason)
    return ProtocolRefused(failed.reason)
