"""The check of a device: a file is written, synced and read back, which also measures the bandwidth."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from tokenlake_server.disk.files import Files
from tokenlake_server.disk.segments import aligned_memory

THREADS = 4
"""Threads of a device that read and write segments; more give no more bandwidth."""
PROBE_PIECE = 1 << 20
"""Size of each operation of a check."""
PROBE = "probe"
LEAST_PROBE = 2 << 20
"""Least bytes of the file of a check, also where segments take all bytes of the device."""
UNMEASURED = (1e9, 0.5e9)
"""Bandwidth of (reads, writes) of a device that has no space for the file of a check, in bytes/s: that of a small
drive. Reads correct the first one."""


class SlowCheck(Exception):
    """The check of a device took too long."""


def checked(files: Files, nbytes: int, slow_s: float) -> tuple[float, float]:
    """Check a device with a file of `nbytes` and measure its bandwidth, with as many threads as serve it: (read, write)
    in bytes/s. Raises OSError, and `SlowCheck` where the check takes longer than an operation may."""
    began = time.monotonic()
    rates = measure(files, nbytes, PROBE_PIECE, THREADS)
    took = time.monotonic() - began
    if took > slow_s:
        raise SlowCheck(f"slow: a check takes {took:.1f} s, more than {slow_s:g} s")
    return rates


def measure(files: Files, nbytes: int, piece: int, threads: int) -> tuple[float, float]:
    """Write a file of `nbytes` in pieces, sync it, read it and compare it. Returns the bandwidth of (reads, writes) in
    bytes/s, with `threads` operations at a time. Raises OSError, with EIO where the bytes differ."""
    if PROBE in files.names():
        files.remove(PROBE)
    file = files.open(PROBE, create=True, direct=True)
    source = aligned_memory(piece)
    source[:] = os.urandom(piece)
    offsets = range(0, nbytes, piece)

    def read(first: int) -> None:
        target = aligned_memory(piece)
        for at in offsets[first::threads]:
            if file.read(at, [target]) != piece or target != source:
                raise OSError(errno.EIO, "the device gives back other bytes than were written")

    def write(first: int) -> None:
        for at in offsets[first::threads]:
            file.write(at, [source])

    try:
        file.allocate(nbytes)
        start = time.monotonic()
        _in_threads(write, threads)
        file.sync()
        written = time.monotonic()
        _in_threads(read, threads)
        end = time.monotonic()
    finally:
        file.close()
        files.remove(PROBE)
    return nbytes / max(end - written, 1e-9), nbytes / max(written - start, 1e-9)


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    """Call `work` with each number below `threads`, each in a thread that does not keep the process. Raises the first
    error when all have ended."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    try:
        for each in running:
            each.start()
    finally:
        for each in running:
            if each.ident is not None:
                each.join()
    if errors:
        raise errors[0]
