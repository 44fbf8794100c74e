"""Requests and replies over one socket to the daemon: blocking calls from several threads
(`tokenlake_client.shared_socket`).

The late reply to a call that missed its deadline may still grant a lease or a write, which no caller holds: `orphans`
keeps such replies until `tokenlake_client.grants` has given back the lease or the write.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tokenlake.errors import DeadlinePassed, LimitReached, TokenLakeError, Unreachable
from tokenlake.trace import NO_TRACE
from tokenlake.wire import HEADER_BYTES, pack_frame
from tokenlake.wire.engine import (
    EngineReply,
    EngineRequest,
    Failed,
    QueryOpened,
    Region,
    Traced,
    Welcome,
    reply_decoder,
)
from tokenlake_client.refusals import error_of
from tokenlake_client.shared_socket import Awaited, SharedSocket

MAX_FRAME = 16 << 20
"""Limit of the bytes of a reply from the daemon. The daemon's limit for requests is in its `Welcome`."""
UNSENT_BYTES = 4 << 20
"""While more bytes than this wait until the daemon reads its socket, further messages are refused. The matches of a
scheduler for 100 long prompts fit (32 KiB each)."""


class Pending(Awaited[EngineReply]):
    """A request to the daemon whose reply is awaited. Callers read the reply through `Channel.wait` and
    `Channel.poll`."""

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        super().__init__()
        self.descriptor: int | None = None
        """The file descriptor that came beside the reply (of the types `Region`, `QueryOpened` and `Welcome`); the
        caller that waits for the reply owns it."""


class Channel(SharedSocket[EngineReply, Pending]):
    """Requests and replies over one connection to the daemon. Thread-safe. All calls raise `Unreachable` once the
    connection is broken."""

    def __init__(self, sock: socket.socket, path: Path, on_end: Callable[[], None]) -> None:
        """Takes over `sock`, which is connected to the daemon that listens at `path`. `on_end` is called once the
        connection is broken, from the thread that notices it."""
        peer = f"the daemon at {path}"
        super().__init__(sock, peer, reply_decoder, max_reply=MAX_FRAME, unsent_bytes=UNSENT_BYTES)
        self.path = path
        self._on_end = on_end
        self._ids = itertools.count(1)
        self.max_frame = MAX_FRAME
        """Limit of the bytes of a request to the daemon. The owner of the channel sets it to the limit in the daemon's
        `Welcome`."""
        self.orphans: deque[EngineReply] = deque()
        """Replies of the daemon that arrived after their caller gave up."""
        self.timeouts = 0
        """The number of calls to the daemon that missed their deadline."""
        self.refused_messages = 0
        """The number of messages that were not sent because the daemon had not read `UNSENT_BYTES` of earlier ones."""

    def call(self, make: Callable[[int], EngineRequest], deadline_s: float) -> EngineReply:
        """Send the request `make(id)`, where the channel chooses the id, and wait for its reply. Raises
        `DeadlinePassed`, `Unreachable` and the refusal of the daemon."""
        pending = self.begin(make)
        return self.wait(pending, deadline_s)

    def begin(self, make: Callable[[int], EngineRequest], trace: bytes = NO_TRACE) -> Pending:
        """Send the request `make(id)`, as `call` does, without waiting: `wait` or `poll` return its reply. Never waits.
        `trace`: the context of the trace to which a match belongs. Raises `DeadlinePassed` while the daemon does not
        read."""
        self.check()
        return self._begin(make, trace)

    def probe(self, make: Callable[[int], EngineRequest], wait_s: float) -> None:
        """Send a request although the daemon is overdue, and wait at most `wait_s` for its reply. With any
        reply the daemon counts as overdue no longer; the outstanding reply may never come
        (test_an_answer_that_never_comes_ends_no_service). Raises `Unreachable`."""
        try:
            pending = self._begin(make)
        except DeadlinePassed:
            # No further byte can wait to be sent: send those that do, if the daemon reads again.
            self._read_arriving(wait_s)
            return
        if self.poll(pending, wait_s) is None:
            self.drop(pending)

    def tell(self, message: EngineRequest) -> None:
        """Send the daemon a message that has no reply. Never waits. Raises `DeadlinePassed` while the daemon does not
        read; the message is not sent then."""
        self.check()
        self._request(message)

    def tell_last(self, message: EngineRequest) -> bool:
        """Send the daemon a message without a reply behind which nothing is sent, also while the daemon is overdue.
        Never waits. Returns False, and has sent nothing, while it does not read; bytes that wait (`unsent`) are sent by
        `flush`. Raises `Unreachable`."""
        try:
            self._request(message)
        except DeadlinePassed:
            return False
        return True

    def wait(self, pending: Pending, deadline_s: float) -> EngineReply:
        """Wait for the reply and return it. Raises `DeadlinePassed` after `deadline_s`, and the errors of `call`; a
        reply that arrives later becomes an orphan."""
        if not self._await(pending, deadline_s):
            self._give_up(pending, deadline_s)
        return self._result(pending)

    def poll(self, pending: Pending, wait_s: float = 0.0) -> EngineReply | None:
        """The daemon's reply if it arrives within `wait_s` seconds, else None."""
        return self._result(pending) if self._await(pending, wait_s) else None

    def drop(self, pending: Pending) -> int:
        """Give up the request `pending`: its reply becomes an orphan (a reply that no caller waits for), also when it
        has arrived already. Returns the id of the reply; 0 if none will come."""
        dropped = 0
        with self._changed:
            for number in [number for number, other in self._waiting.items() if other is pending]:
                del self._waiting[number]
                assert isinstance(number, int)
                dropped = number
            if pending.reply is not None:
                dropped = pending.reply.id
                self.orphans.append(pending.reply)
        return dropped

    # -- inside

    def _begin(self, make: Callable[[int], EngineRequest], trace: bytes = NO_TRACE) -> Pending:
        pending = Pending()
        number = next(self._ids)
        if trace:
            self._request(Traced(number, trace))
        with self._changed:
            self._waiting[number] = pending
        self._request(make(number), pending)
        return pending

    def _request(self, message: EngineRequest, pending: Pending | None = None) -> None:
        frame = pack_frame(message)
        if len(frame) - HEADER_BYTES > self.max_frame:
            if pending is not None:
                self.drop(pending)
            raise LimitReached(
                f"a request of {len(frame) - HEADER_BYTES} bytes; the daemon's 'max_frame' is {self.max_frame}"
            )
        if not self._send(frame):
            self.refused_messages += 1
            if pending is not None:
                self.drop(pending)
            raise DeadlinePassed(f"the daemon at {self.path} has not read the last {UNSENT_BYTES} bytes")
        if self._broken is not None and pending is None:
            raise Unreachable(str(self._broken))

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
        super()._break(error)
        self._on_end()
