"""Which candidate becomes the holder of a new segment, and which segments stay together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenlake.identity import NodeId

__all__ = ["MOST_WORTH", "RUN_LENGTH_FROM", "Vacancy", "choose_holder", "default_run_length", "runs"]

RUN_LENGTH_FROM = ((16, 4), (1, 1))
"""(nodes from, E): measured in `policy.md`: fewer nodes per hit at nearly the same balance."""


FREE_TOLERANCE = 0.005
WORTH_TOLERANCE = 1.1
AGE_TOLERANCE = 1.02
"""What is known of another node is a moment old. Differences below these are noise, and following noise sends all
that is stored meanwhile to one node."""


class Vacancy(NamedTuple):
    """How welcome a new segment is at a node."""

    free_share: float
    """Free slots / all slots, 0 to 1."""
    victim_age_s: float
    """Seconds since the segment that would be evicted next was touched."""
    victim_worth: float
    """What keeping it is worth to the policy of eviction, which is the same on all nodes."""

    def beats(self, other: Vacancy) -> bool:
        """Clearly more free slots, or as many and a victim that is clearly worth less, or worth the same and clearly
        older."""
        if abs(self.free_share - other.free_share) > FREE_TOLERANCE:
            return self.free_share > other.free_share
        if self.victim_worth * WORTH_TOLERANCE < other.victim_worth:
            return True
        if other.victim_worth * WORTH_TOLERANCE < self.victim_worth:
            return False
        return self.victim_age_s > other.victim_age_s * AGE_TOLERANCE


MOST_WORTH = 1e9
"""Where nothing can be evicted."""
UNKNOWN_VACANCY = Vacancy(0.0, 0.0, MOST_WORTH)


def default_run_length(nodes: int) -> int:
    """E for a cluster of `nodes`."""
    return next(length for least, length in RUN_LENGTH_FROM if nodes >= least)


def choose_holder(candidates: Sequence[tuple[NodeId, Vacancy]]) -> NodeId:
    """The emptier of the candidates, which come home first; where none is clearly emptier, the home."""
    best, best_vacancy = candidates[0]
    for node, vacancy in candidates[1:]:
        if vacancy.beats(best_vacancy):
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
