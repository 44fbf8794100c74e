"""The rule of a router that names the source: NVIDIA Dynamo's KV router with hints for KVCR.

Sources: ai-dynamo/dynamo, `docs/components/router/router-concepts.md` (the cost) and pull request 11695 (the hint);
ai-dynamo/kvcr, `docs/design_overview.md` (no directory). A prompt goes to the instance of least cost, in blocks::

    cost = prompt tokens to compute, of the requests without a first token and of this one, less its cached prefix
           + different blocks of the requests under way, this one included

The first line is multiplied by `prefill_load_scale`, 1 by default. Sources do not change this choice. After it, the
instance with the longest prefix is the source, if that prefix is longer than the chosen instance's.

Left out: a lower weight for what lies in the host's memory (0.75 by default there), and blocks of answers, which the
router counts as an option.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenlake_bench.routing.base import Fleet, RoutedRequest, least
from tokenlake_bench.routing.outcome import Answered


class Source(NamedTuple):
    """An instance that has the first `depth` segments of a prompt, as far as the router knows."""

    instance: int
    depth: int


@dataclass(slots=True)
class _Load:
    """What the router knows of the requests under way at one instance."""

    prefill: int = 0
    """Number of prompt tokens to compute of the requests without a first token."""
    users: Counter[int] = field(default_factory=Counter)
    """By segment, the number of requests that have it."""
    tails: int = 0
    """Number of requests with a block behind their last full segment, which no other request shares."""


class _Sent(NamedTuple):
    request: RoutedRequest
    instance: int
    new: int


class KvRouter:
    """Dynamo's rule as a `Router`. It knows the caches by events and the load by the requests that it sent; of an
    answer it observes the first token, too."""

    def __init__(self, fleet: Fleet, prefill_scale: float = 1.0) -> None:
        self._fleet = fleet
        self._prefill_scale = prefill_scale
        self._loads = [_Load() for _ in range(fleet.instances)]
        self._sent: dict[int, _Sent] = {}
        self.sources: dict[int, Source] = {}
        """By number of the request, the source that was named and not taken out yet; none where the chosen instance
        has the longest prefix."""

    def choose(self, request: RoutedRequest, now: float) -> int:
        fleet, chain = self._fleet, request.chain
        depths = fleet.knowledge.depths(chain)
        tail = int(request.tokens > len(chain) * fleet.segment_tokens)
        costs = []
        for load, depth in zip(self._loads, depths, strict=True):
            prefill = (load.prefill + request.tokens - depth * fleet.segment_tokens) / fleet.segment_tokens
            new = sum(segment not in load.users for segment in chain)
            costs.append(self._prefill_scale * prefill + len(load.users) + load.tails + new + tail)
        chosen = least(costs, range(fleet.instances), fleet.rng)
        deepest = max(depths)
        if deepest > depths[chosen]:
            self.sources[request.number] = Source(depths.index(deepest), deepest)
        sent = _Sent(request, chosen, request.tokens - depths[chosen] * fleet.segment_tokens)
        self._sent[request.number] = sent
        load = self._loads[chosen]
        load.prefill += sent.new
        load.users.update(chain)
        load.tails += tail
        return chosen

    def first_token(self, number: int) -> None:
        """Tell the router that the first token of request `number` passes through it."""
        sent = self._sent[number]
        self._loads[sent.instance].prefill -= sent.new

    def last_token(self, number: int) -> None:
        """Tell the router that the last token of request `number` passes through it, behind the first."""
        request, instance, _ = self._sent.pop(number)
        load = self._loads[instance]
        for segment in request.chain:
            load.users[segment] -= 1
            if not load.users[segment]:
                del load.users[segment]
        load.tails -= int(request.tokens > len(request.chain) * self._fleet.segment_tokens)

    def finished(self, instance: int, answered: Answered) -> None:
        """Does nothing: `last_token` names the request."""
