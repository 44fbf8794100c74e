"""Bytes over the bulk connection, behind the answer: a blocking socket, plain or encrypted, on both sides."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from tokenlake_server.bulk.blocking_sockets import ended, limit_wait
from tokenlake_server.bulk.stream import ROOM_BYTES, is_length
from tokenlake_server.bulk.transport import Incoming, Outgoing
from tokenlake_server.engines.arena import Arena

PROGRESS_BYTES = 64 << 10
"""Bytes, or the rest of a piece, that count as progress. A path that passes fewer, for instance only small packets,
counts as one that passes none."""
ZEROS = memoryview(bytes(1 << 20))
"""Bytes that answer probes."""
MAX_IOVEC = 64


class Tcp:
    """The transport that all nodes have; see `Transport`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rooms: list[bytearray] = []
        """Buffers for encrypted bytes that no thread uses now."""

    @contextlib.contextmanager
    def receive(self, incoming: Incoming) -> Iterator[_Inflow]:
        """See `Transport`."""
        yield _Inflow(incoming)

    def send(self, outgoing: Outgoing) -> None:
        """See `Transport`."""
        size = outgoing.answer.slot_bytes
        if outgoing.answer.codes:
            views = self._arena.slots(outgoing.slots, size)
        else:
            step = len(ZEROS)
            views = [ZEROS[: min(step, size - at)] for at in range(0, size, step)]
        room = self._rooms.pop() if self._rooms else bytearray(ROOM_BYTES)
        sock = outgoing.stream.sock
        try:
            for buffers in outgoing.stream.outgoing(outgoing.answer, views, room):
                while buffers:
                    if time.monotonic() > outgoing.until:
                        raise TimeoutError(f"the receiver has not taken all bytes after {outgoing.limit_s:.0f} s")
                    sent = sock.sendmsg(buffers[:MAX_IOVEC])
                    while buffers and sent >= len(buffers[0]):
                        sent -= len(buffers.pop(0))
                    if sent:
                        buffers[0] = buffers[0][sent:]
        finally:
            self._rooms.append(room)


class _Inflow:
    """The bytes of segments that come to a connection, behind the header of a reply; see `Inflow`."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self._sock = incoming.stream.sock
        self._until = incoming.until
        self._since = 0
        """Bytes that came since the last progress."""
        self._begun = False
        """True after the first progress."""
        self._sock.settimeout(None)
        limit_wait(self._sock, "SO_RCVTIMEO", self._until - time.monotonic())

    def fill(self, target: memoryview) -> None:
        """See `Inflow`; `ProtocolRefused` is raised for an encrypted record that is not the next one."""
        self._incoming.stream.fill(target, self._receive, self._incoming.buffer)

    def taken(self, count: int) -> None:
        """The sender does not wait for it."""

    def _receive(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            try:
                received = self._sock.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                # The kernel's timeout has passed without a byte.
                received = -1
            if not received:
                raise ended()
            filled += max(0, received)
            self._since += max(0, received)
            if self._since >= PROGRESS_BYTES or (filled == len(target) and not is_length(target)):
                self._progress()
            elif time.monotonic() >= self._until:
                raise TimeoutError("the node did not send in time")

    def _progress(self) -> None:
        self._since = 0
        self._until = time.monotonic() + self._incoming.stall_s
        if not self._begun:
            self._begun = True
            self._incoming.began()
            limit_wait(self._sock, "SO_RCVTIMEO", self._incoming.stall_s)
