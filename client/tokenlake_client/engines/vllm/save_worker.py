"""Stores segments from vLLM's blocks, on a rank, in a background thread. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.wire import Code
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.counters import Counters
from tokenlake_client.engines.vllm.counters import Counts
from tokenlake_client.engines.vllm.step_plan import SavePlan


class BlockReader(Protocol):
    """Copies segments from blocks into slots."""

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with the segment in `blocks`. The copy is complete on return."""
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    plan: SavePlan
    pool: Callable[[], Any]
    ready: Callable[[], None]
    since: float
    """The time in seconds, by `time.monotonic`, at which the job was submitted."""


class _BlocksTaken(Exception):
    """The save job ends, because vLLM has given its blocks to another request."""


class SaveWriter:
    """Executes save jobs in their order, in a thread of its own. A job may read its blocks until it counts as `done`,
    or until `take_back` has returned for it. All methods are for one thread."""

    def __init__(
        self,
        reader: BlockReader,
        store: Callable[[Any, SavePlan, Callable[[int, NDArray[np.uint8]], None], float], bytes],
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        *,
        tokens: int,
        queue: int,
    ) -> None:
        """`store(pool, plan, fill, since)` stores the segments of a plan, which was submitted at the time `since`, and
        returns a `Code` for each. `tokens`: the number of tokens of a segment. `queue`: the largest number of jobs that
        wait."""
        self._reader = reader
        self._store = store
        self._counters = counters
        self._report = report
        self._tokens = tokens
        self._queue = BackgroundQueue(self._execute, "tokenlake-save", queue)
        self._copying = threading.Lock()
        """Held by the thread that stores segments while it copies one segment out of its blocks."""
        self._taken: frozenset[int] = frozenset()
        """The numbers of the unfinished save jobs whose blocks vLLM took back. Only the thread that calls the methods
        writes it."""
        self._lost: deque[tuple[bytes, ...]] = deque(maxlen=queue)
        """The keys of jobs that were given up, whose in-flight markers the background thread is to remove."""
        self._last = 0
        """The number of the last save job that was submitted or skipped."""

    @property
    def done(self) -> int:
        """The number of the newest job such that this job and all earlier ones read no block any more."""
        oldest = self._queue.oldest()
        return oldest.plan.job - 1 if oldest is not None else self._last

    def submit(self, plan: SavePlan, pool: Callable[[], Any], ready: Callable[[], None]) -> None:
        """Store the segments of `plan` in the background. `pool` returns the pool or None, and may wait. `ready`
        returns once the blocks hold the results of the step. Both are called in the background."""
        self._last = max(self._last, plan.job)
        if not self._queue.submit(_Task(plan, pool, ready, time.monotonic())):
            self._give_up(plan)

    def skip(self, job: int) -> None:
        """Count the save jobs up to number `job` as done, for a rank that does not execute them."""
        self._last = max(self._last, job)

    def take_back(self, jobs: Sequence[int]) -> None:
        """Give up these jobs: their blocks are not read after this call. Waits for the copy of one segment at most."""
        if not jobs:
            return
        done = self.done
        self._taken = frozenset(job for job in self._taken.union(jobs) if job > done)
        for task in self._queue.withdraw(lambda task: task.plan.job in jobs):
            self._give_up(task.plan)
        with self._copying:
            # The copy that was under way has ended, and each later copy sees that the blocks were taken back.
            pass

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all save jobs are done; False when `timeout` seconds were not enough."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> None:
        """Execute the waiting save jobs, for at most `timeout` seconds, and end the thread that stores."""
        self._queue.close(timeout)

    def _execute(self, task: _Task) -> None:
        started = time.perf_counter()
        pool = None
        try:
            pool = task.pool()
            if pool is None:
                self._count_lost(task.plan)
            else:
                task.ready()
                self._save(task.plan, pool, task.since)
        except _BlocksTaken:
            self._give_up(task.plan)
        except Exception as error:
            self._give_up(task.plan)
            self._report("storing segments", error)
        while pool is not None and self._lost:
            pool.mark_in_flight(self._lost.popleft(), 0.0)
        self._counters.add(save_seconds=time.perf_counter() - started)

    def _save(self, plan: SavePlan, pool: Any, since: float) -> None:
        per_segment = len(plan.blocks) // len(plan.keys)

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            with self._copying:
                if plan.job in self._taken:
                    raise _BlocksTaken
                self._reader.to_slot(slot, plan.blocks[index * per_segment : (index + 1) * per_segment])

        codes = self._store(pool, plan, fill, since)
        stored = sum(code in (Code.COMMITTED, Code.RESERVED) for code in codes)
        tokens = plan.tail or self._tokens
        self._counters.add(tokens_stored=stored * tokens, tokens_not_stored=(len(codes) - stored) * tokens)
        refused = [key for key, code in zip(plan.keys, codes, strict=False) if plan.marked and Code(code).refused]
        if refused:
            pool.mark_in_flight(refused, 0.0)

    def _give_up(self, plan: SavePlan) -> None:
        """Count the segments of a job that is not executed, and let no other engine wait for them."""
        self._count_lost(plan)
        if plan.marked:
            self._lost.append(plan.keys)

    def _count_lost(self, plan: SavePlan) -> None:
        self._counters.add(tokens_not_stored=len(plan.keys) * (plan.tail or self._tokens))
