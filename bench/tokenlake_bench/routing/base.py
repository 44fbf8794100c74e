"""The interface of simulated routers: the requests that they get, what they know, and the instances they choose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.routing.knowledge import TrackedCaches
from tokenlake_bench.routing.outcome import Answered


class RoutedRequest(NamedTuple):
    """A request as a router gets it; the length of its answer is not known yet."""

    number: int
    """Number of the request in order of arrival."""
    tokens: int
    """Length of the prompt."""
    chain: tuple[int, ...]
    """One id per full segment of the prompt; equal ids mean equal tokens up to the segment's end."""


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Settings of SGLang's cache-aware router, with its documented defaults."""

    cache_threshold: float = 0.5
    balance_abs_threshold: int = 32
    balance_rel_threshold: float = 1.0001


SGLANG: Final = CacheAwareSettings()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Constructor arguments of every router. `capacity`: number of segments that each instance can keep; `knowledge`:
    what it knows of the caches; `rng` draws among instances of equal cost."""

    instances: int
    capacity: int
    segment_tokens: int
    engine: EngineModel
    knowledge: TrackedCaches
    rng: random.Random
    cache_aware: CacheAwareSettings = SGLANG


class Router(Protocol):
    """Chooses the instance of each request. Its methods are called in time order. The only thing that a router
    observes of the instances is their answers."""

    def choose(self, request: RoutedRequest, now: float) -> int:
        """Choose the instance of a request, to which it is then sent at once."""
        ...

    def finished(self, instance: int, answered: Answered) -> None:
        """Tell the router that the last token of an answer passes through it."""
        ...


def least(costs: Sequence[float], among: Sequence[int], rng: random.Random) -> int:
    """The instance of `among` whose cost is least; `rng` draws among equal ones."""
    lowest = min(costs[index] for index in among)
    ties = [index for index in among if costs[index] == lowest]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
