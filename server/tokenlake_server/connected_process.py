"""The process at the other end of a local connection: its identity, and whether it is alive.

The state of the socket does not tell whether the process is alive. A process may close its socket and still map the
arena, and a forked child keeps the socket of its dead parent open. The pidfd becomes readable when the process ends.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

__all__ = ["Credentials", "ConnectedProcess", "credentials"]

SO_PEERPIDFD = 77
"""The socket option that gives a pidfd of the process at the other end, since Linux 6.5; Python 3.11 has no name for
it. Unlike the pid of SO_PEERCRED it works across PID namespaces."""
_CREDENTIALS = struct.Struct("3i")


class Credentials(NamedTuple):
    """The pid, user id and group id of the process that called connect (as the listening side sees them) or listen (as
    the connecting side sees them), at the time of that call."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Credentials:
    """The pid, user id and group id of the process at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


class ConnectedProcess:
    """The process that opened a local connection. This object owns a pidfd of the process until `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid, self.uid, _ = credentials(sock)
        self.pidfd = _pidfd(sock, self.pid)

    def close(self) -> None:
        """Close the pidfd."""
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
