"""A connection that several threads use, without a thread of its own.

Of the callers that wait, one reads the socket and delivers the other callers' replies too (leader and followers), so
that a call costs two system calls and no wake-up of another thread.

Sends never block: bytes that the socket does not take are kept, up to a limit, and sent by later calls and by the
callers that wait.

A call that misses its deadline makes the other side overdue (`tokenlake.wire.liveness`): further calls fail at once
until it sends something.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import msgspec

from tokenlake.errors import DeadlinePassed, Refused, TokenLakeError, Unreachable
from tokenlake.wire.frames import FrameDecoder, decode
from tokenlake.wire.liveness import Liveness
from tokenlake_client.arguments import poll_ms
from tokenlake_client.descriptors import SPACE, ReceivedDescriptors

READ_BYTES = 64 << 10
"""Bytes that one read of the socket may return. From 128 KiB on Python would map and unmap memory for each read, which
costs more than the read."""
WAKEUP_S = 0.1
"""Seconds that a caller waits beyond its deadline for a reply that lies in the socket and that another thread is about
to read: the threads of a busy process are scheduled late."""

Reply = TypeVar("Reply")


class Awaited(Generic[Reply]):
    """A request whose reply is awaited."""

    __slots__ = ("error", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.error: TokenLakeError | None = None

    @property
    def done(self) -> bool:
        """True once the reply has arrived, or will never arrive because the connection ended."""
        return self.reply is not None or self.error is not None


Request = TypeVar("Request", bound=Awaited[Any])


class SharedSocket(ABC, Generic[Reply, Request]):
    """What the connections to the daemon (`channel`) and to the query engine (`query_link`) have in common. A subclass
    finds the request that a reply answers. Thread-safe."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        decoder: msgspec.msgpack.Decoder[Reply],
        *,
        max_reply: int,
        unsent_bytes: int,
    ) -> None:
        """Takes over `sock`, which is connected. `peer` names the other side in errors. `max_reply`: the limit of the
        bytes of a reply. While more than `unsent_bytes` wait to be sent, further messages are refused."""
        self._sock = sock
        self._sock.setblocking(False)
        self._peer = peer
        self._replies = decoder
        self._frames = FrameDecoder(max_reply)
        self._unsent_bytes = unsent_bytes
        self._waiting: dict[Hashable, Request] = {}
        self._descriptors = ReceivedDescriptors()
        self._changed = threading.Condition()
        """Guards `_waiting` and the requests in it, `_reading`, `_broken` and `_liveness`."""
        self._reading = False
        self._sending = threading.Lock()
        """Guards `_unsent`, and is held while the socket is written or closed."""
        self._unsent = bytearray()
        self._broken: TokenLakeError | None = None
        self._process = os.getpid()
        self._liveness = Liveness()

    @abstractmethod
    def _deliver(self, reply: Reply) -> None:
        """Give a reply to the request in `_waiting` that it answers. Called by the thread that reads, which holds
        `_changed`. An error that it raises ends the connection."""

    @property
    def broken(self) -> bool:
        """True once the connection has ended: no call can succeed any more."""
        return self._broken is not None

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the one that has the connection."""
        return self._process != os.getpid()

    @property
    def overdue(self) -> bool:
        """True when a caller's deadline has passed and the other side has sent nothing since."""
        return self._liveness.overdue

    @property
    def unsent(self) -> bool:
        """True while bytes of earlier messages wait until the other side reads; `flush` sends them then."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The number of the socket's descriptor, for callers that poll for its end; -1 once it is closed."""
        return self._sock.fileno()

    def check(self) -> None:
        """Raises `Unreachable` when the connection has ended, and in a forked process; `DeadlinePassed` while the other
        side is overdue."""
        if self.forked:
            raise Unreachable("a forked process must connect on its own: the connection is its parent's")
        if self._broken is None and self._liveness.overdue:
            self._read_arriving(0.0)
        if self._broken is not None:
            raise Unreachable(str(self._broken))
        if self._liveness.overdue:
            raise DeadlinePassed(f"{self._peer} still owes the answer to an earlier call")

    def flush(self) -> None:
        """Send the bytes that wait, as far as the socket takes them. Never waits, never raises."""
        error = None
        with self._sending:
            try:
                self._send_unsent()
            except OSError as broken:
                error = broken
        if error is not None:
            self._send_failed(error)

    def close(self) -> None:
        """Close the connection. Idempotent. Calls that wait in other threads end."""
        self._break(Unreachable(f"the connection to {self._peer} was closed"))

    # -- for the subclasses

    def _send(self, frame: bytes, descriptor: int | None = None) -> bool:
        """Send one frame and beside it `descriptor`, which the caller continues to own. Never waits. Returns False, and
        has sent nothing, while more than the limit of earlier bytes wait; with a `descriptor`, while any wait. A socket
        that fails ends the connection: a part of the frame may be missing in the stream, in which the other side could
        not find the next one."""
        limit = self._unsent_bytes if descriptor is None else 0
        error = None
        with self._sending:
            try:
                if len(self._unsent) > limit:
                    self._send_unsent()
                accepted = len(self._unsent) <= limit
                if accepted and descriptor is not None:
                    # A descriptor belongs to the bytes that are sent with it.
                    sent = self._send_with(frame, descriptor)
                    accepted, frame = sent > 0, frame[sent:]
                if accepted:
                    self._unsent += frame
                    self._send_unsent()
            except OSError as broken:
                accepted, error = True, broken
        if error is not None:
            self._send_failed(error)
        return accepted

    def _await(self, request: Request, wait_s: float) -> bool:
        """Wait at most `wait_s` until `request` is done, and return whether it is. Replies that have arrived are read
        even when `wait_s` is 0."""
        until = time.monotonic() + wait_s
        while not request.done:
            left = max(0.0, until - time.monotonic())
            if self._start_reading(request, left):
                self._read_until(request, until)
            elif not left and wait_s and self._broken is None and self._ready(0.0) & ~select.POLLOUT:
                # Data has arrived that the reading thread has not read, because the whole process stood still: wait a
                # little longer for that thread.
                with self._changed:
                    self._changed.wait_for(lambda: request.done or not self._reading, WAKEUP_S)
                wait_s = 0.0
                continue
            if not left:
                break
        return request.done

    def _read_arriving(self, wait_s: float) -> None:
        """Read and deliver all replies that arrive within `wait_s` seconds, unless another thread reads: it is waited
        for, for as long."""
        if self._start_reading(None, wait_s):
            self._read_until(None, time.monotonic() + wait_s)

    def _break(self, error: TokenLakeError) -> None:
        """End the connection, for this reason unless there is an earlier one, and with it all requests that wait."""
        with self._changed:
            if self._broken is None:
                self._broken = error
                if not self.forked:
                    # A forked child must not shut the socket down: that would end the connection of its parent.
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
                if not self._reading:
                    self._close_socket()
                self._descriptors.close()
            for request in self._waiting.values():
                # A copy for each caller: the traceback of an exception refers to the frames through which it passed,
                # and so to their arrays.
                request.error = copy.copy(self._broken)
            self._waiting.clear()
            self._changed.notify_all()

    # -- inside

    def _send_unsent(self) -> None:
        """Send bytes of `_unsent` as far as the socket takes them. The caller holds `_sending`. Raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass

    def _send_with(self, frame: bytes, descriptor: int) -> int:
        try:
            return socket.send_fds(self._sock, [frame], [descriptor])
        except BlockingIOError:
            return 0

    def _send_failed(self, error: OSError) -> None:
        # Read the replies that have arrived before the connection ends: a daemon that closes it sends the reason first.
        self._read_arriving(0.0)
        self._break(Unreachable(f"the connection to {self._peer} broke: {error}"))

    def _start_reading(self, request: Request | None, wait_s: float) -> bool:
        """Make the calling thread the one that reads, and return True. False: `request` is done, or another thread
        reads; in the latter case the call has waited at most `wait_s` for a change."""
        with self._changed:
            if request is not None and request.done:
                return False
            if self._reading:
                if wait_s:
                    self._changed.wait(wait_s)
                return False
            self._reading = True
            return True

    def _read_until(self, request: Request | None, until: float) -> None:
        """Read and deliver replies until `request` is done or the time `until` has come. `request` None: until `until`,
        all that arrive."""
        try:
            while self._broken is None and not (request is not None and request.done):
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
            self._break(Unreachable(f"the connection to {self._peer} broke: {error}"))
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
            raise Unreachable("the other side closed it")
        replies = [decode(self._replies, body) for body in self._frames.feed(data)]
        with self._changed:
            self._liveness.heard(time.monotonic())
            for reply in replies:
                self._deliver(reply)
            self._changed.notify_all()

    def _close_socket(self) -> None:
        # A thread that is about to write must not find another file under the descriptor's number.
        with self._sending:
            self._sock.close()
            self._unsent.clear()
