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

    def read(path: str, expected: bytes) -> float:
        began = time.monotonic()
        try:
            same = read_whole(objects, path, len(expected)) == expected
        except (Missing, Unfit):
            same = False
        if not same:
            raise OSError(errno.EIO, "the place gives back other bytes than were written")
        return time.monotonic() - began

    try:
        started = time.monotonic()
        _in_threads(lambda path: write_whole(objects, path, data), paths)
        written = time.monotonic()
        _in_threads(lambda path: read(path, data), paths)
        ended = time.monotonic()
        write_whole(objects, paths[0], data[:SMALL_BYTES])
        latency = sorted(read(paths[0], data[:SMALL_BYTES]) for _ in range(3))[1]
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


class Measurement:
    """The present measurements of a place that is in use. Guarded by its user."""

    def __init__(self, first: Measured) -> None:
        self.now = first
        self._told = first
        self._told_at = time.monotonic()

    def began_to_read(self, latency_s: float) -> None:
        """A read got its first bytes."""
        self.now = self.now._replace(latency_s=_mean(self.now.latency_s, latency_s))

    def moved(self, nbytes: int, seconds: float, at_a_time: int, *, read: bool) -> None:
        """An object was read or written, while so many operations of its kind ran."""
        rate = nbytes * at_a_time / max(seconds, 1e-6)
        if read:
            self.now = self.now._replace(read_bytes_per_s=_mean(self.now.read_bytes_per_s, rate))
        else:
            self.now = self.now._replace(write_bytes_per_s=_mean(self.now.write_bytes_per_s, rate))

    def to_tell(self, now: float) -> Measured | None:
        """The measurements, if they changed enough since they were told last."""
        pairs: Iterator[tuple[float, float]] = zip(self.now, self._told, strict=True)
        changed = any(not 1 / CHANGE < new / max(old, 1e-9) < CHANGE for new, old in pairs)
        if not changed or now - self._told_at < TOLD_S:
            return None
        self._told, self._told_at = self.now, now
        return self.now


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
