"""The interface of routers: their input, their decisions, and their knowledge of the caches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokenlake_bench.engine_model import EngineModel

__all__ = ["RoutedRequest", "Choice", "Fetch", "Fleet", "Knowledge", "Router", "least"]


class RoutedRequest(NamedTuple):
    """A request as it arrives; the length of its answer is not known yet."""

    number: int
    """Position in order of arrival."""
    tokens: int
    """Length of the prompt."""
    chain: tuple[int, ...]
    """One id per full segment; equal ids mean equal tokens up to the segment's end."""


class Fetch(NamedTuple):
    """An order to copy the first `segments` segments of the prompt from instance `source` before the prefill."""

    source: int
    segments: int


class Choice(NamedTuple):
    """The instances that compute the prefill and the answer of a request, by index; equal where one computes both."""

    prefill: int
    decode: int
    fetch: Fetch | None = None


class Knowledge(Protocol):
    """A router's view of the instances' caches, in segments."""

    def depths(self, chain: tuple[int, ...]) -> list[int]:
        """Length of the longest prefix of `chain` at each instance."""
        ...

    def sizes(self) -> list[int]:
        """Number of segments held by each instance."""
        ...

    def coldest(self, instance: int) -> Iterator[int]:
        """Segments of an instance in the order in which they will be evicted."""
        ...

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """Report that the router sent a prompt to the instance, or had its cache copied there."""
        ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """Parameters of every router. Each of the `instances` has `capacity` segments of cache; ties are broken by
    `rng`."""

    instances: int
    capacity: int
    segment_tokens: int
    engine: EngineModel
    knowledge: Knowledge
    rng: random.Random


class Router(Protocol):
    """Chooses the instances of each request. Its methods are called in time order. Of the instances a router observes
    the answers only."""

    def choose(self, request: RoutedRequest, now: float) -> Choice:
        """Choose the instances of a request, which is sent at once."""
        ...

    def first_token(self, request: RoutedRequest, choice: Choice, now: float) -> None:
        """Called when the router passes on the first token of the answer."""
        ...

    def finished(self, request: RoutedRequest, choice: Choice, output_tokens: int, now: float) -> None:
        """Called when the router passes on the last token of the answer, after `first_token`."""
        ...


def least(costs: Sequence[float], among: Sequence[int], rng: random.Random) -> int:
    """The index of `among` with the least cost; ties are drawn from `rng`."""
    lowest = min(costs[index] for index in among)
    ties = [index for index in among if costs[index] == lowest]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
