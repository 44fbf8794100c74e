"""What a router sees, what it says, and what it may know."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokenlake_bench.engine_model import EngineModel

__all__ = ["Ask", "Choice", "Fetch", "Fleet", "Knowledge", "Router", "least"]


class Ask(NamedTuple):
    """A request as it arrives: how long its answer will be is not known yet."""

    number: int
    """In order of arrival."""
    tokens: int
    """Of the prompt."""
    chain: tuple[int, ...]
    """One id per full segment; equal ids mean equal tokens up to the segment's end."""


class Fetch(NamedTuple):
    """Before the prefill the first `segments` of the prompt are copied from instance `source`."""

    source: int
    segments: int


class Choice(NamedTuple):
    """Instances, from 0. `decode` is `prefill` where the two phases are not split."""

    prefill: int
    decode: int
    fetch: Fetch | None = None


class Knowledge(Protocol):
    """What a router believes that the instances' caches hold, in segments."""

    def depths(self, chain: tuple[int, ...]) -> list[int]:
        """Length of the longest prefix of `chain` at each instance."""
        ...

    def sizes(self) -> list[int]:
        """Segments held by each instance."""
        ...

    def coldest(self, instance: int) -> Iterator[int]:
        """What would go first, in order."""
        ...

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """A prompt was sent there, or copied there."""
        ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """What every router is made from. `instances` have `capacity` segments of cache each; ties are drawn by `rng`."""

    instances: int
    capacity: int
    segment_tokens: int
    engine: EngineModel
    knowledge: Knowledge
    rng: random.Random


class Router(Protocol):
    """Called in time order. Sees answers go by, nothing else."""

    def choose(self, ask: Ask, now: float) -> Choice:
        """Where the request goes; it goes there at once."""
        ...

    def first_token(self, ask: Ask, choice: Choice, now: float) -> None:
        """The first token of the answer went by."""
        ...

    def finished(self, ask: Ask, choice: Choice, output_tokens: int, now: float) -> None:
        """The last token went by; a `first_token` came before."""
        ...


def least(costs: Sequence[float], among: Sequence[int], rng: random.Random) -> int:
    """The index of `among` with the least cost; of equals, one drawn."""
    lowest = min(costs[index] for index in among)
    ties = [index for index in among if costs[index] == lowest]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
