"""Stores segments behind the engine: one thread, a bounded queue, and a way to take the blocks back from it."""

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
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.plan import SavePlan

__all__ = ["Copier", "SaveWriter"]


class Copier(Protocol):
    """Moves segments between slots and blocks."""

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of a slot from one segment's blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    plan: SavePlan
    pool: Callable[[], Any]
    ready: Callable[[], None]


class _Given(Exception):
    """The blocks were taken back."""


class SaveWriter:
    """Does jobs in order. A job reads its blocks until it is `done`, or until `take_back` has returned."""

    def __init__(
        self,
        copier: Copier,
        store: Callable[[Any, SavePlan, Callable[[int, NDArray[np.uint8]], None]], bytes],
        counters: Counters,
        report: Callable[[str, BaseException], None],
        *,
        tokens: int,
        queue: int,
    ) -> None:
        """`store` stores a plan's segments in a pool; `tokens` of one segment; `queue`: most jobs that wait."""
        self._copier = copier
        self._store = store
        self._counters = counters
        self._report = report
        self._tokens = tokens
        self._limit = queue
        self._changed = threading.Condition()
        self._copying = threading.Lock()
        """Held while a segment is copied out."""
        self._waiting: deque[_Task] = deque()
        self._current: SavePlan | None = None
        self._taken: set[int] = set()
        self._done = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> int:
        """All jobs up to this one read no block any more."""
        with self._changed:
            first = self._current.job if self._current is not None else 0
            if not first and self._waiting:
                first = self._waiting[0].plan.job
            return first - 1 if first else self._done

    def submit(self, plan: SavePlan, pool: Callable[[], Any], ready: Callable[[], None]) -> None:
        """Store `plan` behind the caller. `pool` finds the pool or None and may wait; `ready` returns when the blocks
        hold what was computed."""
        with self._changed:
            self._done = max(self._done, plan.job)
            if self._closed or len(self._waiting) >= self._limit:
                self._lost(plan)
                return
            self._waiting.append(_Task(plan, pool, ready))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenlake-save", daemon=True)
                self._thread.start()

    def skip(self, job: int) -> None:
        """Jobs up to `job` are not done here."""
        with self._changed:
            self._done = max(self._done, job)

    def take_back(self, jobs: Sequence[int]) -> None:
        """From now on nothing is read from these jobs' blocks; waits for one segment's copy at most."""
        if not jobs:
            return
        with self._changed:
            gone = [task for task in self._waiting if task.plan.job in jobs]
            for task in gone:
                self._waiting.remove(task)
                self._lost(task.plan)
            if self._current is not None and self._current.job in jobs:
                self._taken.add(self._current.job)
        with self._copying:
            # Whoever copies next sees that they were taken.
            pass

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all jobs are done; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, timeout)

    def close(self, timeout: float) -> None:
        """Finish what waits, for at most `timeout` seconds, and end the thread."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._current = task.plan
            started = time.perf_counter()
            try:
                self._do(task)
            except _Given:
                self._lost(task.plan)
            except Exception as error:
                self._lost(task.plan)
                self._report("storing segments", error)
            self._counters.add(save_seconds=time.perf_counter() - started)
            with self._changed:
                self._current = None
                self._taken.clear()
                self._changed.notify_all()

    def _do(self, task: _Task) -> None:
        pool = task.pool()
        if pool is None:
            self._lost(task.plan)
            return
        task.ready()
        plan = task.plan
        per_segment = len(plan.blocks) // len(plan.keys)

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            with self._copying:
                if plan.job in self._taken:
                    raise _Given
                self._copier.to_slot(slot, plan.blocks[index * per_segment : (index + 1) * per_segment])

        codes = self._store(pool, plan, fill)
        stored = sum(code in (Code.COMMITTED, Code.RESERVED) for code in codes)
        self._counters.add(tokens_stored=stored * self._tokens, tokens_not_stored=(len(codes) - stored) * self._tokens)
        refused = [key for key, code in zip(plan.keys, codes, strict=False) if plan.claimed and Code(code).refused]
        if refused:
            pool.claim(refused, 0.0)

    def _lost(self, plan: SavePlan) -> None:
        self._counters.add(tokens_not_stored=len(plan.keys) * self._tokens)
