"""Prefill and decode on separate instances, as in Mooncake (FAST '25, arXiv 2407.00079) and DistServe (OSDI '24).

::

    arrives -> router -> prefill instance: waits -> room at a decode instance -> prefill -> first token
                                                                                    `- cache --> decode -> finished

Prefill instances have private caches, among which the router chooses. A prefill waits until its decode instance, the
one with the most room, has room for the prompt and the answer: otherwise computed prompts would wait for room between
their first and second token. The whole cache of a prompt is handed over, layer by layer from the prefill's beginning
on, in the order in which prefills begin; decode instances keep no caches of finished requests and share no prefixes.
"""

from __future__ import annotations

import math

from tokenlake_bench.baselines import Accesses
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRequest, FleetRun
from tokenlake_bench.routing.instance import Job
from tokenlake_bench.routing.systems import System
from tokenlake_bench.simulation.network import Link, Network


class SplitRun(FleetRun):
    """One run of all requests through a system whose first instances compute prompts and whose others decode."""

    def __init__(self, accesses: Accesses, system: System, options: FleetOptions) -> None:
        super().__init__(accesses, system, options)
        self._prefilling = system.routed(options.instances)
        link = Link(bandwidth=options.engine.network_rate(nvlink=options.nvlink))
        self._network = Network(link, options.instances)
        self._memory = math.inf if system.perfect else self._capacity * self._segment
        self._taken = dict.fromkeys(range(self._prefilling, options.instances), 0)
        """By decode instance, the number of tokens of its `_memory` that are reserved."""
        self._decoders: dict[int, tuple[int, float]] = {}
        """By number of each request whose prefill has begun: its decode instance, and the time at which its cache is
        there."""

    def _submit(self, instance: int, job: Job) -> None:
        job.output = 1
        super()._submit(instance, job)

    def _admits(self, instance: int, job: Job) -> bool:
        if instance >= self._prefilling:
            return True
        needs = self._needs(self._requests[job.number])
        decoder = min(self._taken, key=self._taken.__getitem__)
        taken = self._taken[decoder]
        if taken and taken + needs > self._memory:
            return False
        self._taken[decoder] += needs
        self._decoders[job.number] = decoder, math.inf
        return True

    def _needs(self, request: FleetRequest) -> int:
        """Number of tokens for which the request takes room at its decode instance: none if it has no second token."""
        prompt = request.prompt
        return prompt.tokens + prompt.output_tokens if prompt.output_tokens > 1 else 0

    def _begin(self, instance: int, job: Job, now: float) -> None:
        if instance >= self._prefilling:
            return
        super()._begin(instance, job, now)
        decoder, _ = self._decoders[job.number]
        if self._needs(self._requests[job.number]):
            nbytes = job.prompt * self._engine.model.cache_bytes
            self._decoders[job.number] = decoder, self._network.transfer(now, instance, decoder, nbytes)[1]
            self._sent.add(now, instance, nbytes)

    def _first(self, instance: int, job: Job, now: float) -> None:
        if instance < self._prefilling:
            super()._first(instance, job, now)

    def _finish(self, instance: int, job: Job, now: float) -> None:
        request = self._requests[job.number]
        decoder, there_s = self._decoders[job.number]
        if instance < self._prefilling:
            self._give_back_memory(instance, job, request)
            if self._needs(request):
                # The first token is computed: with it the prompt is one longer, and the answer one shorter.
                prompt, output = request.prompt.tokens, request.prompt.output_tokens
                decoding = Job(job.number, prompt + 1, output - 1, cached=prompt)
                self._clock.at(max(now, there_s), self._instances[decoder].submit, decoding)
                return
        del self._decoders[job.number]
        self._taken[decoder] -= self._needs(request)
        self._answer(request, now)
        for each in self._instances[: self._prefilling]:
            each.resume()
