"""A wrapper of the pool, for an engine, that measures each call and can corrupt the bytes that are read."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.lease import Lease
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions


class Watch:
    """Measurements of the calls that an engine makes to its pool, and switches that change its reads. Several threads
    of an engine may make the calls."""

    def __init__(self) -> None:
        self.flip = False
        """If True, reads invert the sign bit of every second 16-bit word and stores do nothing."""
        self.before_remote: Callable[[int], None] | None = None
        """Callback that announces reads of the engine from other nodes; None: none. It is called before each
        read that includes such segments, with their number, on the thread that reads; its result is ignored."""
        self.local = 0
        """Number of segments that the engine read from its own node."""
        self.remote = 0
        """Number of segments that the engine read from other nodes."""
        self.longest_s = 0.0
        """Seconds of the longest call for which a request waited."""
        self.failed = 0
        """Number of calls that raised an exception."""
        self.recovered_at = 0.0
        """Value of `time.monotonic` at the first read or store that succeeded after the last failed call; 0: none."""
        self.cut_by: Counter[str] = Counter()
        """Number of matches and reads that returned less than the engine asked for, by the name of the `Code` that
        ended each."""
        self._lock = threading.Lock()

    @contextmanager
    def call(self, *, waited_for: bool) -> Iterator[None]:
        """Context that measures one call to the pool. `waited_for`: whether a request of the engine waits for the
        call."""
        began = time.monotonic()
        try:
            yield
        except Exception:
            with self._lock:
                self.failed += 1
                self.recovered_at = 0.0
            raise
        finally:
            if waited_for:
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def served(self) -> None:
        """Report that a read or a store of the pool succeeded."""
        with self._lock:
            if self.failed and not self.recovered_at:
                self.recovered_at = time.monotonic()


class MeasuredPool:
    """Stands in for `pool` and measures its matches and stores; all else is the pool's."""

    def __init__(self, pool: Pool, watch: Watch) -> None:
        self._pool = pool
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH) -> MeasuredLease:
        """As `Pool.match`; counts the code that cut the match short."""
        # A match waits for segments that other engines compute at the moment; that time does not count as a wait for
        # the pool.
        with self._watch.call(waited_for=not options.in_flight_wait_s):
            lease = self._pool.match(keys, options)
        if lease.hits < len(keys):
            self._watch.cut_by[Code(lease.codes[lease.hits]).name] += 1
        return MeasuredLease(lease, self._watch)

    def store_all(self, keys: Sequence[SegmentKey], *arguments: Any, **options: Any) -> bytes:
        """As `Pool.store_all`; while `Watch.flip` is set nothing is stored, and each key gets EXISTS."""
        if self._watch.flip:
            return bytes([Code.EXISTS]) * len(keys)
        with self._watch.call(waited_for=False):
            codes = self._pool.store_all(keys, *arguments, **options)
        if Code.COMMITTED in codes:
            self._watch.served()
        return codes


class MeasuredLease:
    """Stands in for `lease` and measures its reads; all else is the lease's."""

    def __init__(self, lease: Lease, watch: Watch) -> None:
        self._lease = lease
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        """As `Lease.fetch`; adds the time of the call and the segments read to the `Watch`. While `Watch.flip` is set
        the arrays are copies with wrong bytes."""
        remote = self._lease.codes[start:stop].count(Code.REMOTE)
        if remote and self._watch.before_remote is not None:
            self._watch.before_remote(remote)
        with self._watch.call(waited_for=True):
            arrays = self._lease.fetch(start, stop, at_most_s=at_most_s)
        arrived = self._lease.codes[start : start + len(arrays)].count(Code.REMOTE)
        self._watch.remote += arrived
        self._watch.local += len(arrays) - arrived
        if arrays:
            self._watch.served()
        if len(arrays) < stop - start:
            self._watch.cut_by[Code.LOST.name] += 1
        return [_flipped(array) for array in arrays] if self._watch.flip else arrays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lease.release()


def _flipped(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of `array` with the sign of each little-endian float32, or of every second 16-bit float, inverted. Values
    stay finite."""
    spoilt = array.copy()
    spoilt[3::4] ^= 0x80
    spoilt.flags.writeable = False
    return spoilt
