"""Requests and replies over one socket to the daemon: blocking calls from several threads.

There is no reader thread: of the callers that wait, one reads the socket and delivers the other callers' replies too
(leader and followers), so that a call costs two system calls and no wake-up of another thread.

Sends never block: bytes that the socket does not take are kept, up to a limit, and sent by later calls and by the
callers that wait.

A call that misses its deadline makes the daemon overdue (`tokenlake.liveness`): further calls fail at once until the
daemon sends something. The late reply may still grant a lease or a write, which no caller holds: `orphans` keeps such
replies until `tokenlake_client.grants` has given back the lease or the write.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tokenlake.errors import DeadlinePassed, LimitReached, Refused, TokenLakeError, Unreachable
from tokenlake.liveness import Liveness
from tokenlake.wire import HEADER_BYTES, FrameDecoder, pack_frame
from tokenlake.wire.engine import EngineReply, EngineRequest, Failed, QueryOpened, Region, Welcome, reply_decoder
from tokenlake.wire.frames import decode
from tokenlake_client.arguments import poll_ms
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.descriptors import SPACE, ReceivedDescriptors
from tokenlake_client.refusals import error_of

__all__ = ["Channel", "Pending"]

READ_BYTES = 64 << 10
"""Bytes that one read of the socket may return. From 128 KiB on Python would map and unmap memory for each read, which
costs more than the read."""
MAX_FRAME = 16 << 20
"""Limit of the bytes of a reply from the daemon. The daemon's limit for requests is in its `Welcome`."""
UNSENT_BYTES = 4 << 20
"""While more bytes than this wait until the daemon reads its socket, further messages are refused. The matches of a
scheduler for 100 long prompts fit (32 KiB each)."""


class Pending:
    """A request to the daemon whose reply is awaited. Callers read the reply through `Channel.wait` and
    `Channel.poll`."""

    __slots__ = ("descriptor", "error", "reply")

    def __init__(self) -> None:
        self.reply: EngineReply | None = None
        self.error: TokenLakeError | None = None
        self.descriptor: int | None = None
        """The file descriptor that came beside the reply (of the types `Region`, `QueryOpened` and `Welcome`); the
        caller that waits for the reply owns it."""

    @property
    def done(self) -> bool:
        """True once the reply to this request has arrived, or will never arrive because the connection ended."""
        return self.reply is not None or self.error is not None


