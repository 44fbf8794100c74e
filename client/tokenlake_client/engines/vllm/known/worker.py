"""The side of the connector on a rank: executes the plans of the scheduler's side. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tokenlake.errors import Unreachable
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import Counts
from tokenlake_client.engines.vllm.known.load_cost import MAX_STEPS
from tokenlake_client.engines.vllm.known.ranks import RankShards
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan, SavePlan, StepPlan, StepReport
from tokenlake_client.engines.vllm.load_worker import LoadTime, load_parts
from tokenlake_client.engines.vllm.rank_part import RankPart
from tokenlake_client.engines.vllm.save_worker import Save
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.pool import Pool

IDLE_S = 0.002
"""Seconds: the longest wait of a step that computes nothing for the end of a load."""


class WorkerSide(RankPart):
    """The side of the connector on one rank. vLLM calls its hooks in each step in the order of the methods below."""

    def __init__(
        self,
        session: RankSession,
        copy: Any,
        shards: RankShards,
        settings: EngineSettings,
        block_tokens: int,
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        warn: Callable[[str], None],
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """As `RankPart`. `warn` logs why a load did not fill all its blocks."""
        super().__init__(session, copy, settings, counters, report, adapters)
        self._shards = shards
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._warn = warn
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
        self._saves.take_back(plan.reused)
        self._timer.start()

    def load(self) -> None:
        """Execute the loads of the step: at once if the step is idle and the load needs no transfer, otherwise in the
        background. vLLM calls this method after the forward pass."""
        plan = self._plan
        self._time(plan.step)
        ready = self._ready() if plan.loads else _nothing
        for load in plan.loads:
            if (plan.idle and load.local) or not self._loads.submit((plan, load, ready)):
                self._load(plan, load, ready)
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
            self._saves.skip(plan.saves[-1].job)
            return
        # If the device cannot mark the step, the background thread gives the jobs up and they count as done: vLLM keeps
        # the blocks of a finished request until its job is done.
        ready = self._ready()
        for save in plan.saves:
            # An adapter may be loaded again before the thread stores the segments, so the check belongs to the step.
            pool: Callable[[], Pool | None] = _no_pool
            if self._adapters.may_store(save.adapter):
                # The rank joins the session in the background thread, so that neither the step nor a request waits.
                join_s = self._settings.deadlines.connect_s
                pool = partial(self._session.get, plan.session, plan.incarnation, join_s)
            self._saves.submit(self._job(save, pool, ready))

    def _job(self, save: SavePlan, pool: Callable[[], Pool | None], ready: Callable[[], None]) -> Save:
        return Save(
            job=save.job,
            request=save.request,
            keys=save.keys,
            parts=save.parts,
            tokens=[save.tail or self._segment] * len(save.keys),
            pool=pool,
            ready=ready,
            first=save.first,
            write=save.write,
            incarnation=save.incarnation,
            mask=self._shards.mask,
            hints=save.hints,
            contents=save.contents,
            marked=save.marked,
        )

    def finished(self) -> tuple[set[str], set[str]]:
        """The names of finished requests whose blocks vLLM may free, and of requests whose loads ended, both since the
        last call."""
        done = self._saves.done
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
        return StepReport(self._saves.done, computed=self._timer.take(), loaded=loaded)

    def _end_loads(self, timeout: float) -> None:
        if not self._loads.flush(timeout):
            raise Unreachable("a load has not ended")

    def _load(self, plan: StepPlan, load: LoadPlan, ready: Callable[[], None]) -> None:
        """Fill the blocks of the load `load` of a step. `ready`: called before blocks are written. The blocks that
        could not be filled are added to `errors`. Never raises."""
        started = time.perf_counter()
        filled, unfilled = 0, ""
        load_time: LoadTime | None = None
        try:
            deadlines = self._settings.deadlines
            wait_s = min(load.at_most_s or deadlines.call_s, deadlines.call_s)
            serves = self._adapters.may_load(load.adapter)
            pool = self._session.get(plan.session, load.incarnation, wait_s) if serves else None
            if serves and pool is None:
                unfilled = "this rank has not joined the scheduler's session"
            if pool is not None:
                joined_s = time.perf_counter() - started
                if load.at_most_s:
                    load = replace(load, at_most_s=max(deadlines.grace_s, load.at_most_s - joined_s))
                ready()
                parts = load.parts(self._segment, self._block)
                loaded = load_parts(
                    pool, load.leases, load.incarnation, load.request, parts, self._copy, at_most_s=load.at_most_s
                )
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
        )


def _nothing() -> None:
    """A step without loads writes no blocks."""


def _no_pool() -> None:
    """The save is given up."""


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
        """The names of all finished requests whose blocks vLLM keeps for this step, and of all requests with a load in
        it."""
        held, self._held = self._held, set()
        return held, {load.request for load in self._plan.loads}

    def errors(self) -> set[int]:
        """The numbers of all blocks of the step's loads: vLLM recomputes their tokens."""
        return {block for load in self._plan.loads for block in load.blocks}

    def report(self) -> StepReport:
        """A report that this rank cannot serve the pool: the scheduler's side does not use the pool any more."""
        return StepReport(self._done, serves=False)

    def flush(self, timeout: float | None = None) -> bool:
        """True: no job waits."""
        return True

    def sleep(self) -> None:
        """Does nothing."""

    def wake(self) -> None:
        """Does nothing."""

    def close(self, timeout: float = 0.0) -> None:
        """Does nothing."""


class StepTimer:
    """Measures the forward passes of a rank's steps. It never waits for the device: the time of a step on a GPU becomes
    known some steps later. For the thread that runs the steps."""

    def __init__(self, device: Any) -> None:
        """`device`: makes timestamps (`copies.HostCopy.mark`, `between`)."""
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
