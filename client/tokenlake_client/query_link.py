"""One connection to a query engine, used by several threads (`tokenlake_client.shared_socket`)."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Hashable

import msgspec

from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.wire import query as wire
from tokenlake.wire.frames import pack_frame
from tokenlake.wire.query import Answered, QueryReply, Refused, Viewed, query_reply_decoder
from tokenlake_client.shared_socket import Awaited, SharedSocket

log = logging.getLogger(__name__)

MAX_FRAME = 1 << 20
"""Limit of the bytes of a reply from the query engine; the longest field of a reply has one byte per segment of a
view."""
UNSENT_BYTES = wire.MAX_FRAME
"""The connection ends with a message that is sent while more bytes than this wait because the query engine does not
read."""


class Expected(Awaited[QueryReply]):
    """A request to the query engine whose answer is awaited. `reply` is None until the answer arrives, which may be
    late or never."""

    __slots__ = ("given_up",)

    def __init__(self) -> None:
        super().__init__()
        self.given_up = False
        """True: no caller waits for the answer any more."""


class QueryLink(SharedSocket[QueryReply, Expected]):
    """A connection to the query engine of this node. Thread-safe. `send` raises `Unreachable` once the connection has
    ended; `wait` never raises."""

    def __init__(self, sock: socket.socket) -> None:
        """Makes the connection from `sock`, which is connected to the query engine; the object owns it from now on."""
        peer = "the query engine"
        super().__init__(sock, peer, query_reply_decoder, max_reply=MAX_FRAME, unsent_bytes=UNSENT_BYTES)
        self.late_views: deque[int] = deque()
        """The numbers of views that the query engine opened after their caller had given up."""

    def __del__(self) -> None:
        self._sock.close()

    @property
    def alive(self) -> bool:
        """True while the connection to the query engine exists, as far as is known; always False in a forked
        process."""
        return not self.broken and not self.forked

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
        if self.alive and not self._send(pack_frame(message), descriptor):
            if descriptor is not None:
                raise DeadlinePassed("the query engine has not read earlier requests")
            self._break(Unreachable(f"the query engine does not read: more than {UNSENT_BYTES} bytes wait to be sent"))
        if not self.alive:
            raise Unreachable(f"the connection to the query engine ended: {self._broken or 'this process was forked'}")

    def wait(self, expected: Expected, deadline_s: float) -> QueryReply | None:
        """Wait for the answer and return it; None when the deadline passed or the connection ended. A late answer still
        sets `expected.reply`."""
        if self.alive and not self._await(expected, deadline_s):
            with self._changed:
                if not expected.done:
                    expected.given_up = True
                    self._liveness.deadline_missed()
        return expected.reply

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


def _key_of(reply: QueryReply) -> Hashable:
    if isinstance(reply, Viewed | Refused):
        return "view", reply.view
    assert isinstance(reply, Answered)
    return reply.buffer, reply.step, reply.layer, reply.attempt
