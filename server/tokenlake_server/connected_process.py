"""Who is at the other end of a local connection, and is it still alive?

A closed socket does not mean that the process is gone: it may still look at the arena. Nor does an open one mean
that it lives: a forked child keeps the socket of its dead parent. The pidfd tells.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import NamedTuple

__all__ = ["Credentials", "PeerProcess", "credentials"]

SO_PEERPIDFD = 77
"""Linux 6.5; not named by Python 3.11. Unlike the pid of SO_PEERCRED it works across PID namespaces."""
_CREDENTIALS = struct.Struct("3i")


class Credentials(NamedTuple):
    """Of a process: the one that connected, or that called listen on the socket that was connected to."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Credentials:
    """Of the process at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


class PeerProcess:
    """The process that opened a connection. Owns a pidfd until `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid, self.uid, self.gid = credentials(sock)
        self.pidfd = _pidfd(sock, self.pid)

    @property
    def dead(self) -> bool:
        """It can touch nothing any more. Without a pidfd nobody can tell, so it counts as alive."""
        if self.pidfd is None:
            return False
        # select would take no descriptor beyond 1023.
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Give the pidfd back."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None
