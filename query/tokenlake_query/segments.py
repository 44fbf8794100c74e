"""Cached segments as this process reads them: leased from its daemon as any client does, mapped read-only."""

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
from tokenlake_client import Pool

__all__ = ["Pools", "Segments", "bring_here", "open_here"]

MAX_POOLS = 64
"""Pairs of tenant and layout kept while nothing of them is open."""
MATCH_S = 0.100
"""At most, and half of what is left of a deadline: a daemon that has the segments answers at once."""


class Segments:
    """Slots of consecutive or scattered segments, each uint8 `[segment_bytes]`, read-only. Immutable. Each stays leased
    until the last array over it is gone, whatever becomes of the lease it was found by."""

    __slots__ = ("addresses", "slots")

    def __init__(self, slots: Sequence[NDArray[np.uint8]]) -> None:
        self.slots = tuple(slots)
        self.addresses = tuple(int(slot.__array_interface__["data"][0]) for slot in slots)
        """Where they lie: equal for equal segments of a pool, whoever leased them."""

    def __len__(self) -> int:
        return len(self.slots)

    def __add__(self, other: Segments) -> Segments:
        return Segments(self.slots + other.slots)


class Pools:
    """One `Pool` per tenant and layout, made when first asked for. The one used longest ago makes room for another; it
    closes itself when the last of its segments is forgotten."""

    def __init__(self, daemon: Path, credential: str) -> None:
        self._daemon = daemon
        self._credential = credential
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, bytes], Pool] = {}
        """The one used last comes last."""

    def get(self, tenant: str, layout: Layout) -> Pool:
        """Raises what `Pool.connect` raises."""
        name = (tenant, layout.fingerprint())
        with self._lock:
            pool = self._pools.pop(name, None)
            if pool is None:
                if len(self._pools) >= MAX_POOLS:
                    del self._pools[next(iter(self._pools))]
                pool = Pool.connect(self._daemon, layout, f"{self._credential}:{tenant}")
            self._pools[name] = pool
            return pool


def open_here(pool: Pool, keys: Sequence[SegmentKey]) -> Segments:
    """The longest prefix of `keys` that lies in this node's arena; nothing is brought. Raises Unreachable."""
    with pool.match(keys, deadline_s=MATCH_S) as lease:
        local = next((at for at, code in enumerate(lease.codes[: lease.hits]) if code != Code.LOCAL), lease.hits)
        return _of_layout(pool, lease.fetch(0, local))


def bring_here(pool: Pool, keys: Sequence[SegmentKey], deadline_s: float) -> Segments:
    """The longest prefix of `keys` that the pool has, brought into this node's arena. Raises Unreachable."""
    until = time.monotonic() + deadline_s
    with pool.match(keys, deadline_s=min(MATCH_S, deadline_s / 2)) as lease:
        left = until - time.monotonic()
        return _of_layout(pool, lease.fetch(deadline_s=left) if lease.hits and left > 0 else ())


def _of_layout(pool: Pool, slots: Sequence[NDArray[np.uint8]]) -> Segments:
    """Those before the first of another size: an engine named a segment of another layout."""
    size = pool.layout.segment_bytes
    return Segments(slots[: next((at for at, slot in enumerate(slots) if len(slot) != size), len(slots))])
