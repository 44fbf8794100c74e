"""A rank's side: carries out the plans of the scheduler's side. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.identity import SegmentKey, WriteId
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.membership import Membership
from tokenlake_client.engines.vllm.plan import LoadPlan, LoadTime, SavePlan, StepPlan, StepReport
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.engines.vllm.reading import load_blocks
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.timing import StepWatch
from tokenlake_client.engines.vllm.writing import SaveWriter

__all__ = ["AbsentWorker", "WorkerSide"]

JOIN_S = 5.0
"""How long a background thread waits for the scheduler's session."""


class WorkerSide:
    """One per rank. The hooks of a step are called in the order in which they stand here."""

    def __init__(
        self,
        members: Membership[Any],
        copy: Any,
        shards: RankShards,
        settings: EngineSettings,
        block_tokens: int,
        counters: Counters,
        report: Callable[[str, BaseException], None],
    ) -> None:
        """`copy`: a `HostCopy`, or what stands in for it where the blocks are on a GPU."""
        self._members = members
        self._copy = copy
        self._shards = shards
        self._settings = settings
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._counters = counters
        self._report = report
        self._writer = SaveWriter(copy, self._store, counters, report, tokens=self._segment, queue=settings.write_queue)
        self._loader = _Loader(self._load)
        self._watch = StepWatch(copy)
        self._plan = StepPlan(0)
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._errors: set[int] = set()
        self._received: set[str] = set()
        self._loaded: dict[str, LoadTime] = {}

    # -- a step

    def begin(self, plan: StepPlan) -> None:
        """Before anything writes into blocks: blocks that were handed out again are read no more."""
        self._plan = plan
        self._held.update(plan.held)
        self._writer.take_back(plan.reused)
        self._watch.start()

    def load(self) -> None:
        """Fill blocks: now where the step waits, or has nothing else to do and needs no transfer; else behind it."""
        plan = self._plan
        before = plan.wait and bool(plan.loads)
        if not before:
            # vLLM calls this behind the forward pass where nothing in it needs a load.
            self._watch.stop(plan.step)
        for load in plan.loads:
            if plan.wait or (plan.idle and load.here) or not self._loader.submit(plan, load):
                self._load(plan, load)
        if plan.wait:
            with self._lock:
                self._received.clear()
        if before:
            self._watch.start()

    def save(self) -> None:
        """Queue what the step computed."""
        plan = self._plan
        self._watch.stop(plan.step)
        if not plan.saves:
            return
        if not self._shards.writes:
            self._writer.skip(plan.saves[-1].job)
            return
        ready = self._copy.computed()
        for save in plan.saves:
            # The session is joined by the thread that stores, not by the step.
            self._writer.submit(save, lambda: self._members.get(plan.session, plan.incarnation, JOIN_S), ready)

    def finished(self) -> tuple[set[str], set[str]]:
        """(finished requests whose blocks may go, requests whose loads ended) since the last call."""
        done = self._writer.done
        sent = {request for request, job in self._held.items() if job <= done}
        for request in sent:
            del self._held[request]
        with self._lock:
            received, self._received = self._received, set()
        return sent, received

    def errors(self) -> set[int]:
        """Blocks that could not be filled, since the last call."""
        with self._lock:
            errors, self._errors = self._errors, set()
        return errors

    def report(self) -> StepReport:
        """For the scheduler's side."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return StepReport(self._plan.step, self._writer.done, computed=self._watch.take(), loaded=loaded)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all segments are stored; False when `timeout` seconds were not enough."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Store what waits, for at most `timeout` seconds, and leave the session."""
        self._writer.close(timeout)
        self._loader.close(timeout)
        self._members.close()

    # -- inside

    def _load(self, plan: StepPlan, load: LoadPlan) -> None:
        """Never raises: what is not filled is an error of its blocks."""
        started = time.perf_counter()
        filled = 0
        took: LoadTime | None = None
        try:
            wait = {} if plan.wait else {"wait_s": JOIN_S}
            pool = self._members.get(plan.session, load.incarnation, **wait)
            if pool is not None:
                loaded = load_blocks(pool, load, self._copy, self._segment, self._block)
                filled, took = loaded.blocks, loaded.took
        except Exception as error:
            self._report("loading segments", error)
        with self._lock:
            self._errors.update(load.blocks[filled:])
            self._received.add(load.request)
            if took is not None:
                self._loaded[load.request] = took
        self._counters.add(
            loads_failed=filled < len(load.blocks),
            tokens_loaded=filled * self._block,
            load_seconds=time.perf_counter() - started,
        )

    def _store(self, pool: Any, plan: SavePlan, fill: Callable[[int, NDArray[np.uint8]], None]) -> bytes:
        codes: bytes
        if not plan.write:
            keys = [SegmentKey(key) for key in plan.keys]
            patience = self._settings.write_patience_s
            codes = pool.store_all(keys, fill, plan.first, patience, request=plan.request, hints=plan.hints)
            return codes
        write = pool.attach_write(WriteId(plan.write))
        try:
            if write.incarnation != plan.incarnation:
                raise Unreachable("the daemon restarted; what was reserved there is gone")
            for index, array in write.slots:
                fill(index, array)
        except BaseException:
            write.abort()
            raise
        codes = write.commit(self._shards.mask)
        write.leave()
        return codes


class AbsentWorker:
    """Stands for a rank that cannot serve the pool: no block is filled, and it says so, so that nobody computes with
    what was never loaded."""

    def __init__(self) -> None:
        self._plan = StepPlan(0)
        self._done = 0
        self._held: set[str] = set()

    def begin(self, plan: StepPlan) -> None:
        """As `WorkerSide`."""
        self._plan = plan

    def load(self) -> None:
        """Nothing is loaded."""

    def save(self) -> None:
        """Nothing is stored."""
        self._done = max([self._done, *(save.job for save in self._plan.saves)])
        self._held.update(request for request, _ in self._plan.held)

    def finished(self) -> tuple[set[str], set[str]]:
        """As `WorkerSide`: everything, at once."""
        held, self._held = self._held, set()
        return held, set() if self._plan.wait else {load.request for load in self._plan.loads}

    def errors(self) -> set[int]:
        """All blocks that were to be filled."""
        return {block for load in self._plan.loads for block in load.blocks}

    def report(self) -> StepReport:
        """For the scheduler's side, which asks no more for the pool."""
        return StepReport(self._plan.step, self._done, serves=False)

    def flush(self, timeout: float | None = None) -> bool:
        """Nothing waits."""
        return True

    def close(self, timeout: float = 0.0) -> None:
        """Nothing to leave."""


class _Loader:
    """Loads behind the steps, in order."""

    def __init__(self, load: Callable[[StepPlan, LoadPlan], None]) -> None:
        self._load = load
        self._changed = threading.Condition()
        self._waiting: deque[tuple[StepPlan, LoadPlan]] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, plan: StepPlan, load: LoadPlan) -> bool:
        """False: no thread can be started. Bounded by vLLM, which gives blocks to no more requests than it has."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tokenlake-load", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            self._waiting.append((plan, load))
            self._changed.notify_all()
            return True

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                task = self._waiting.popleft()
            self._load(*task)
