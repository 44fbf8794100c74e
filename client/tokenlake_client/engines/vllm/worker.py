"""The side of the connector on a rank: executes the plans of the scheduler's side. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.identity import SegmentKey, WriteId
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.counters import Counters
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import Counts
from tokenlake_client.engines.vllm.load_cost import MAX_STEPS
from tokenlake_client.engines.vllm.load_worker import load_blocks
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.engines.vllm.save_worker import SaveWriter
from tokenlake_client.engines.vllm.session import WAIT_S, RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.step_plan import LoadPlan, LoadTime, SavePlan, StepPlan, StepReport

IDLE_S = 0.002
"""Seconds: the longest wait of a step that computes nothing for the end of a load."""


class WorkerSide:
    """The side of the connector on one rank. vLLM calls its hooks in each step in the order of the methods below."""

    def __init__(
        self,
        session: RankSession[Any],
        copy: Any,
        shards: RankShards,
        settings: EngineSettings,
        block_tokens: int,
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        warn: Callable[[str], None],
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """`copy`: the object that copies between slots and blocks, a `HostCopy` or a `DeviceCopy`. `warn` logs why a
        load did not fill all its blocks. `adapters`: the LoRA adapters that vLLM has loaded on this rank; None:
        requests have none."""
        self._session = session
        self._copy = copy
        self._shards = shards
        self._settings = settings
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._counters = counters
        self._report = report
        self._warn = warn
        self._adapters = adapters
        self._writer = SaveWriter(copy, self._store, counters, report, tokens=self._segment, queue=settings.write_queue)
        # This queue has no limit of its own: vLLM gives blocks to a limited number of requests, each with at most one
        # load.
        self._loads: BackgroundQueue[tuple[StepPlan, LoadPlan, Callable[[], None]]] = BackgroundQueue(
            lambda task: self._load(*task), "tokenlake-load"
        )
        self._timer = StepTimer(copy)
        self._plan = StepPlan(0)
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        """Guards the results of loads (the fields below), to which a background thread adds."""
        self._errors: set[int] = set()
        self._received: set[str] = set()
        self._loaded: dict[str, LoadTime] = {}
        self._ended = threading.Event()
        """Set while a load has ended that `finished` has not returned."""

    def begin(self, plan: StepPlan) -> None:
        """Begin a step of the engine, before any block is written: the saves whose blocks vLLM gave to other requests
        are given up."""
        self._plan = plan
        self._held.update(plan.held)
        self._writer.take_back(plan.reused)
        self._timer.start()

    def load(self) -> None:
        """Execute the loads of the step: a load is executed at once if the step waits for it, or if the step is idle
        and the load needs no transfer; otherwise in the background."""
        plan = self._plan
        before_forward = plan.wait and bool(plan.loads)
        if not before_forward:
            # Where the step does not wait for loads, vLLM calls this method after the forward pass.
            self._time(plan.step)
        ready = self._ready() if plan.loads else _nothing
        for load in plan.loads:
            if plan.wait or (plan.idle and load.local) or not self._loads.submit((plan, load, ready)):
                self._load(plan, load, ready)
        if plan.wait:
            with self._lock:
                self._received.clear()
        if before_forward:
            self._timer.start()
        if plan.idle:
            # vLLM repeats idle steps without a pause while requests wait for loads or lookups. Each of the many copies
            # of a load needs Python's lock, which such steps would hold most of the time.
            self._ended.wait(IDLE_S)

    def _ready(self) -> Callable[[], None]:
        """Returns a function that lets the copies of the thread that calls it begin behind the steps so far. vLLM may
        give away the blocks of a request before the device has executed the last step that writes them. Never raises:
        an error is raised by the function, in the thread that executes the loads or the saves, and fails them."""
        try:
            ready: Callable[[], None] = self._copy.computed()
        except Exception as error:
            ready = partial(_fail, error)
        return ready

    def _time(self, step: int) -> None:
        """End the measurement of a step. Never raises: an error must not keep a load from being executed or failed."""
        try:
            self._timer.stop(step)
        except Exception as error:
            self._report("timing a step", error)

    def save(self) -> None:
        """Queue the segments that the step completed, to be stored in the background."""
        plan = self._plan
        self._time(plan.step)
        if not plan.saves:
            return
        if not self._shards.writes:
            self._writer.skip(plan.saves[-1].job)
            return
        # If the device cannot mark the step, the background thread gives the jobs up and they count as done: vLLM keeps
        # the blocks of a finished request until its job is done.
        ready = self._ready()
        for save in plan.saves:
            # An adapter may be loaded again before the thread stores the segments, so the check belongs to the step.
            if self._adapters is not None and not self._adapters.may_store(save.adapter):
                self._writer.submit(save, lambda: None, ready)
                continue
            # The rank joins the session in the background thread, so that neither the step nor a request waits for it.
            join_s = self._settings.deadlines.connect_s
            self._writer.submit(save, partial(self._session.get, plan.session, plan.incarnation, join_s), ready)

    def finished(self) -> tuple[set[str], set[str]]:
        """The names of finished requests whose blocks vLLM may free, and of requests whose loads ended, both since the
        last call."""
        done = self._writer.done
        freed = {request for request, job in self._held.items() if job <= done}
        for request in freed:
            del self._held[request]
        with self._lock:
            received, self._received = self._received, set()
            self._ended.clear()
        return freed, received

    def errors(self) -> set[int]:
        """The numbers of the blocks that loads should have filled since the last call and could not."""
        with self._lock:
            errors, self._errors = self._errors, set()
        return errors

    def report(self) -> StepReport:
        """This rank's report on the step of the engine, for the scheduler's side."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return StepReport(self._plan.step, self._writer.done, computed=self._timer.take(), loaded=loaded)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all segments are stored; False when `timeout` seconds were not enough."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Store the waiting segments, for at most `timeout` seconds, and leave the session."""
        self._writer.close(timeout)
        self._loads.close(timeout, drain=False)
        self._session.close()

    def _load(self, plan: StepPlan, load: LoadPlan, ready: Callable[[], None]) -> None:
        """Fill the blocks of the load `load` of a step. `ready`: called before blocks are written. The blocks that
        could not be filled are added to `errors`. Never raises."""
        started = time.perf_counter()
        filled, unfilled = 0, ""
        load_time: LoadTime | None = None
        try:
            deadlines = self._settings.deadlines
            # A step that waits for the load is not delayed for as long as a load in the background.
            longest_s = WAIT_S if plan.wait else deadlines.call_s
            wait_s = min(load.at_most_s or longest_s, longest_s)
            serves = self._adapters is None or self._adapters.may_load(load.adapter)
            pool = self._session.get(plan.session, load.incarnation, wait_s) if serves else None
            if serves and pool is None:
                unfilled = "this rank has not joined the scheduler's session"
            if pool is not None:
                joined_s = time.perf_counter() - started
                if load.at_most_s:
                    load = replace(load, at_most_s=max(deadlines.grace_s, load.at_most_s - joined_s))
                ready()
                loaded = load_blocks(pool, load, self._copy, self._segment, self._block)
                filled, load_time, unfilled = loaded.blocks, loaded.time, loaded.unfilled
        except Exception as error:
            self._report("loading segments", error)
        if unfilled:
            self._warn(f"vLLM computes tokens of request {load.request!r} that it was to load: {unfilled}")
        with self._lock:
            self._errors.update(load.blocks[filled:])
            self._received.add(load.request)
            self._ended.set()
            if load_time is not None:
                self._loaded[load.request] = load_time
        self._counters.add(
            loads_failed=filled < len(load.blocks),
            tokens_loaded=min(filled * self._block, load.stop - load.start),
            load_seconds=time.perf_counter() - started,
        )

    def _store(self, pool: Any, plan: SavePlan, fill: Callable[[int, NDArray[np.uint8]], None], since: float) -> bytes:
        codes: bytes
        if not plan.write:
            keys = [SegmentKey(key) for key in plan.keys]
            # While the pool refuses writes, the jobs of a full queue together wait no longer than one of them.
            patience = max(0.0, self._settings.write_patience_s - (time.monotonic() - since))
            codes = pool.store_all(
                keys, fill, plan.first, patience, request=plan.request, hints=plan.hints, contents=plan.contents
            )
            return codes
        write = pool.attach_write(WriteId(plan.write))
        try:
            if write.incarnation != plan.incarnation:
                raise Unreachable("the daemon has restarted, so the reserved slots no longer exist")
            for index, array in write.slots:
                fill(index, array)
        except BaseException:
            write.abort()
            raise
        codes = write.commit(self._shards.mask)
        write.leave()
        return codes


def _nothing() -> None:
    """A step without loads writes no blocks."""


def _fail(error: Exception) -> None:
    raise error


class UnservedWorker:
    """The worker of a rank that cannot serve the pool. It fills no block, and reports each block of a load as an error,
    so that vLLM recomputes the tokens instead of using blocks that were never loaded."""

    def __init__(self) -> None:
        self._plan = StepPlan(0)
        self._done = 0
        self._held: set[str] = set()

    def begin(self, plan: StepPlan) -> None:
        """Take the plan of the engine's next step."""
        self._plan = plan

    def load(self) -> None:
        """Does nothing."""

    def save(self) -> None:
        """Count the save jobs of the step as done: a rank that cannot serve the pool stores nothing."""
        self._done = max([self._done, *(save.job for save in self._plan.saves)])
        self._held.update(request for request, _ in self._plan.held)

    def finished(self) -> tuple[set[str], set[str]]:
        """The names of all finished requests whose blocks vLLM keeps for this step, and, unless the step waits for its
        loads, of all requests with a load in it."""
        held, self._held = self._held, set()
        return held, set() if self._plan.wait else {load.request for load in self._plan.loads}

    def errors(self) -> set[int]:
        """The numbers of all blocks of the step's loads: vLLM recomputes their tokens."""
        return {block for load in self._plan.loads for block in load.blocks}

    def report(self) -> StepReport:
        """A report that this rank cannot serve the pool: the scheduler's side does not use the pool any more."""
        return StepReport(self._plan.step, self._done, serves=False)

    def flush(self, timeout: float | None = None) -> bool:
        """True: no job waits."""
        return True

    def close(self, timeout: float = 0.0) -> None:
        """Does nothing."""


class Timestamps(Protocol):
    """Makes timestamps on the device that computes the steps."""

    def mark(self) -> Any:
        """A timestamp on the device that computes the steps, after all work that was queued so far."""
        ...

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps of the device; None while it has not reached the second."""
        ...


class StepTimer:
    """Measures the forward passes of a rank's steps. It never waits for the device: the time of a step on a GPU becomes
    known some steps later. For the thread that runs the steps."""

    def __init__(self, device: Timestamps) -> None:
        self._device = device
        self._first: Any = None
        self._ended: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_STEPS)

    def start(self) -> None:
        """Record that the forward pass begins. A later call before `stop` replaces this one."""
        self._first = self._device.mark()

    def stop(self, step: int) -> None:
        """Record that the forward pass of `step` has been queued on the device. Only the first call after `start`
        counts."""
        if self._first is not None:
            self._ended.append((step, self._first, self._device.mark()))
            self._first = None

    def take(self) -> dict[int, float]:
        """The seconds of the forward passes, by step, that have become known since the last call."""
        known: dict[int, float] = {}
        while self._ended:
            step, first, last = self._ended[0]
            seconds = self._device.between(first, last)
            if seconds is None:
                break
            known[step] = seconds
            self._ended.popleft()
        return known
