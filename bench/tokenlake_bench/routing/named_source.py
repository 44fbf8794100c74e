"""The design opposite to a pool: private caches, no directory, and a router that names for each request the instance
and the source from which this instance pulls what it lacks.

::

    caches -- stored, evicted --> view of the router, some seconds old
                                     |
    arrives -> router: instance, source -> queues -> own cache, then pulled from the source -> instance: prefill ...
                                           (one at a time)   `- as far as the source still has it

- The instance pulls behind its own prefix, in one transfer, to its memory, where the segments are kept like computed
  ones (LRU). The source counts the pull as an access. The instance computes segments that the source has evicted.
- Transfers queue at the network adapters of both nodes, as those of the pool.
- A request may pull only what the source had when the router's view was made: a prefix that the source is computing is
  not waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tokenlake_bench.baselines import Accesses
from tokenlake_bench.routing.base import Fleet
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRequest
from tokenlake_bench.routing.instance import Job
from tokenlake_bench.routing.knowledge import TrackedCaches
from tokenlake_bench.routing.kv_router import KvRouter, Source
from tokenlake_bench.routing.offload import AheadRun, OffloadRun
from tokenlake_bench.routing.systems import System
from tokenlake_bench.simulation.network import Link, Network

Report = Callable[[int, Sequence[int], Sequence[int]], None]
"""Takes the number of an instance, the segments that its cache stored and those that it evicted."""


class ReportedCaches(TrackedCaches):
    """Caches that report each change."""

    def __init__(self, capacities: Sequence[int], report: Report) -> None:
        super().__init__(capacities)
        self._report = report

    def touch(self, chain: tuple[int, ...], instance: int) -> None:
        stored = [segment for segment in chain if segment not in self._caches[instance]]
        self._note_owner(chain, instance)
        self._evicted(self._caches[instance].touch(chain), instance, stored)

    def resize(self, instance: int, capacity: int) -> None:
        self._evicted(self._caches[instance].resize(capacity), instance)

    def _evicted(self, segments: Sequence[int], instance: int, stored: Sequence[int] = ()) -> None:
        self._drop(segments, instance)
        if stored or segments:
            self._report(instance, stored, segments)


class NamedSourceRun(AheadRun):
    """One run of all requests through instances that pull from named sources."""

    def __init__(self, accesses: Accesses, system: System, options: FleetOptions) -> None:
        super().__init__(accesses, system, options)
        instances = options.instances
        self._age_s = system.view_age_s or 0.0
        self._view = TrackedCaches([0] * instances)
        self._caches = ReportedCaches([self._capacity] * instances, self._report)
        rng = random.Random(options.seed)
        router = system.router(Fleet(instances, self._capacity, self._segment, self._engine, self._view, rng))
        assert isinstance(router, KvRouter), "the rule that names sources"
        self._router = self._kv = router
        self._network = Network(Link(bandwidth=self._engine.network_rate(nvlink=options.nvlink)), instances)
        self._pulled: dict[int, tuple[int, int]] = {}
        """By number of each request that pulled and has not begun: (its own depth, that of the source)."""

    def _report(self, instance: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self._clock.after(self._age_s, self._see, instance, tuple(stored), evicted)

    def _see(self, instance: int, stored: tuple[int, ...], evicted: Sequence[int]) -> None:
        self._view.promise(stored, instance)
        self._view.withdraw(evicted, instance)

    def _read(self, instance: int, job: Job) -> None:
        nothing = Source(instance, 0)
        source = self._kv.sources.pop(job.number, nothing) if self._system.pulls else nothing
        chain = self._requests[job.number].routed.chain
        own = self._depth(instance, chain)
        there = self._caches.match(chain[: source.depth], source.instance)
        if there <= own:
            super()._read(instance, job)
            return
        nbytes = (there - own) * self._segment * self._engine.model.cache_bytes
        self._caches.touch(chain[:there], source.instance)
        self._sent.add(self._clock.now, source.instance, nbytes)
        _, arrived_s = self._network.transfer(self._clock.now, source.instance, instance, nbytes)
        self._pulled[job.number] = own, there
        self._clock.at(arrived_s, self._arrived, instance, job, chain[:there])

    def _arrived(self, instance: int, job: Job, chain: tuple[int, ...]) -> None:
        self._caches.touch(chain, instance)
        super()._read(instance, job)

    def _find(self, instance: int, job: Job, request: FleetRequest) -> None:
        super()._find(instance, job, request)
        own, there = self._pulled.pop(job.number, (0, 0))
        request.remote_tokens = max(0, min(request.hit_tokens, there * self._segment) - own * self._segment)

    def _keep(self, instance: int, job: Job, request: FleetRequest) -> None:
        self._kv.first_token(job.number)
        super()._keep(instance, job, request)

    def _give_back_memory(self, instance: int, job: Job, request: FleetRequest) -> None:
        self._kv.last_token(job.number)
        super()._give_back_memory(instance, job, request)


class NamedSourceOffloadRun(NamedSourceRun, OffloadRun):
    """The same with a GPU cache in front of the memory of each instance. A pull ends in the memory, from which it is
    copied to the GPU."""
