"""Copies the segments of a lease into vLLM's blocks, on a rank. Imports no engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import LeaseId
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.pool import AttachedLease, RankPool
from tokenlake_client.engines.vllm.step_plan import LoadPlan, LoadTime

WINDOW = 32
"""The number of segments that are fetched at a time; their arrays keep them leased until they are copied."""


LEAST_LEFT_S = 0.001
"""Seconds: the limit of further transfers of a load whose limit has passed."""


class BlockWriter(Protocol):
    """Copies segments from slots into blocks."""

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill vLLM's blocks `blocks` with the tokens of the segment in `slot`, from token `skip` of the segment on."""
        ...

    def finish(self) -> None:
        """Wait until all copies that this thread has begun are complete."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of one load."""

    blocks: int
    """The number of vLLM's blocks that the load filled, from the first on."""
    time: LoadTime
    unfilled: str
    """Why the other blocks of the load were not filled; empty if all were."""


def load_blocks(pool: RankPool, plan: LoadPlan, copy: BlockWriter, segment: int, block: int) -> Loaded:
    """Fill the blocks of `plan`, up to the first segment that was lost or corrupt. `segment`, `block`: their numbers of
    tokens. Raises the errors of the pool; the contents of the blocks are undefined then."""
    began = time.perf_counter()
    lease = pool.attach(*map(LeaseId, plan.leases), request=plan.request, deadline_s=plan.at_most_s or None)
    attach_s = time.perf_counter() - began
    first, last = plan.start // segment, -(-plan.stop // segment)
    filled, fetched, fetch_s, unfilled = 0, 0, 0.0, ""
    try:
        if lease.incarnation != plan.incarnation:
            unfilled = "the daemon has restarted, so the leased segments no longer exist"
        else:
            if lease.hits < last:
                unfilled = f"the lease of its segments from {lease.hits} on has ended"
            for start in range(first, min(last, lease.hits), WINDOW):
                stop = min(start + WINDOW, last, lease.hits)
                fetch_began = time.perf_counter()
                # The limit is that of the attachment and of all transfers of the load together.
                left_s = max(LEAST_LEFT_S, plan.at_most_s - attach_s - fetch_s) if plan.at_most_s else 0.0
                arrays = lease.fetch(start, stop, at_most_s=left_s)
                fetch_s += time.perf_counter() - fetch_began
                for index, array in enumerate(arrays, start):
                    skip = max(0, plan.start - index * segment)
                    count = -(-(min(plan.stop, (index + 1) * segment) - max(plan.start, index * segment)) // block)
                    copy.from_slot(array, plan.blocks[filled : filled + count], skip)
                    filled += count
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
    return Loaded(filled, LoadTime(fetch_s, copy_s, lost=last - first - fetched), unfilled)


def _reason(lease: AttachedLease, index: int) -> str:
    """Why a fetch ended before the leased segment `index`."""
    code = lease.code(index)
    return f"segment {index} {'has a wrong checksum' if code is Code.LOCAL else f'was not delivered ({code.name})'}"