class Channel:
    """Requests and replies over one connection to the daemon. Thread-safe. All calls raise `Unreachable` once the
    connection is broken."""

    def __init__(
        self,
        sock: socket.socket,
        path: Path,
        on_end: Callable[[], None],
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> None:
        """Takes over `sock`, which is connected to the daemon that listens at `path`. `on_end` is called once the
        connection is broken, from the thread that notices it."""
        self.path = path
        self._sock = sock
        self._sock.setblocking(False)
        self._wakeup_s = deadlines.wakeup_s
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._waiting: dict[int, Pending] = {}
        self._descriptors = ReceivedDescriptors()
        self._changed = threading.Condition()
        self._reading = False
        self._sending = threading.Lock()
        """Guards `_unsent`, and is held while the socket is written or closed."""
        self._unsent = bytearray()
        self._broken: TokenLakeError | None = None
        self._process = os.getpid()
        self._liveness = Liveness()
        self.max_frame = MAX_FRAME
        """Limit of the bytes of a request to the daemon. The owner of the channel sets it to the limit in the daemon's
        `Welcome`."""
        self.orphans: deque[EngineReply] = deque()
        """Replies of the daemon that arrived after their caller gave up."""
        self.timeouts = 0
        """The number of calls to the daemon that missed their deadline."""
        self.refused_messages = 0
        """The number of messages that were not sent because the daemon had not read `UNSENT_BYTES` of earlier ones."""

    @property
    def broken(self) -> bool:
        """True once the connection to the daemon has ended: no call can succeed any more."""
        return self._broken is not None

    def fileno(self) -> int:
        """The number of the socket's descriptor, for callers that poll for its end; -1 once it is closed."""
        return self._sock.fileno()

    @property
    def overdue(self) -> bool:
        """True when a caller's deadline has passed and the daemon has sent nothing since."""
        return self._liveness.overdue

    def call(self, make: Callable[[int], EngineRequest], deadline_s: float) -> EngineReply:
        """Send the request `make(id)`, where the channel chooses the id, and wait for its reply. Raises
        `DeadlinePassed`, `Unreachable` and the refusal of the daemon."""
        pending = self.begin(make)
        return self.wait(pending, deadline_s)

    def begin(self, make: Callable[[int], EngineRequest]) -> Pending:
        """Send the request `make(id)`, as `call` does, without waiting: `wait` or `poll` return its reply. Never waits.
        Raises `DeadlinePassed` while the daemon does not read."""
        self._check()
        return self._begin(make)

    def probe(self, make: Callable[[int], EngineRequest], wait_s: float) -> None:
        """Send a request although the daemon is overdue, and wait at most `wait_s` for its reply. With any
        reply the daemon counts as overdue no longer; the outstanding reply may never come
        (test_an_answer_that_never_comes_ends_no_service). Raises `Unreachable`."""
        try:
            pending = self._begin(make)
        except DeadlinePassed:
            # No further byte can wait to be sent: send those that do, if the daemon reads again.
            if self._start_reading(None, wait_s):
                self._read_until(None, time.monotonic() + wait_s)
            return
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
        """Send the daemon a message that has no reply. Never waits. Raises `DeadlinePassed` while the daemon does not
        read; the message is not sent then."""
        self._check()
        self._send(message)

    @property
    def unsent(self) -> bool:
        """True while bytes of earlier messages wait until the daemon reads; `flush` sends them then."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send the bytes that wait, as far as the socket takes them. Never waits, never raises."""
        with self._sending:
            error = self._send_unsent()
        if error is not None:
            self._send_failed(error)

    def wait(self, pending: Pending, deadline_s: float) -> EngineReply:
        """Wait for the reply and return it. Raises `DeadlinePassed` after `deadline_s`, and the errors of `call`; a
        reply that arrives later becomes an orphan."""
        if not self._await(pending, deadline_s):
            self._give_up(pending, deadline_s)
        return self._result(pending)

    def poll(self, pending: Pending, wait_s: float = 0.0) -> EngineReply | None:
        """The daemon's reply if it arrives within `wait_s` seconds, else None."""
        return self._result(pending) if self._await(pending, wait_s) else None

    def drop(self, pending: Pending) -> None:
        """Give up the request `pending`: its reply becomes an orphan (a reply that no caller waits for), also when it
        has arrived already."""
        with self._changed:
            for number in [number for number, other in self._waiting.items() if other is pending]:
                del self._waiting[number]
            if pending.reply is not None:
                self.orphans.append(pending.reply)

    def close(self) -> None:
        """Close the connection. Idempotent. Calls that wait in other threads raise `Unreachable`."""
        self._break(Unreachable(f"the connection to {self.path} was closed"))

    # -- inside

    def _check(self) -> None:
        if self._process != os.getpid():
            raise Unreachable("a forked process must connect on its own: the connection is its parent's")
        if self._broken is None and self._liveness.overdue and self._start_reading(None, 0.0):
            self._read_until(None, 0.0)
        if self._broken is not None:
            raise Unreachable(str(self._broken))
        if self._liveness.overdue:
            raise DeadlinePassed(f"the daemon at {self.path} still owes the answer to an earlier call")

    def _send(self, message: EngineRequest, pending: Pending | None = None) -> None:
        frame = pack_frame(message)
        if len(frame) - HEADER_BYTES > self.max_frame:
            if pending is not None:
                self.drop(pending)
            raise LimitReached(
                f"a request of {len(frame) - HEADER_BYTES} bytes; the daemon's 'max_frame' is {self.max_frame}"
            )
        error = None
        with self._sending:
            if len(self._unsent) > UNSENT_BYTES:
                error = self._send_unsent()
            accepted = len(self._unsent) <= UNSENT_BYTES
            if accepted and error is None:
                self._unsent += frame
                error = self._send_unsent()
        if error is not None:
            self._send_failed(error)
        elif not accepted:
            self.refused_messages += 1
            if pending is not None:
                self.drop(pending)
            raise DeadlinePassed(f"the daemon at {self.path} has not read the last {UNSENT_BYTES} bytes")
        if self._broken is not None and pending is None:
            raise Unreachable(str(self._broken))

    def _send_unsent(self) -> OSError | None:
        """Send bytes of `_unsent` as far as the socket takes them. The caller holds `_sending`. Returns the error of
        the socket."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            return error
        return None

    def _send_failed(self, error: OSError) -> None:
        # Read the replies that have arrived before the connection ends: a daemon that closes it sends the reason first.
        if self._start_reading(None, 0.0):
            self._read_until(None, 0.0)
        # The daemon could not find the next frame in the stream, in which a part of this one may be missing.
        self._break(Unreachable(f"the connection to the daemon at {self.path} broke: {error}"))

    def _await(self, pending: Pending, wait_s: float) -> bool:
        """Wait at most `wait_s` until `pending` is done, and return whether it is. Replies that have arrived are read
        even when `wait_s` is 0."""
        until = time.monotonic() + wait_s
        while not pending.done:
            left = max(0.0, until - time.monotonic())
            if self._start_reading(pending, left):
                self._read_until(pending, until)
            elif not left and wait_s and self._broken is None and self._ready(0.0) & ~select.POLLOUT:
                # Data has arrived that the reading thread has not read, because the whole process stood still: wait a
                # little longer for that thread.
                with self._changed:
                    self._changed.wait_for(lambda: pending.done or not self._reading, self._wakeup_s)
                wait_s = 0.0
                continue
            if not left:
                break
        return pending.done

    def _start_reading(self, pending: Pending | None, wait_s: float) -> bool:
        """Make the calling thread the one that reads, and return True. False: `pending` is done, or another thread
        reads; in the latter case the call has waited at most `wait_s` for a change."""
        with self._changed:
            if pending is not None and pending.done:
                return False
            if self._reading:
                if wait_s:
                    self._changed.wait(wait_s)
                return False
            self._reading = True
            return True

    def _read_until(self, pending: Pending | None, until: float) -> None:
        """Read and deliver replies until `pending` is done or the time `until` has come. `pending` None: until `until`,
        all that arrive."""
        try:
            while self._broken is None and not (pending is not None and pending.done):
                ready = self._ready(max(0.0, until - time.monotonic()))
                if not ready:
                    return
                if ready & select.POLLOUT:
                    self.flush()
                if ready & ~select.POLLOUT:
                    self._read()
        except Refused as error:
            self._break(error)
        except (OSError, TokenLakeError, ValueError) as error:
            self._break(Unreachable(f"the connection to the daemon at {self.path} broke: {error}"))
        finally:
            with self._changed:
                self._reading = False
                if self._broken is not None:
                    # The reading thread closes the socket. If the thread that broke the connection closed it, the
                    # reader could poll a descriptor that now belongs to another file
                    # (test_a_broken_connection_is_closed_by_its_reader).
                    self._close_socket()
                self._changed.notify_all()

    def _ready(self, wait_s: float) -> int:
        """Wait at most `wait_s` until the socket can be read, or written where bytes are unsent. Returns poll's events;
        0: none, or the socket is closed."""
        # poll and not select, which takes no descriptor beyond 1023; engines have more.
        poller = select.poll()
        try:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        except ValueError:
            return 0
        events = poller.poll(poll_ms(wait_s))
        return events[0][1] if events else 0

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        if ancillary:
            self._descriptors.add(ancillary)
        if not data:
            raise Unreachable("the daemon closed it")
        replies = [decode(reply_decoder, body) for body in self._decoder.feed(data)]
        with self._changed:
            self._liveness.heard(time.monotonic())
            for reply in replies:
                self._deliver(reply)
            self._changed.notify_all()

    def _deliver(self, reply: EngineReply) -> None:
        carries = reply.lock if isinstance(reply, Welcome) else isinstance(reply, Region | QueryOpened)
        descriptor = self._descriptors.take() if carries and self._descriptors else None
        pending = self._waiting.pop(reply.id, None)
        if isinstance(reply, Failed) and not reply.id:
            # An error of the daemon without the id of a request refuses the connection itself; the daemon closes the
            # connection afterwards.
            raise error_of(reply.kind, reply.reason)
        if pending is None:
            if descriptor is not None:
                os.close(descriptor)
            self.orphans.append(reply)
        elif isinstance(reply, Failed):
            pending.error = error_of(reply.kind, reply.reason)
        else:
            pending.descriptor = descriptor
            pending.reply = reply

    def _give_up(self, pending: Pending, deadline_s: float) -> None:
        with self._changed:
            if pending.done:
                # The reply arrived between the caller's last check and this one, so the caller gets the reply, and the
                # deadline does not count as missed.
                return
            self.drop(pending)
            self._liveness.deadline_missed()
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
                    # A forked child must not shut the socket down: that would end the connection of its parent.
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
                if not self._reading:
                    self._close_socket()
                self._descriptors.close()
            for pending in self._waiting.values():
                # A copy for each caller: the traceback of an exception refers to the frames through which it passed,
                # and so to their arrays.
                pending.error = copy.copy(self._broken)
            self._waiting.clear()
            self._changed.notify_all()
        self._on_end()

    def _close_socket(self) -> None:
        # A thread that is about to write must not find another file under the descriptor's number.
        with self._sending:
            self._sock.close()
            self._unsent.clear()
