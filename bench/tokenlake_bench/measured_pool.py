"""A wrapper of the pool, for an engine, that measures each call and can corrupt the bytes that are read."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, Salt, TokenIds
from tokenlake.layout import Layout
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
    """A `CachePool` (`engines.common.pool`): passes all calls to `pool` and measures them. Closing it closes `pool`."""

    def __init__(self, pool: Pool, watch: Watch) -> None:
        self._pool = pool
        self._watch = watch

    @property
    def layout(self) -> Layout:
        """The layout of the segments; see `CachePool`."""
        return self._pool.layout

    @property
    def node(self) -> str:
        """The name of the daemon's node; see `CachePool`."""
        return self._pool.node

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: Salt = None) -> Prefix:
        """Returns the keys of a prompt's segments; see `CachePool`."""
        return self._pool.prefix(tokens, adapter=adapter, salt=salt)

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH) -> MeasuredLease:
        """Lease the longest prefix of `keys` that the pool has, measure the call, and count the code that cut the match
        short; see `CachePool`."""
        # A match waits for segments that other engines compute at the moment; that time does not count as a wait for
        # the pool.
        with self._watch.call(waited_for=not options.in_flight_wait_s):
            lease = self._pool.match(keys, options)
        if lease.hits < len(keys):
            self._watch.cut_by[Code(lease.codes[lease.hits]).name] += 1
        return MeasuredLease(lease, self._watch)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, NDArray[np.uint8]], None],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> bytes:
        """Store consecutive segments of one prompt and measure the call. While `Watch.flip` is set nothing is stored,
        and each key gets EXISTS. See `CachePool`."""
        if self._watch.flip:
            return bytes([Code.EXISTS]) * len(keys)
        with self._watch.call(waited_for=False):
            codes = self._pool.store_all(keys, fill, first, patience, request=request, hints=hints)
        if Code.COMMITTED in codes:
            self._watch.served()
        return codes

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Set in-flight markers, unless `Watch.flip` is set; see `CachePool`."""
        if not self._watch.flip:
            self._pool.mark_in_flight(keys, seconds)

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """Send hints about stored segments; see `CachePool`."""
        self._pool.hint(keys, hints)

    def close(self) -> None:
        """End the connection of the wrapped pool; see `CachePool`."""
        self._pool.close()


class MeasuredLease:
    """A `CacheLease` (`engines.common.pool`): passes all calls to the pool's lease and measures them."""

    def __init__(self, lease: Lease, watch: Watch) -> None:
        self._lease = lease
        self._watch = watch

    @property
    def hits(self) -> int:
        """The number of leased segments; see `CacheLease`."""
        return self._lease.hits

    @property
    def local_hits(self) -> int:
        """The number of leased segments on this node; see `CacheLease`."""
        return self._lease.local_hits

    def nodes(self) -> list[str]:
        """Returns the name of the node that has each leased segment; see `CacheLease`."""
        return self._lease.nodes()

    def sources(self) -> tuple[list[str], list[float]]:
        """Returns the nodes of the leased segments, and their seconds on disk; see `CacheLease`."""
        return self._lease.sources()

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        """Calls `CacheLease.fetch`, and adds the time of the call and the segments read to the `Watch`. While
        `Watch.flip` is set the arrays are copies with wrong bytes."""
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

    @property
    def unreleased(self) -> int:
        """The number of segments, from the first on, that are not released."""
        return self._lease.unreleased

    def used(self, start: int, stop: int) -> None:
        """Record that queries attended to the leased segments [start, stop); see `CacheLease`."""
        self._lease.used(start, stop)

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record which tokens of the prompt the engine takes; see `CacheLease`."""
        self._lease.takes(start, stop, saved_s)

    def release(self, start: int = 0, stop: int | None = None, *, counted: bool = True) -> None:
        """End the lease of the segments [start, stop); see `CacheLease`."""
        self._lease.release(start, stop, counted=counted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.release()


def _flipped(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of `array` with the sign of each little-endian float32, or of every second 16-bit float, inverted. Values
    stay finite."""
    spoilt = array.copy()
    spoilt[3::4] ^= 0x80
    spoilt.flags.writeable = False
    return spoilt
