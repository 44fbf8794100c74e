"""The process at the other end of a local connection: its identity, and whether it is alive.

The state of the socket does not tell whether the process is alive. A process may close its socket and still map the
arena, and a forked child keeps the socket of its dead parent open. The pidfd becomes readable when the process ends.

Where the daemon gets no pidfd (before Linux 6.5, for a process of another PID namespace), and where its memory outlives
the daemon, the process locks a file of the daemon before it maps anything; the next daemon gets the file, and learns
from the lock that the process lives. The lock is a POSIX record lock: it ends with the process, works across PID
namespaces, and is not inherited by forked children. The kernel does not report the end of a lock, so the daemon checks
it every `LOCK_S`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import NamedTuple

SO_PEERPIDFD = 77
"""The socket option that gives a pidfd of the process at the other end, since Linux 6.5; Python 3.11 has no name for
it. Unlike the pid of SO_PEERCRED it works across PID namespaces."""
LOCK_S = 1.0
"""Seconds between two checks of the lock of a process without a pidfd."""
_CREDENTIALS = struct.Struct("3i")
_FLOCK = struct.Struct("hhqqi0q")
"""l_type, l_whence, l_start, l_len, l_pid."""


class Credentials(NamedTuple):
    """The pid and user id of the process that called connect (as the listening side sees them) or listen (as the
    connecting side sees them), at the time of that call."""

    pid: int
    uid: int


def credentials(sock: socket.socket) -> Credentials:
    """The pid and user id of the process at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Credentials(pid, uid)


class ConnectedProcess:
    """The process that opened a local connection. This object owns a pidfd of the process, or the file that the process
    locks, until `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid, self.uid = credentials(sock)
        self.pidfd = _pidfd(sock, self.pid)
        self.lock: int | None = None
        """Descriptor of the file that the process has to lock; None where the daemon has a pidfd, and its memory ends
        with it."""

    def make_lock(self) -> None:
        """Make the file that the process has to lock. Raises `OSError`."""
        self.lock = os.memfd_create("tokenlake-lock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.lock, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def take_over(self, earlier: ConnectedProcess) -> None:
        """Take over the pidfd, unless there is one, and the lock file of an earlier connection of the same process."""
        if self.pidfd is None:
            self.pidfd, earlier.pidfd = earlier.pidfd, None
        self.lock, earlier.lock = earlier.lock, None

    @property
    def holds_lock(self) -> bool:
        """True while the process holds the lock on its file."""
        return self.lock is not None and is_locked(self.lock)

    def close(self) -> None:
        """Close the pidfd and the lock file."""
        for descriptor in (self.pidfd, self.lock):
            if descriptor is not None:
                os.close(descriptor)
        self.pidfd = self.lock = None


def is_locked(descriptor: int) -> bool:
    """True while another process holds a lock on the file."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    found = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return bool(found[0] != fcntl.F_UNLCK)


def kernel_has_pidfds() -> bool:
    """Returns True if the kernel gives a pidfd of every process that connects, in any PID namespace."""
    one, other = socket.socketpair()
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None
