"""How long a place takes: measured when it is opened, and by every read and write from then on."""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenlake_server.cold.base import Missing, Objects, Unfit, read_whole, write_whole

PROBES = "probe"
SMALL_BYTES = 4096
WEIGHT = 0.1
"""Weight of a new measurement."""
OTHER_BYTES = "the place gives back other bytes than were written"
CHANGE = 1.25
"""Ratio of a measurement to the one that the rules know from which on they are told."""
TOLD_S = 10.0
"""Least time between two tellings."""


class Measured(NamedTuple):
    """Seconds to the first byte of a read, and the bytes per second of all reads and of all writes together."""

    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


def probed(objects: Objects, threads: int, nbytes: int) -> Measured:
    """Write objects of `nbytes` in so many threads, read them back, compare and delete them. Raises OSError, with EIO
    where the bytes differ."""
    name = secrets.token_hex(8)
    data = os.urandom(nbytes)
    paths = [f"{PROBES}/{name}-{number}" for number in range(threads)]
    read: dict[str, memoryview] = {}

    def take(path: str) -> float:
        began = time.monotonic()
        try:
            read[path] = read_whole(objects, path, nbytes)
        except (Missing, Unfit):
            raise OSError(errno.EIO, OTHER_BYTES) from None
        return time.monotonic() - began

    try:
        started = time.monotonic()
        _in_threads(lambda path: write_whole(objects, path, data), paths)
        written = time.monotonic()
        _in_threads(take, paths)
        ended = time.monotonic()
        if any(bytes(each) != data for each in read.values()):
            raise OSError(errno.EIO, OTHER_BYTES)
        write_whole(objects, paths[0], data[:SMALL_BYTES])
        latency = sorted(take(paths[0]) for _ in range(3))[1]
    finally:
        objects.delete(paths)
    moved = threads * nbytes
    return Measured(latency, moved / max(ended - written, 1e-9), moved / max(written - started, 1e-9))


def _in_threads(work: Callable[[str], object], paths: list[str]) -> None:
    errors: list[BaseException] = []

    def run(path: str) -> None:
        try:
            work(path)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(path,), daemon=True) for path in paths]
    for each in running:
        each.start()
    for each in running:
        each.join()
    if errors:
        raise errors[0]


class _Rate:
    """Bytes per second while at least one operation runs: bytes and seconds of the last operations, of which each
    counts less with every later one."""

    def __init__(self, first: float) -> None:
        self._nbytes = first / WEIGHT
        self._seconds = 1 / WEIGHT
        self._scaled = False
        self._running = 0
        self._mark = 0.0

    def began(self, now: float) -> None:
        if not self._running:
            self._mark = now
        self._running += 1

    def ended(self, nbytes: int, now: float) -> None:
        """`nbytes`: 0 for an operation that failed."""
        self._running -= 1
        seconds, self._mark = now - self._mark, now
        if not nbytes:
            return
        if not self._scaled:
            # The first measurement counts as ten operations of this size.
            scale = nbytes / (self._nbytes * WEIGHT)
            self._nbytes, self._seconds, self._scaled = self._nbytes * scale, self._seconds * scale, True
        self._nbytes = (1 - WEIGHT) * self._nbytes + nbytes
        self._seconds = (1 - WEIGHT) * self._seconds + seconds

    @property
    def now(self) -> float:
        return self._nbytes / max(self._seconds, 1e-9)


class Measurement:
    """The present measurements of a place that is in use. Guarded by its user."""

    def __init__(self, first: Measured) -> None:
        self._latency_s = first.latency_s
        self._read, self._write = _Rate(first.read_bytes_per_s), _Rate(first.write_bytes_per_s)
        self._told = first
        self._told_at = time.monotonic()

    @property
    def now(self) -> Measured:
        """The measurements."""
        return Measured(self._latency_s, self._read.now, self._write.now)

    def began_to_read(self, latency_s: float) -> None:
        """A read got its first bytes."""
        self._latency_s += WEIGHT * (latency_s - self._latency_s)

    def began(self, now: float, *, read: bool) -> None:
        """An object is read or written from now on."""
        (self._read if read else self._write).began(now)

    def ended(self, nbytes: int, now: float, *, read: bool) -> None:
        """`nbytes` were read or written; 0 where that failed."""
        (self._read if read else self._write).ended(nbytes, now)

    def to_tell(self, now: float) -> Measured | None:
        """The measurements, if they changed enough since they were told last."""
        measured = self.now
        pairs: Iterator[tuple[float, float]] = zip(measured, self._told, strict=True)
        changed = any(not 1 / CHANGE < new / max(old, 1e-9) < CHANGE for new, old in pairs)
        if not changed or now - self._told_at < TOLD_S:
            return None
        self._told, self._told_at = measured, now
        return measured
