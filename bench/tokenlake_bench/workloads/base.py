"""Common parts of the workload generators: lines of a trace, growing texts, distributions, and sessions on one time
line."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sigma = Annotated[float, Meta(ge=0, le=5)]
"""Parameter sigma of a lognormal distribution: the standard deviation of the logarithm."""

_NO_BLOCKS: Final[tuple[int, ...]] = ()


class TraceLine(msgspec.Struct, frozen=True, gc=False):
    """One request as a line of Mooncake's format; `timestamp` in ms."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that every workload generator has. Lengths are in tokens, times in seconds."""

    requests: Annotated[int, Meta(ge=1, le=10_000_000, description="Lines to write.")] = 10_000
    rate: Annotated[float, Meta(gt=0, le=1e6, description="Requests per second, in the long run.")] = 3.4
    seed: Annotated[int, Meta(ge=0, description="Seed of all draws.")] = 0

    @property
    def turns_mean(self) -> float:
        """Mean number of requests of a session: sessions begin this many times less often than requests arrive."""
        return 1.0


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Endless times in seconds of a Poisson process, `rate` per second on average."""
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


class Turn(NamedTuple):
    """A request of a generated session, which arrives `gap_s` seconds after the previous one."""

    gap_s: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Draw:
    """Source of seeded random draws and of unique block ids for one generated workload."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._ids = itertools.count()

    def blocks(self, count: int) -> list[int]:
        """`count` new block ids that were never returned before."""
        return list(itertools.islice(self._ids, count))

    def text(self, begins_with: Sequence[int] = _NO_BLOCKS) -> Text:
        """A new text that begins with the given full blocks and can grow."""
        return Text(self, begins_with)

    def lognormal(self, median: float, sigma: float) -> float:
        """Draw a lognormal number with this median; its mean is median x exp(sigma^2 / 2)."""
        return median * math.exp(self.rng.gauss(0.0, sigma))

    def length(self, median: float, sigma: float, longest: int) -> int:
        """Draw a lognormal number of tokens, from 1 to `longest`."""
        return min(longest, max(1, round(self.lognormal(median, sigma))))


class Text:
    """A text that grows by tokens; its full blocks keep their ids."""

    def __init__(self, draw: Draw, begins_with: Sequence[int]) -> None:
        self._draw = draw
        self._blocks = list(begins_with)

    def hash_ids(self, length: int) -> list[int]:
        """Ids of the blocks that contain the first `length` tokens of the text. A last block that is not full gets a
        new id."""
        full, rest = divmod(length, BLOCK_TOKENS)
        if full > len(self._blocks):
            self._blocks += self._draw.blocks(full - len(self._blocks))
        return self._blocks[:full] + (self._draw.blocks(1) if rest else [])


def lay_out(requests: int, starts: Iterator[float], session: Callable[[], Iterator[Turn]]) -> list[TraceLine]:
    """The first `requests` requests, in order of time, of sessions that begin at `starts` (seconds, not decreasing).

    The first request of a session comes `gap_s` after the session's start.
    """
    lines: list[TraceLine] = []
    order = itertools.count()
    waiting: list[tuple[float, int, Turn, Iterator[Turn]]] = []

    def queue(after_s: float, turns: Iterator[Turn]) -> None:
        turn = next(turns, None)
        if turn is not None:
            heapq.heappush(waiting, (after_s + turn.gap_s, next(order), turn, turns))

    start = next(starts)
    while len(lines) < requests:
        if not waiting or start <= waiting[0][0]:
            queue(start, session())
            start = next(starts)
            continue
        at_s, _, turn, turns = heapq.heappop(waiting)
        lines.append(TraceLine(round(at_s * 1000), turn.input_length, turn.output_length, turn.hash_ids))
        queue(at_s, turns)
    return lines


def zipf_mean(exponent: float, most: int) -> float:
    """Mean of the numbers 1 to `most`, drawn with weight 1 / k^exponent."""
    weights: list[float] = [float(k) ** -exponent for k in range(1, most + 1)]
    return sum(k * weight for k, weight in enumerate(weights, start=1)) / sum(weights)
