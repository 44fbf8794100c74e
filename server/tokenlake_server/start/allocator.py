"""Settings of the C library's allocator that let a daemon give memory back.

By default each thread gets a heap of its own (an arena), up to 8 for each processor, and each of them keeps what was
freed last: a daemon with 30 threads would keep some 100 MiB after large messages. The bytes of segments do not pass
through the allocator.
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM, _MMAP, _ARENAS = -1, -3, -8
"""Options of `mallopt`, from glibc's malloc.h."""
ARENAS = 2
MMAP_BYTES = 512 << 10
"""Bytes from which on an allocation has pages of its own, which its end gives back. Reads of sockets are smaller."""
TRIM_BYTES = 1 << 20
"""Free bytes at the end of a heap that are kept."""


def set_up() -> None:
    """Set the options of the whole process, as far as its C library has them. Called once, before threads start."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_ARENAS, ARENAS), (_MMAP, MMAP_BYTES), (_TRIM, TRIM_BYTES)):
            mallopt(option, value)
