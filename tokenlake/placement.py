"""Which candidate becomes the holder of a new segment, and which segments stay together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenlake.identity import NodeId

__all__ = ["RUN_LENGTH_FROM", "Vacancy", "choose_holder", "default_run_length", "runs"]

RUN_LENGTH_FROM = ((16, 4), (1, 1))
"""(nodes from, E): measured in `policy.md`: fewer nodes per hit at nearly the same balance."""


class Vacancy(NamedTuple):
    """How welcome a new segment is at a node; compared as a tuple, the greater is the emptier."""

    free_share: float
    """Free slots / all slots, 0 to 1."""
    victim_age_s: float
    """Seconds since the segment that would be evicted next was touched: the older, the less it is worth."""


UNKNOWN_VACANCY = Vacancy(0.0, 0.0)


def default_run_length(nodes: int) -> int:
    """E for a cluster of `nodes`."""
    return next(length for least, length in RUN_LENGTH_FROM if nodes >= least)


def choose_holder(candidates: Sequence[tuple[NodeId, Vacancy]]) -> NodeId:
    """The emptier of the candidates, which come home first; equals go to the earlier."""
    best, best_vacancy = candidates[0]
    for node, vacancy in candidates[1:]:
        if vacancy > best_vacancy:
            best, best_vacancy = node, vacancy
    return best


def runs(depths: Sequence[int], run_length: int) -> Iterator[range]:
    """Cut what one store newly created into runs of at most `run_length` consecutive segments.

    `depths` ascend; a gap (somebody else stored that segment) ends a run. Yields ranges of indices into
    `depths`. Runs start where the new part starts, never at fixed positions of the prompt: fixed cuts make all
    that branches inside one land on one node (policy.md).
    """
    start = 0
    for index in range(1, len(depths) + 1):
        whole = index - start == run_length
        if index == len(depths) or whole or depths[index] != depths[index - 1] + 1:
            yield range(start, index)
            start = index
