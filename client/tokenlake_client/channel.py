"""The connection to the daemon: blocking calls from several threads over one socket.

There is no reader thread: a caller that waits reads, and hands others their replies (leader and followers), so
a call costs two system calls and no wake-up of another thread.

A call that misses its deadline makes the channel *overdue*: until the daemon says anything, further calls give
up at once, so that a frozen daemon costs its engine one deadline. Its reply may still come, and grant what
nobody waits for any more: `orphans` keeps such replies for whoever gives back what they grant.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tokenlake import errors
from tokenlake.errors import DeadlinePassed, LimitReached, ProtocolRefused, Refused, TokenLakeError, Unreachable
from tokenlake.wire import HEADER_BYTES, FrameDecoder, pack_frame
from tokenlake.wire.engine import EngineReply, EngineRequest, Failed, QueryOpened, Region, reply_decoder
from tokenlake.wire.frames import decode
from tokenlake_client.door import dial

__all__ = ["Channel", "Pending"]

READ_BYTES = 64 << 10
"""At a time. From 128 KiB on each read would map memory and give it back, which costs more than the read."""
MAX_FRAME = 16 << 20
"""Of a reply; the daemon's own bound on requests is in its `Welcome`."""
SEND_S = 1.0
"""Requests are far smaller than the socket's buffer: only a daemon that reads nothing makes a send wait."""
STANDSTILL_S = 0.1
"""How much longer to wait when the deadline passed while an answer lay unread: threads of a busy process wake late."""
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class Pending:
    """A reply to come. Read by `Channel.wait` and `Channel.poll` alone."""

    __slots__ = ("descriptor", "error", "reply")

    def __init__(self) -> None:
        self.reply: EngineReply | None = None
        self.error: TokenLakeError | None = None
        self.descriptor: int | None = None
        """Came beside a `Region` or `QueryOpened`; whoever waits for the reply owns it."""

    @property
    def done(self) -> bool:
        """The reply is here, or will never be."""
        return self.reply is not None or self.error is not None


