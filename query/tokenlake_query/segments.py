"""Cached segments as this process reads them: leased from its daemon as by any client, and mapped read-only."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake_client import Pool

MAX_POOLS = 16
"""Maximum number of a tenant's pools, one per layout, whose connection is kept for later views."""
MATCH_S = 0.100
"""Maximum seconds that a match may take, beside those that the number of its segments adds; `fetch_segments` gives the
match at most half of its own deadline. The daemon answers at once where it has the segments itself."""


class Segments:
    """Slots of segments in any order, each uint8 `[segment_bytes]` and read-only. Immutable.

    Each slot stays leased until the last array over it is gone, even if the match that leased it has been closed."""

    __slots__ = ("addresses", "slots")

    def __init__(self, slots: Sequence[NDArray[np.uint8]]) -> None:
        self.slots = tuple(slots)
        self.addresses = tuple(int(slot.__array_interface__["data"][0]) for slot in slots)
        """Address of each slot in the memory of this process. A slot has the same address in every lease of a pool, so
        that equal addresses mean the same segment."""

    def __len__(self) -> int:
        return len(self.slots)

    def __add__(self, other: Segments) -> Segments:
        return Segments(self.slots + other.slots)


class Pools:
    """One `Pool` per tenant and layout, connected on first use. Beyond `MAX_POOLS` of a tenant its least recently used
    one is dropped; it closes itself when the last array over its segments is gone."""

    def __init__(self, daemon: Path, credential: str) -> None:
        self._daemon = daemon
        self._credential = credential
        self._lock = threading.Lock()
        self._tenants: dict[str, tuple[threading.Lock, dict[bytes, Pool]]] = {}
        """By tenant, the connected pools by layout, in order of use, the most recently used last, and the lock under
        which they are used: a pool that takes long to connect delays no other tenant."""

    def get(self, tenant: str, layout: Layout) -> Pool:
        """The pool of a tenant and layout. Thread-safe. Raises as `Pool.connect`."""
        name = layout.fingerprint()
        with self._lock:
            lock, pools = self._tenants.setdefault(tenant, (threading.Lock(), {}))
        with lock:
            pool = pools.pop(name, None)
            if pool is None:
                pool = Pool.connect(self._daemon, layout, f"{self._credential}:{tenant}")
                if len(pools) >= MAX_POOLS:
                    del pools[next(iter(pools))]
            pools[name] = pool
            return pool


def open_local(pool: Pool, keys: Sequence[SegmentKey]) -> Segments:
    """Lease the longest prefix of `keys` that lies in this node's arena; nothing is fetched. Raises Unreachable."""
    with pool.match(keys, deadline_s=match_deadline_s(MATCH_S, len(keys))) as lease:
        local = next((at for at, code in enumerate(lease.codes[: lease.hits]) if code != Code.LOCAL), lease.hits)
        return _of_layout(pool, lease.fetch(0, local))


def fetch_segments(pool: Pool, keys: Sequence[SegmentKey], deadline_s: float) -> Segments:
    """Lease the longest prefix of `keys` that the pool has, and fetch it into this node's arena. Raises Unreachable."""
    until = time.monotonic() + deadline_s
    with pool.match(keys, deadline_s=min(match_deadline_s(MATCH_S, len(keys)), deadline_s / 2)) as lease:
        left = until - time.monotonic()
        return _of_layout(pool, lease.fetch(deadline_s=left) if lease.hits and left > 0 else ())


def _of_layout(pool: Pool, slots: Sequence[NDArray[np.uint8]]) -> Segments:
    """The slots of `slots` before the first one whose size is not that of the pool's layout: such a slot holds a
    segment of another layout."""
    size = pool.layout.segment_bytes
    return Segments(slots[: next((at for at, slot in enumerate(slots) if len(slot) != size), len(slots))])
