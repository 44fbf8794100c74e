"""File descriptors that arrive beside the bytes of a Unix socket."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterable

from tokenlake.errors import ProtocolRefused

MAX_DESCRIPTORS = 8
"""Limit of the descriptors that were received on one connection and not taken yet."""
SPACE = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
"""The size in bytes of the buffer for ancillary data that callers pass to `recvmsg`. They also pass the flag
MSG_CMSG_CLOEXEC, which `socket.recv_fds` does not set."""


class ReceivedDescriptors:
    """A queue of received file descriptors, in the order in which they arrived. The queue owns each descriptor until it
    is taken."""

    def __init__(self) -> None:
        self._descriptors: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._descriptors)

    def add(self, ancillary: Iterable[tuple[int, int, bytes]]) -> None:
        """Put the file descriptors in ancillary data of `recvmsg` into the queue, which then owns them. Raises
        ProtocolRefused beyond `MAX_DESCRIPTORS`."""
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors.extend(received)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolRefused(
                f"{len(self._descriptors)} descriptors that belong to no frame; at most {MAX_DESCRIPTORS} may wait"
            )

    def take(self) -> int:
        """Remove the oldest file descriptor of the queue and return it; the caller owns it then. Raises ProtocolRefused
        where the queue is empty."""
        if not self._descriptors:
            raise ProtocolRefused("a frame arrived without the descriptor that belongs to it")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the file descriptors that were not taken from the queue. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
