"""Routing by exploitation and exploration (E2) as in Preble.

Source: Srivatsa et al., *Preble* (ICLR 2025, arXiv 2407.00023), and `global_scheduler_with_time.py` of WukLab/preble. A
prompt whose cached part is longer than the rest goes to the least loaded of the instances with that part (exploit); any
other prompt goes to the instance of least cost (explore): its load of the last three minutes, plus the recomputation of
the segments that must be evicted, plus the prompt's own prefill.

Left out: moving prefixes away from an instance whose load is many times the smallest (Preble's code has this, turned
off), splitting a prefix over two instances when its queue doubles, and the order of requests within an instance.

Load is seconds of prefill and decode by the engine model. The lengths of answers and the times per token are taken as
the means of the answers so far; Preble fits both as well.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice

from tokenlake_bench.routing.base import Fleet, RoutedRequest, least
from tokenlake_bench.routing.outcome import Answered

WINDOW_S = 180.0
"""Seconds of the most recent time window over which an instance's load is counted."""
_NEW_ANSWER_WEIGHT = 0.05
"""Weight of a new answer in the running means of answer length and time per token."""


@dataclass(frozen=True, slots=True)
class _Sent:
    at_s: float
    instance: int
    seconds: float
    chain: tuple[int, ...]


class Preble:
    """Preble's E2 routing as a `Router`; the docstring of the module describes the rule."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._window: deque[_Sent] = deque()
        self._load = [0.0] * fleet.instances
        self._requests = [0] * fleet.instances
        self._accesses: list[Counter[int]] = [Counter() for _ in range(fleet.instances)]
        self._segment_s = fleet.engine.prefill_s(fleet.segment_tokens)
        self._output_tokens = 0.0
        self._token_s = 0.0

    def choose(self, request: RoutedRequest, now: float) -> int:
        self._forget(now - WINDOW_S)
        depths = self._fleet.knowledge.depths(request.chain)
        instance = self._instance(request, depths)
        seconds = self._prefill_s(request, depths[instance]) + self._output_tokens * self._token_s
        self._window.append(_Sent(now, instance, seconds, request.chain))
        self._load[instance] += seconds
        self._requests[instance] += 1
        self._accesses[instance].update(request.chain)
        self._fleet.knowledge.sent(request.chain, instance)
        return instance

    def finished(self, instance: int, answered: Answered) -> None:
        weight = _NEW_ANSWER_WEIGHT if self._output_tokens else 1.0
        self._output_tokens += weight * (answered.output_tokens - self._output_tokens)
        if answered.output_tokens > 1:
            self._token_s += weight * (answered.tpot_s - self._token_s)

    def _instance(self, request: RoutedRequest, depths: list[int]) -> int:
        fleet, load = self._fleet, self._load
        instances = range(fleet.instances)
        longest = max(depths)
        cached = longest * fleet.segment_tokens
        if cached > request.tokens - cached:
            return least(load, [i for i in instances if depths[i] == longest], fleet.rng)
        prefill_s = {depth: self._prefill_s(request, depth) for depth in dict.fromkeys(depths)}
        costs = [load[i] + prefill_s[depths[i]] for i in instances]
        room = fleet.capacity - len(request.chain)
        for instance, size in enumerate(fleet.knowledge.sizes()):
            excess = size - depths[instance] - room
            if excess > 0:
                costs[instance] += self._eviction_s(instance, excess)
        return least(costs, instances, fleet.rng)

    def _prefill_s(self, request: RoutedRequest, depth: int) -> float:
        cached = depth * self._fleet.segment_tokens
        return self._fleet.engine.prefill_s(max(1, request.tokens - cached), cached)

    def _eviction_s(self, instance: int, segments: int) -> float:
        """Seconds to recompute the segments that the instance would evict for the prompt, each weighted by its accesses
        per request."""
        if not self._requests[instance]:
            return 0.0
        accesses = self._accesses[instance]
        coldest = islice(self._fleet.knowledge.coldest(instance), segments)
        return self._segment_s * sum(accesses[segment] for segment in coldest) / self._requests[instance]

    def _forget(self, before_s: float) -> None:
        while self._window and self._window[0].at_s < before_s:
            sent = self._window.popleft()
            self._requests[sent.instance] -= 1
            # The sum of loads is set to 0 when no requests are left, because rounding errors would make equal loads
            # differ.
            busy = self._requests[sent.instance] > 0
            self._load[sent.instance] = self._load[sent.instance] - sent.seconds if busy else 0.0
            accesses = self._accesses[sent.instance]
            accesses.subtract(sent.chain)
            for segment in sent.chain:
                if not accesses[segment]:
                    del accesses[segment]
