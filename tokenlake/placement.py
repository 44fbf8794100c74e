"""The choice of the owner of a new segment, and of the segments that stay together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenlake.identity import NodeId, SegmentKey

__all__ = ["MAX_RETENTION_VALUE", "RUN_LENGTH_FROM", "Vacancy", "choose_owner", "default_run_length", "lean_of", "runs"]

RUN_LENGTH_FROM = ((16, 4), (1, 1))
"""(minimum number of nodes, E): measured in `policy.md`; a longer sequence touches fewer nodes per hit at nearly the
same balance."""


FREE_NOISE, FREE_SPREAD = 0.005, 0.05
"""Difference of free shares: below the first it is noise, beyond the second every segment goes to the emptier node."""
RATIO_NOISE = math.log(1.02)
VALUE_SPREAD, AGE_SPREAD = math.log(8.0), math.log(1.3)
"""The same for the retention values of the victims, and for their ages, as logarithms of ratios. Learned statistics
make one victim several times as valuable as another although neither node is fuller."""
_MIN_RETENTION_VALUE = 1e-12


class Vacancy(NamedTuple):
    """How much room a node has for a new segment."""

    free_share: float
    """Free slots / all slots, 0 to 1."""
    victim_age_s: float
    """Seconds since the last access of the segment that would be evicted next."""
    victim_value: float
    """Retention value of that segment; all nodes have the same eviction policy."""

    def beats(self, other: Vacancy, lean: float) -> bool:
        """Does this node have more free slots, or as many and a victim of lower value, or of the same value and older?
        `lean`, from -1 to 1: the required margin, as a part of the spread."""
        free = self.free_share - other.free_share
        if abs(free) > FREE_NOISE:
            return free > lean * FREE_SPREAD
        retention_value = _log_ratio(other.victim_value, self.victim_value)
        if abs(retention_value) > RATIO_NOISE:
            return retention_value > lean * VALUE_SPREAD
        age = _log_ratio(self.victim_age_s, other.victim_age_s)
        return abs(age) > RATIO_NOISE and age > lean * AGE_SPREAD


def _log_ratio(a: float, b: float) -> float:
    return math.log((a + _MIN_RETENTION_VALUE) / (b + _MIN_RETENTION_VALUE))


MAX_RETENTION_VALUE = 1e9
"""The victim's value where nothing can be evicted."""
UNKNOWN_VACANCY = Vacancy(0.0, 0.0, MAX_RETENTION_VALUE)


def default_run_length(nodes: int) -> int:
    """E for a cluster of `nodes`."""
    return next(length for least, length in RUN_LENGTH_FROM if nodes >= least)


def lean_of(key: SegmentKey) -> float:
    """How much a segment prefers its directory node, from -1 to 1, evenly distributed over all keys.

    Without it every segment that one prompt stores between two reports would go to the node that was emptier at the
    first report, and later reads of that prompt would load few nodes. With it the slightly emptier of two nodes gets
    slightly more of the segments (docs/decisions/005-the-emptier-gets-more.md).
    """
    return int.from_bytes(key[16:18], "big") / (1 << 15) - 1


def choose_owner(
    candidates: Sequence[tuple[NodeId, Vacancy]], lean: float, previous_owner: NodeId | None = None
) -> NodeId:
    """The emptier of the candidates. They come directory node first; where one is slightly emptier `lean` decides, and
    of equal ones the directory node is chosen. `previous_owner`: the candidate that had the segment, or refused it, and
    has its access record. It becomes the owner again unless the other has more free slots, because any other node would
    take the segment for a new one and may refuse it (docs/decisions/011-back-to-who-remembers.md)."""
    most_free = max(vacancy.free_share for _, vacancy in candidates)
    if any(node == previous_owner and most_free - vacancy.free_share <= FREE_NOISE for node, vacancy in candidates):
        return NodeId(previous_owner or "")
    best, best_vacancy = candidates[0]
    for node, vacancy in candidates[1:]:
        if vacancy.beats(best_vacancy, lean):
            best, best_vacancy = node, vacancy
    return best


def runs(depths: Sequence[int], run_length: int) -> Iterator[range]:
    """Cut the new segments of one store into sequences of at most `run_length` consecutive segments.

    `depths` ascend; a gap (another engine stored that segment) ends a sequence. Yields ranges of indices into `depths`.
    The first sequence starts at the first new segment and not at a fixed position of the prompt: with fixed positions
    all branches inside one sequence would be stored on one node (policy.md).
    """
    start = 0
    for index in range(1, len(depths) + 1):
        whole = index - start == run_length
        if index == len(depths) or whole or depths[index] != depths[index - 1] + 1:
            yield range(start, index)
            start = index
