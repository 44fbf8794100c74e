"""Requests of the simulated engines: prompts as chains of segment numbers, and the keys made from the numbers.

A number stands for all tokens up to its segment's end, as in `baselines.Accesses`; prompts with equal numbers share a
prefix.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake.hints import Hints
from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.mixing import WORD, key_of, mix64

_KEY_WORDS = 4
_COPY = 1 << 40
"""Distance between the segment numbers of two copies of a workload, so that they share no number."""
_SWARMS = 1 << 58
"""Offset that keeps the segment numbers of swarms (`with_swarms`) apart from all others."""
SWARM_EVERY_S, SWARM_WITHIN_S = 20.0, 0.5
"""Seconds from one swarm to the next, and within which all requests of a swarm arrive."""
SWARM_TOKENS, SWARM_OWN_TOKENS, SWARM_ANSWER_TOKENS = 16_384, 3_072, 200
"""Number of tokens of the prefix that the requests of a swarm share, maximum number of tokens of each behind it, and
number of tokens of each answer."""

FLASH_TOKENS, FLASH_SHARE = 6_144, 0.3
"""Number of tokens of the prefix of a flash crowd, and share of the requests that begin with it."""
_FLASH = 1 << 59
"""Offset that keeps the segment numbers of a flash crowd (`with_flash`) apart from all others."""


class Arrival(NamedTuple):
    """One request to a simulated engine."""

    at_s: float
    tokens: int
    """Number of prompt tokens, those behind the last full segment included."""
    chain: NDArray[np.int64]
    """Number (identifier) of each full segment of the prompt, in order."""
    output_tokens: int = 0
    """Number of tokens of the answer; 0 where the trace does not have it."""
    follows: int | None = None
    pause_s: float = 0.0
    """`follows`: number of the request whose answer this one waits for, or None. `pause_s`: seconds from that answer to
    this request."""
    hints: Hints | None = None
    """Hints that the request carries."""

    def arrived(self, at_s: float) -> Arrival:
        """This request with `at_s` as its arrival; it waits for no other request any more."""
        return self._replace(at_s=at_s, follows=None, pause_s=0.0)


def arrivals_of(accesses: Accesses) -> list[Arrival]:
    """The requests of a workload for the simulated engines, in order."""
    return [
        Arrival(
            prompt.at_s,
            prompt.tokens,
            np.array(prompt.chain, dtype=np.int64),
            prompt.output_tokens,
            prompt.follows,
            prompt.pause_s,
        )
        for prompt in accesses.prompts
    ]


def accesses_of(arrivals: Iterable[Arrival], segment_tokens: int) -> Accesses:
    """Simulated requests as a workload of segment ids, the form that the compared systems take: the inverse of
    `arrivals_of`."""
    return Accesses(
        segment_tokens,
        [
            Prompt(
                each.tokens,
                tuple(each.chain.tolist()),
                each.at_s,
                each.output_tokens,
                follows=each.follows,
                pause_s=each.pause_s,
            )
            for each in arrivals
        ],
    )


def keys_of(chain: NDArray[np.int64], seed: int) -> bytes:
    """The segment keys of a prompt, 32 bytes each and uniform over the ring, made from its segment numbers; equal
    numbers and seeds give equal keys."""
    lanes = np.arange(_KEY_WORDS, dtype=np.uint64) + np.uint64(key_of(seed & WORD))
    words: NDArray[np.uint64] = chain.astype(np.uint64)[:, None] * np.uint64(_KEY_WORDS) + lanes
    return mix64(mix64(words)).tobytes()


def merged(arrivals: Sequence[Arrival], copies: int, *, common_share: float = 0.01) -> Iterator[Arrival]:
    """Run `copies` of a workload side by side, which is the same load on each of `copies` times as many nodes.

    Each copy begins at another point of the workload and wraps around at its end. The copies share the segments that at
    least `common_share` of the requests contain (templates); every other segment belongs to one copy. A request that
    follows one before its copy's beginning arrives at its recorded time.
    """
    if copies < 1:
        raise ConfigurationError("copies", copies, "at least 1")
    if not arrivals:
        raise ConfigurationError("arrivals", 0, "at least one request")
    numbers, counts = np.unique(np.concatenate([arrival.chain for arrival in arrivals]), return_counts=True)
    common = numbers[counts >= common_share * len(arrivals)]
    duration_s = arrivals[-1].at_s + 1e-9
    return _renumbered(
        heapq.merge(
            *(_copy(arrivals, common, copy, duration_s * copy / copies) for copy in range(copies)),
            key=lambda copied: copied.arrival.at_s,
        ),
        {arrival.follows for arrival in arrivals if arrival.follows is not None},
    )


class _Copied(NamedTuple):
    copy: int
    number: int
    """Number of a request in the workload that is copied; `arrival.follows` is such a number, too."""
    arrival: Arrival


def _renumbered(copied: Iterable[_Copied], followed: Container[int]) -> Iterator[Arrival]:
    places: dict[tuple[int, int], int] = {}
    for place, (copy, number, arrival) in enumerate(copied):
        if number in followed:
            places[copy, number] = place
        yield arrival if arrival.follows is None else arrival._replace(follows=places[copy, arrival.follows])


def _copy(arrivals: Sequence[Arrival], common: NDArray[np.int64], copy: int, begins_s: float) -> Iterator[_Copied]:
    end_s = arrivals[-1].at_s + 1e-9
    first = next((index for index, arrival in enumerate(arrivals) if arrival.at_s >= begins_s), 0)
    for place in range(len(arrivals)):
        index = (first + place) % len(arrivals)
        arrival = arrivals[index]
        at_s = arrival.at_s - begins_s + (end_s if index < first else 0.0)
        own = np.where(np.isin(arrival.chain, common), arrival.chain, arrival.chain + copy * _COPY)
        # If the copy begins after a request and before the one that follows it, the following one comes first in the
        # copy.
        cut = arrival.follows is not None and arrival.follows < first <= index
        follows = None if cut else arrival.follows
        yield _Copied(copy, index, arrival._replace(at_s=at_s, chain=own, follows=follows))


def with_swarms(arrivals: Sequence[Arrival], size: int, segment_tokens: int, seed: int) -> Iterator[Arrival]:
    """Add swarms to a workload, as an agent that starts `size` parallel agents on the same new context makes them:
    every `SWARM_EVERY_S` seconds, `size` requests arrive within `SWARM_WITHIN_S` that share a new prefix of
    `SWARM_TOKENS`. The `seed` draws when each arrives and its further tokens."""
    own = (_Copied(0, number, arrival) for number, arrival in enumerate(arrivals))
    added = (_Copied(1, number, each) for number, each in enumerate(_swarms(arrivals, size, segment_tokens, seed)))
    return _renumbered(
        heapq.merge(own, added, key=lambda copied: copied.arrival.at_s),
        {arrival.follows for arrival in arrivals if arrival.follows is not None},
    )


def with_flash(arrivals: Iterable[Arrival], from_s: float, segment_tokens: int, seed: int) -> Iterator[Arrival]:
    """Turn a share of the requests into a flash crowd: from `from_s` on, `FLASH_SHARE` of them, drawn by `seed`, begin
    with one new prefix of `FLASH_TOKENS`, behind which their segments are new as well."""
    draw = random.Random(seed)
    prefix = _FLASH + np.arange(FLASH_TOKENS // segment_tokens, dtype=np.int64)
    for arrival in arrivals:
        if arrival.at_s >= from_s and draw.random() < FLASH_SHARE:
            chain = np.concatenate([prefix, arrival.chain + _FLASH + _COPY])
            yield arrival._replace(tokens=arrival.tokens + len(prefix) * segment_tokens, chain=chain)
        else:
            yield arrival


def _swarms(arrivals: Sequence[Arrival], size: int, segment_tokens: int, seed: int) -> Iterator[Arrival]:
    draw = random.Random(seed)
    last_s = max(arrival.at_s for arrival in arrivals)
    shared = SWARM_TOKENS // segment_tokens
    for swarm in range(1, int(last_s / SWARM_EVERY_S) + 1):
        times = sorted(swarm * SWARM_EVERY_S + SWARM_WITHIN_S * draw.random() for _ in range(size))
        for number, at_s in enumerate(times):
            tokens = SWARM_TOKENS + draw.randrange(1, SWARM_OWN_TOKENS)
            chain = np.arange(tokens // segment_tokens, dtype=np.int64) + _SWARMS + swarm * _COPY
            chain[shared:] += (number + 1) * SWARM_TOKENS
            yield Arrival(at_s, tokens, chain, SWARM_ANSWER_TOKENS)
