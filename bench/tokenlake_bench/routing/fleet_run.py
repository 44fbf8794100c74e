"""One simulated system under a workload: a router, the instances and their caches, on one clock. A cache shares the
memory of its instance with the requests under way; `offload` has instances with a GPU cache and memory behind it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tokenlake.errors import ConfigurationError
from tokenlake_bench.balance import BusyLog, SendLog
from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.routing.base import SGLANG, CacheAwareSettings, Fleet, RoutedRequest
from tokenlake_bench.routing.clocked import ClockedInstance
from tokenlake_bench.routing.instance import BATCH, CHUNK_TOKENS, InstanceOptions, Job, Steps
from tokenlake_bench.routing.knowledge import OwnRecord, TrackedCaches
from tokenlake_bench.routing.outcome import Answered, SystemRow, row_of
from tokenlake_bench.routing.systems import System
from tokenlake_bench.turns import ClockedTurns
from tokenlake_testing.clock import Clock

_PROGRESS = 100
"""Number of requests between two calls of the callback `progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of a simulation that are equal for every compared system. `capacity_tokens`: KV cache of all
    instances together, split evenly. `engine_cache_tokens`: each instance has a GPU cache of so many tokens, and
    its part of `capacity_tokens` is the memory of its node, to which it offloads (`offload`); None:
    `capacity_tokens` is all. `chunk_tokens` and `batch` are those of each instance (`InstanceOptions`).
    `cache_aware`: settings of the cache-aware router. `nvlink`: instances are connected by NVLink in place of their
    network adapters. `reference`: the engine whose times are those of a request alone in the objective; None:
    `engine`. `restart_every_s`: seconds from the restart of one instance to that of the next, in turn; None: none
    restarts."""

    instances: int
    capacity_tokens: int
    engine: EngineModel
    engine_cache_tokens: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    batch: int = BATCH
    cache_aware: CacheAwareSettings = SGLANG
    nvlink: bool = False
    reference: EngineModel | None = None
    restart_every_s: float | None = None
    seed: int = 0

    def capacity(self, segment_tokens: int) -> int:
        """Number of segments that fit in each instance's part of `capacity_tokens`; its GPU cache does not count.
        Raises ConfigurationError where not one fits."""
        segments = self.capacity_tokens // max(1, self.instances) // segment_tokens
        if segments < 1:
            smallest = self.instances * segment_tokens
            raise ConfigurationError("capacity_tokens", self.capacity_tokens, f"at least {smallest}")
        return segments

    def engine_cache_segments(self, segment_tokens: int) -> int:
        """Number of segments of the GPU cache of each instance. Raises ConfigurationError where not one fits."""
        segments = (self.engine_cache_tokens or 0) // segment_tokens
        if segments < 1:
            raise ConfigurationError("engine_cache_tokens", self.engine_cache_tokens, f"at least {segment_tokens}")
        return segments


def at_rate(accesses: Accesses, rate: float) -> Accesses:
    """The same requests with arrival times scaled so that on average `rate` requests per second arrive by their
    recorded times. Pauses after answers stay: they do not depend on how many conversations begin per second. Raises
    ConfigurationError."""
    if not 0 < rate < math.inf:
        raise ConfigurationError("rate", rate, "a finite number of requests per second above 0")
    prompts = accesses.prompts
    duration_s = prompts[-1].at_s - prompts[0].at_s
    if duration_s <= 0:
        raise ConfigurationError("rate", rate, "a workload whose requests do not all come at once")
    scale = (len(prompts) - 1) / rate / duration_s
    moved = [replace(each, at_s=(each.at_s - prompts[0].at_s) * scale) for each in prompts]
    return Accesses(accesses.segment_tokens, moved)


@dataclass(slots=True, eq=False)
class FleetRequest:
    """A request that has arrived and is not answered yet."""

    number: int
    """Number of the request in the workload; `routed` has its number in the order of arrival."""
    prompt: Prompt
    at_s: float
    routed: RoutedRequest
    instance: int
    hit_tokens: int = 0
    engine_tokens: int = 0
    """Number of those of the `hit_tokens` that are in the instance's GPU cache."""
    remote_tokens: int = 0
    """Number of those of the `hit_tokens` that came from another instance for this request."""
    first_s: float = 0.0


class FleetRun:
    """One run of all requests through a system, once."""

    def __init__(self, accesses: Accesses, system: System, options: FleetOptions) -> None:
        self._accesses = accesses
        self._segment = accesses.segment_tokens
        self._system = system
        self._options = options
        self._engine = options.engine
        instances, self._capacity = options.instances, options.capacity(self._segment)
        routed = system.routed(instances)
        self._caches = TrackedCaches([self._capacity] * routed)
        reach = max(self._capacity, (options.engine_cache_tokens or 0) // self._segment)
        record = (system.record_tokens or reach * self._segment) // self._segment
        knowledge = self._caches if system.perfect else OwnRecord(routed, record)
        rng = random.Random(options.seed)
        self._router = system.router(
            Fleet(routed, reach, self._segment, self._engine, knowledge, rng, options.cache_aware)
        )
        # In the systems whose names end in `-perfect` the memory for requests under way is unlimited and is not taken
        # from the caches.
        memory = None if system.perfect else options.engine_cache_tokens or self._capacity * self._segment
        limits = InstanceOptions(options.chunk_tokens, options.batch, memory, self._segment)
        self._clock = Clock()
        self._turns = ClockedTurns(accesses.prompts, self._clock, self._arrive)
        self._sent, self._busy = SendLog(instances), BusyLog(instances)
        self._instances = [
            ClockedInstance(
                self._clock,
                self._steps(i),
                limits,
                admits=partial(self._admits, i),
                begin=partial(self._begin, i),
                first=partial(self._first, i),
                finished=partial(self._finish, i),
                ran=partial(self._busy.add, i),
            )
            for i in range(instances)
        ]
        self._held = [0] * instances
        """By instance, the memory in tokens that requests under way need in addition to the segments in the cache."""
        self._requests: list[FleetRequest] = []
        self.answers: list[Answered] = []
        self._progress: Callable[[int], None] = lambda done: None

    def run(self, progress: Callable[[int], None]) -> SystemRow:
        """Simulate until the last token of the last request, and return the row of the system."""
        self._progress = progress
        if self._options.restart_every_s is not None:
            self._clock.after(self._options.restart_every_s, self._restart_next, 0, self._options.restart_every_s)
        self._turns.start()
        self._clock.run_until(math.inf)
        progress(len(self._requests))
        return row_of(
            self.answers,
            self._sent,
            self._busy,
            self._options.reference or self._engine,
            duplication=self._caches.copies_per_segment(),
            node_tokens=self._capacity * self._segment,
            closed_loop=self._turns.closed,
        )

    def _arrive(self, number: int, prompt: Prompt, now: float) -> None:
        index = len(self._requests)
        routed = RoutedRequest(index, prompt.tokens, prompt.chain)
        instance = self._router.choose(routed, now)
        self._caches.promise(routed.chain, instance)
        self._requests.append(FleetRequest(number, prompt, now, routed, instance))
        self._submit(instance, Job(index, prompt.tokens, max(1, prompt.output_tokens), prompt.chain))
        if index % _PROGRESS == 0:
            self._progress(index)

    def _restart_next(self, instance: int, every_s: float) -> None:
        if len(self.answers) < len(self._accesses.prompts):
            self.restart(instance)
            self._clock.after(every_s, self._restart_next, (instance + 1) % self._options.instances, every_s)

    def restart(self, instance: int) -> None:
        """Restart the engine of an instance, which then finds nothing that was cached there. Requests under way go
        on."""
        self._caches.resize(instance, 0)
        self._caches.resize(instance, self._capacity)
        self._hold(instance, 0)

    def _steps(self, instance: int) -> Steps:
        """The durations of an instance's forward passes."""
        return self._engine

    # -- callbacks of the instances

    def _admits(self, instance: int, job: Job) -> bool:
        """Whether a job may begin for which its instance has room."""
        return True

    def _begin(self, instance: int, job: Job, now: float) -> None:
        request = self._requests[job.number]
        self._find(instance, job, request)
        self._take_memory(instance, job, request)

    def _first(self, instance: int, job: Job, now: float) -> None:
        request = self._requests[job.number]
        request.first_s = now
        self._keep(instance, job, request)

    def _finish(self, instance: int, job: Job, now: float) -> None:
        request = self._requests[job.number]
        self._give_back_memory(instance, job, request)
        self._answer(request, now)

    def _answer(self, request: FleetRequest, now: float) -> None:
        """Note the answer to a request, whose last token comes now."""
        prompt = request.prompt
        answer = Answered(
            at_s=request.at_s,
            prompt_tokens=prompt.tokens,
            output_tokens=max(1, prompt.output_tokens),
            hit_tokens=request.hit_tokens,
            remote_tokens=request.remote_tokens,
            first_s=request.first_s,
            finished_s=now,
            engine_tokens=request.engine_tokens,
        )
        self.answers.append(answer)
        self._router.finished(request.instance, answer)
        self._turns.answered(request.number)

    # -- caches and memory

    def _submit(self, instance: int, job: Job) -> None:
        """Pass a job on to its instance."""
        self._instances[instance].submit(job)

    def _find(self, instance: int, job: Job, request: FleetRequest) -> None:
        """Find the cached prefix of a request whose prefill begins."""
        chain = request.routed.chain
        depth = self._caches.match(chain, instance)
        job.cached = request.hit_tokens = depth * self._segment
        # The prefix counts as accessed now, so that it is not evicted while it is read.
        self._caches.touch(chain[:depth], instance)

    def _take_memory(self, instance: int, job: Job, request: FleetRequest) -> None:
        """Take the memory of a job that begins."""
        self._hold(instance, job.prompt + job.output - job.cached)

    def _keep(self, instance: int, job: Job, request: FleetRequest) -> None:
        """Keep the segments of a prompt that is computed."""
        chain = request.routed.chain
        # The memory of the computed segments now belongs to the cache, so the request no longer holds it.
        self._hold(instance, job.cached - len(chain) * self._segment)
        self._caches.keep(chain, instance)

    def _give_back_memory(self, instance: int, job: Job, request: FleetRequest) -> None:
        """Give back the memory of a job that has ended."""
        self._hold(instance, len(request.routed.chain) * self._segment - job.prompt - job.output)

    def _hold(self, instance: int, tokens: int) -> None:
        """Add `tokens` (possibly negative) to the memory that requests under way hold at the instance, and resize the
        instance's cache to the rest."""
        self._held[instance] += tokens
        if self._system.perfect:
            return
        free = self._capacity * self._segment - self._held[instance]
        self._caches.resize(instance, max(0, free // self._segment))
