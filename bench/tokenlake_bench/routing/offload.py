"""Instances with a GPU cache each, which offload to the memory of their node: the deployment of an engine with private
offload.

::

    arrives -> queues -> looked up in the GPU cache, then in the memory -> instance: prefill ..... decode -> finished
               (one at a time is copied to the GPU)                        takes GPU memory `- its segments are in the
                                                                                               memory

The memory is an LRU cache, as that of vLLM's OffloadingConnector: every request touches all segments of its prompt
there, those in the GPU cache included, and stores those that the memory lacks.
"""

from __future__ import annotations

from collections import deque

from tokenlake_bench.baselines import Accesses
from tokenlake_bench.routing.engine_cache import CacheChange, EngineCache, further_segments
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRequest, FleetRun
from tokenlake_bench.routing.instance import Job
from tokenlake_bench.routing.systems import System


class AheadRun(FleetRun):
    """A run whose instances look the prefix of one request up ahead, while the one before it is computed."""

    def __init__(self, accesses: Accesses, system: System, options: FleetOptions) -> None:
        super().__init__(accesses, system, options)
        self._queues: list[deque[Job]] = [deque() for _ in range(options.instances)]
        """By instance, the requests that were not looked up yet."""
        self._reading = [False] * options.instances
        """By instance, whether a request was looked up and has not begun to compute."""

    def _submit(self, instance: int, job: Job) -> None:
        self._queues[instance].append(job)
        self._read_ahead(instance)

    def _read_ahead(self, instance: int) -> None:
        """Look the next request up when the one before it has begun: it then finds the segments of that one."""
        queue = self._queues[instance]
        if queue and not self._reading[instance]:
            self._reading[instance] = True
            self._read(instance, queue.popleft())

    def _read(self, instance: int, job: Job) -> None:
        """Read the prefix of a request, then submit the request to the instance."""
        super()._submit(instance, job)

    def _find(self, instance: int, job: Job, request: FleetRequest) -> None:
        super()._find(instance, job, request)
        self._read_next(instance)

    def _read_next(self, instance: int) -> None:
        """Let the next request read, because the one that was read begins."""
        self._reading[instance] = False
        self._clock.after(0.0, self._read_ahead, instance)

    def _depth(self, instance: int, chain: tuple[int, ...]) -> int:
        """Length in segments of the longest prefix that the instance has."""
        return self._caches.match(chain, instance)


class OffloadRun(AheadRun):
    """One run of all requests through a system whose instances have GPU caches and private memory behind these. The
    prefix is copied to the GPU while the request before is computed."""

    def __init__(self, accesses: Accesses, system: System, options: FleetOptions) -> None:
        super().__init__(accesses, system, options)
        segments = options.engine_cache_segments(self._segment)
        self._engine_caches = [EngineCache(segments) for _ in range(options.instances)]

    def restart(self, instance: int) -> None:
        super().restart(instance)
        self._changed(instance, self._engine_caches[instance].clear())

    def _read(self, instance: int, job: Job) -> None:
        request = self._requests[job.number]
        chain = request.routed.chain
        own = self._engine_caches[instance].match(chain)
        depth = max(own, self._caches.match(chain, instance))
        job.cached = request.hit_tokens = depth * self._segment
        request.engine_tokens = own * self._segment
        self._caches.touch(chain[:depth], instance)
        loaded_s = self._clock.now + self._engine.host_copy_s((depth - own) * self._segment)
        self._clock.at(loaded_s, super()._read, instance, job)

    def _find(self, instance: int, job: Job, request: FleetRequest) -> None:
        """The request, which begins, was looked up before."""
        self._read_next(instance)

    def _depth(self, instance: int, chain: tuple[int, ...]) -> int:
        return max(super()._depth(instance, chain), self._engine_caches[instance].match(chain))

    def _take_memory(self, instance: int, job: Job, request: FleetRequest) -> None:
        chain = request.routed.chain
        further = 0 if self._system.perfect else further_segments(job, len(chain), self._segment)
        self._changed(instance, self._engine_caches[instance].begin(job.number, chain, further))

    def _keep(self, instance: int, job: Job, request: FleetRequest) -> None:
        self._caches.keep(request.routed.chain, instance)

    def _give_back_memory(self, instance: int, job: Job, request: FleetRequest) -> None:
        self._changed(instance, self._engine_caches[instance].end(job.number))

    def _changed(self, instance: int, change: CacheChange) -> None:
        """Tell the index of the caches, which a router with perfect knowledge reads, what the GPU cache holds."""
        self._caches.promise(tuple(change.added), instance)
        self._caches.withdraw(change.evicted, instance)
