"""Copies the segments of a lease into vLLM's blocks, on a rank. Imports no engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tokenlake.identity import LeaseId
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.lease import Lease
from tokenlake_client.pool import Pool

WINDOW = 32
"""The number of segments that are fetched at a time; their arrays keep them leased until they are copied."""
LEAST_LEFT_S = 0.001
"""Seconds: the limit of further transfers of a load whose limit has passed."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The duration of one load, from the moment the rank began it."""

    fetch_s: float
    """Seconds until the load's segments were in this node's arena."""
    copy_s: float
    """The remaining seconds of the load, until its segments were copied into the blocks."""
    lost: int = 0
    """The number of the load's segments that were lost or arrived too late."""

    def slower(self, other: LoadTime) -> LoadTime:
        """The duration of the load at the slower of two ranks, with the larger number of lost segments."""
        slower = max(self, other, key=lambda time: time.fetch_s + time.copy_s)
        return replace(slower, lost=max(self.lost, other.lost))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of one load."""

    blocks: int
    """The number of vLLM's blocks that the load filled, from the first on."""
    nbytes: int
    """The bytes of these blocks."""
    time: LoadTime
    unfilled: str
    """Why the other blocks of the load were not filled; empty if all were."""


def load_parts(
    pool: Pool,
    lease_ids: Sequence[int],
    incarnation: int,
    request: str,
    parts: Sequence[Part],
    copy: Any,
    *,
    at_most_s: float = 0.0,
    shard: slice = slice(None),
    copying: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Loaded:
    """Fill the blocks of `parts`, in the order of their segments, up to the first segment that was lost or corrupt.
    Raises the errors of the pool; the contents of the blocks are undefined then.

    `lease_ids`: the numbers of the lease's parts, granted by the daemon of this `incarnation`. `copy`: see `copies`.
    `at_most_s`: limit of the load's transfers; 0: none. `shard`: the bytes of a slot that are passed to `copy`.
    `copying`: a context for each copy.
    """
    began = time.perf_counter()
    lease = pool.engine.attach(*map(LeaseId, lease_ids), request=request, deadline_s=at_most_s or None)
    attach_s = time.perf_counter() - began
    by_segment = {part.segment: part for part in parts}
    blocks, nbytes, fetched, fetch_s, unfilled = 0, 0, 0, 0.0, ""
    try:
        if lease.incarnation != incarnation:
            by_segment, unfilled = {}, "the daemon has restarted, so the leased segments no longer exist"
        for start, stop in runs(sorted(by_segment), WINDOW):
            fetch_began = time.perf_counter()
            # The limit is that of the attachment and of all transfers of the load together.
            left_s = max(LEAST_LEFT_S, at_most_s - attach_s - fetch_s) if at_most_s else 0.0
            arrays = lease.fetch(start, stop, at_most_s=left_s) if start < lease.hits else []
            fetch_s += time.perf_counter() - fetch_began
            for index, array in enumerate(arrays, start):
                with copying():
                    nbytes += copy.from_slot(array[shard], by_segment[index])
                blocks += len(by_segment[index].blocks)
            copy.finish()
            fetched += len(arrays)
            if len(arrays) < stop - start:
                unfilled = _reason(lease, start + len(arrays))
                break
    except BaseException:
        # Wait for the copies under way: they read slots and write blocks, and vLLM is about to give these blocks to
        # other requests.
        with contextlib.suppress(Exception):
            copy.finish()
        raise
    finally:
        lease.release()
    copy_s = time.perf_counter() - began - fetch_s
    return Loaded(blocks, nbytes, LoadTime(fetch_s, copy_s, lost=len(parts) - fetched), unfilled)


def runs(indices: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """The ascending `indices` as ranges [start, stop) of neighbours, each of at most `longest`."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index and index - found[-1][0] < longest:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def _reason(lease: Lease, index: int) -> str:
    """Why a fetch ended before the leased segment `index`."""
    if index >= lease.hits:
        return f"the lease of its segments from {lease.hits} on has ended"
    code = lease.code(index)
    return f"segment {index} {'has a wrong checksum' if code is Code.LOCAL else f'was not delivered ({code.name})'}"