class Channel:
    """Raises `Unreachable` from everything once the connection broke."""

    def __init__(self, path: Path | None, on_end: Callable[[], None], daemon_uid: int | None = None) -> None:
        """`path`, `daemon_uid` and errors: as of `dial`. `on_end` is called once the connection broke, from whatever
        thread found out."""
        self._sock, self.path = dial(path, daemon_uid, SEND_S)
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._waiting: dict[int, Pending] = {}
        self._descriptors: deque[int] = deque()
        self._changed = threading.Condition()
        self._reading = False
        self._sending = threading.Lock()
        self._broken: TokenLakeError | None = None
        self._process = os.getpid()
        self.max_frame = MAX_FRAME
        """Of a request; set once the daemon named its bound."""
        self.orphans: deque[EngineReply] = deque()
        """Replies that came after their caller gave up."""
        self.overdue = False
        self.timeouts = 0
        """Calls that waited for their whole deadline in vain."""

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
        self._check()
        return self._begin(make)

    def probe(self, make: Callable[[int], EngineRequest], wait_s: float) -> None:
        """Ask although an answer is owed, and wait for that long at most: what is owed may be lost
        (test_an_answer_that_never_comes_ends_no_service). Raises `Unreachable`."""
        pending = self._begin(make)
        if self.poll(pending, wait_s) is None:
            self.drop(pending)

    def _begin(self, make: Callable[[int], EngineRequest]) -> Pending:
        pending = Pending()
        number = next(self._ids)
        with self._changed:
            self._waiting[number] = pending
        self._send(make(number), pending)
        return pending

    def tell(self, message: EngineRequest) -> None:
        """Send what is not answered."""
        self._check()
        self._send(message)

    def wait(self, pending: Pending, deadline_s: float) -> EngineReply:
        """The reply. After `DeadlinePassed` a late one is an orphan."""
        if not self._await(pending, deadline_s):
            self._give_up(pending, deadline_s)
        return self._result(pending)

    def poll(self, pending: Pending, wait_s: float = 0.0) -> EngineReply | None:
        """The reply if it is here, or comes within `wait_s`."""
        return self._result(pending) if self._await(pending, wait_s) else None

    def drop(self, pending: Pending) -> None:
        """Nobody waits for it any more: its reply is an orphan, also when it is here already."""
        with self._changed:
            for number in [number for number, other in self._waiting.items() if other is pending]:
                del self._waiting[number]
            if pending.reply is not None:
                self.orphans.append(pending.reply)

    def close(self) -> None:
        """Idempotent. Calls that wait in other threads fail with `Unreachable`."""
        self._break(Unreachable(f"the connection to {self.path} was closed"))

    # -- inside

    def _check(self) -> None:
        if self._process != os.getpid():
            raise Unreachable("a forked process must connect on its own: the connection is its parent's")
        if self._broken is None and self.overdue and self._lead(None, 0.0):
            self._read_until(None, 0.0)
        if self._broken is not None:
            raise Unreachable(str(self._broken))
        if self.overdue:
            raise DeadlinePassed(f"the daemon at {self.path} still owes the answer to an earlier call")

    def _send(self, message: EngineRequest, pending: Pending | None = None) -> None:
        frame = pack_frame(message)
        if len(frame) - HEADER_BYTES > self.max_frame:
            if pending is not None:
                self.drop(pending)
            raise LimitReached(
                f"a request of {len(frame) - HEADER_BYTES} bytes; the daemon's 'max_frame' is {self.max_frame}"
            )
        with self._sending:
            try:
                self._sock.sendall(frame)
            except OSError as error:
                # A daemon that closes the connection says why first.
                if self._lead(None, 0.0):
                    self._read_until(None, 0.0)
                # Part of a frame may be out: the stream cannot be used any more.
                self._break(Unreachable(f"the daemon at {self.path} does not read: {error}"))
        if self._broken is not None and pending is None:
            raise Unreachable(str(self._broken))

    def _await(self, pending: Pending, wait_s: float) -> bool:
        """Is it done, at the latest after `wait_s`? Reads what is there in any case."""
        until = time.monotonic() + wait_s
        while not pending.done:
            left = max(0.0, until - time.monotonic())
            if self._lead(pending, left):
                self._read_until(pending, until)
            elif not left and wait_s and self._broken is None and self._readable(0.0):
                # The answer is here, and the thread that reads has not run yet: the whole process stood still.
                with self._changed:
                    self._changed.wait_for(lambda: pending.done or not self._reading, STANDSTILL_S)
                wait_s = 0.0
                continue
            if not left:
                break
        return pending.done

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
                if not self._readable(left):
                    return
                self._read()
        except Refused as error:
            self._break(error)
        except (OSError, TokenLakeError, ValueError) as error:
            self._break(Unreachable(f"the connection to the daemon at {self.path} broke: {error}"))
        finally:
            with self._changed:
                self._reading = False
                if self._broken is not None:
                    # Not by whoever broke it: its number may be another's before the one who reads has called poll,
                    # which then waits for that one (test_a_broken_connection_is_closed_by_its_reader).
                    self._sock.close()
                self._changed.notify_all()

    def _readable(self, wait_s: float) -> bool:
        # poll, because select takes no descriptor beyond 1023, and engines have more. Rounded up: a wait of less
        # than a millisecond must not spin.
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(math.ceil(wait_s * 1e3)))

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
        carries = isinstance(reply, Region | QueryOpened)
        descriptor = self._descriptors.popleft() if carries and self._descriptors else None
        pending = self._waiting.pop(reply.id, None)
        if isinstance(reply, Failed) and not reply.id:
            # About the connection itself; the daemon closes it after this.
            raise _as_error(reply)
        if pending is None:
            if descriptor is not None:
                os.close(descriptor)
            self.orphans.append(reply)
        elif isinstance(reply, Failed):
            pending.error = _as_error(reply)
        else:
            pending.descriptor = descriptor
            pending.reply = reply

    def _give_up(self, pending: Pending, deadline_s: float) -> None:
        with self._changed:
            if pending.done:
                # It came between the last look and now.
                return
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

    def _break(self, error: TokenLakeError) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = error
                if self._process == os.getpid():
                    # Not in a forked child: that would end its parent's connection.
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
                if not self._reading:
                    self._sock.close()
                while self._descriptors:
                    os.close(self._descriptors.popleft())
            for pending in self._waiting.values():
                pending.error = self._broken
            self._waiting.clear()
            self._changed.notify_all()
        self._on_end()


def _as_error(failed: Failed) -> Refused | Unreachable:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, Refused | Unreachable):
        return kind(failed.reason)
    return ProtocolRefused(failed.reason)
