"""A lock that ends with this process, by which a daemon notices its death where the kernel gives it no pidfd."""

from __future__ import annotations

import fcntl
import os


class ProcessLock:
    """Holds a POSIX record lock on a file of the daemon. Forked children do not inherit such a lock.

    The kernel releases it when the process ends, or closes the descriptor: this object and the descriptor live as long
    as the connection and every mapping that was made over it.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over `descriptor`, which is open for writing. Raises `OSError`."""
        self._descriptor = descriptor
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __del__(self) -> None:
        os.close(self._descriptor)
