"""Brings segments of a lease into vLLM's blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import LeaseId
from tokenlake_client.engines.vllm.plan import LoadPlan, LoadTime

__all__ = ["Loaded", "LoadPool", "Scatter", "load_blocks"]

WINDOW = 32
"""Segments that are fetched, and kept leased by their arrays, at a time."""


class Scatter(Protocol):
    """Moves segments from slots to blocks."""

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill blocks with a segment's tokens from token `skip` on."""
        ...

    def finish(self) -> None:
        """Everything moved so far is where it belongs."""
        ...


class _Lease(Protocol):
    @property
    def incarnation(self) -> int: ...

    @property
    def hits(self) -> int: ...

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]: ...

    def release(self) -> None: ...


class LoadPool(Protocol):
    """What is used of a pool here."""

    def attach(self, lease: LeaseId, *, request: str) -> _Lease:
        """Hold a lease of another process of this session."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of one load."""

    blocks: int
    """That were filled, from the first on."""
    took: LoadTime


def load_blocks(pool: LoadPool, plan: LoadPlan, copy: Scatter, segment: int, block: int) -> Loaded:
    """Fill the blocks of `plan`; fewer where segments were lost or corrupt. Raises what the pool raises; nothing is
    known of the blocks then."""
    began = time.perf_counter()
    lease = pool.attach(LeaseId(plan.lease), request=plan.request)
    first, last = plan.start // segment, -(-plan.stop // segment)
    filled, came, fetch_s = 0, 0, 0.0
    try:
        if lease.incarnation == plan.incarnation:
            for start in range(first, min(last, lease.hits), WINDOW):
                stop = min(start + WINDOW, last, lease.hits)
                fetching = time.perf_counter()
                arrays = lease.fetch(start, stop)
                fetch_s += time.perf_counter() - fetching
                for index, array in enumerate(arrays, start):
                    skip = max(0, plan.start - index * segment)
                    count = (min(plan.stop, (index + 1) * segment) - max(plan.start, index * segment)) // block
                    copy.from_slot(array, plan.blocks[filled : filled + count], skip)
                    filled += count
                copy.finish()
                came += len(arrays)
                if len(arrays) < stop - start:
                    break
    except BaseException:
        # Copies that were begun still read slots, and write blocks, that others get now.
        with contextlib.suppress(Exception):
            copy.finish()
        raise
    finally:
        lease.release()
    rest = time.perf_counter() - began - fetch_s
    return Loaded(filled, LoadTime(fetch_s, rest, lost=last - first - came))
