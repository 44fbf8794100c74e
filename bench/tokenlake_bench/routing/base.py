"""The interface of simulated routers: the requests that they get, the instances that they choose, and what they know of
the caches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokenlake_bench.engine_model import EngineModel


class RoutedRequest(NamedTuple):
    """A request as a router gets it; the length of its answer is not known yet."""

    number: int
    """Number of the request in order of arrival."""
    tokens: int
    """Length of the prompt."""
    chain: tuple[int, ...]
    """One id per full segment of the prompt; equal ids mean equal tokens up to the segment's end."""


class Knowledge(Protocol):
    """A router's knowledge of the instances' caches, which may differ from their real content. Lengths are in
    segments."""

    def depths(self, chain: tuple[int, ...]) -> list[int]:
        """Length in segments of the longest prefix of `chain` at each instance, as far as the router knows."""
        ...

    def sizes(self) -> list[int]:
        """Number of segments held by each instance, as far as the router knows."""
        ...

    def coldest(self, instance: int) -> Iterator[int]:
        """Ids of the segments of an instance in the order in which they will be evicted."""
        ...

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """Tell this knowledge that the router sent a prompt to the instance, or had the prompt's cache copied there."""
        ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """Constructor arguments of every router. Each of the `instances` has a cache of `capacity` segments; `rng` draws
    among instances of equal cost."""

    instances: int
    capacity: int
    segment_tokens: int
    engine: EngineModel
    knowledge: Knowledge
    rng: random.Random


class Router(Protocol):
    """Chooses the instance of each request. Its methods are called in time order. The only thing that a router
    observes of the instances is their answers."""

    def choose(self, request: RoutedRequest, now: float) -> int:
        """Choose the instance of a request, to which it is then sent at once."""
        ...

    def first_token(self, request: RoutedRequest, instance: int, now: float) -> None:
        """Tell the router that the first token of the answer passes through it."""
        ...

    def finished(self, request: RoutedRequest, instance: int, output_tokens: int, now: float) -> None:
        """Tell the router that the last token of the answer passes through it; `first_token` was called before."""
        ...


def least(costs: Sequence[float], among: Sequence[int], rng: random.Random) -> int:
    """The instance of `among` whose cost is least; `rng` draws among equal ones."""
    lowest = min(costs[index] for index in among)
    ties = [index for index in among if costs[index] == lowest]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
