"""Results of the study of eviction policies: its JSON, and the comparisons computed from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

LRU = "lru"


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Token hit rates that no policy can exceed, for one trace and capacity."""

    trace: str
    capacity_tokens: int
    infinite: float
    clairvoyant: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy at one capacity and number of nodes on one trace. The last four fields compare it with other
    runs of the same study, and are None where those were not made."""

    trace: str
    capacity_tokens: int
    nodes: int
    policy: str
    hit_rate: float
    """Hit tokens as a share of all prompt tokens, those beyond the last full segment included."""
    orphan_share: float
    """Share of the held segments whose parent (the segment before them in the prompt) is not held, so that no match
    finds them; mean over several moments of the run."""
    copies_per_segment: float
    serve_us: float
    """Processor time in microseconds per segment of a prompt to serve it in the study, which includes the store, the
    choice of the node and the policy."""
    policy_us: float
    """Processor time in microseconds per segment of a prompt that the eviction policy takes; contained in
    `serve_us`."""
    of_clairvoyant: float | None = None
    of_lru: float | None = None
    of_one_node: float | None = None
    """Hit rate divided by that of the same policy and total capacity on one node."""
    policy_of_lru: float | None = None
    """Processor time of the policy divided by that of LRU."""


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with one number of nodes: means over all traces and capacities."""

    policy: str
    nodes: int
    cells: int
    of_clairvoyant: float
    """Geometric mean, over traces and capacities, of the hit rate divided by that of the clairvoyant cache."""
    worst_of_lru: float | None


class StudyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole study. `complete` is False if it was interrupted, so that the remaining runs were not made."""

    segment_tokens: int
    hint_accuracy: float | None
    seed: int
    complete: bool
    ceilings: list[Ceiling]
    cells: list[Cell]
    means: list[Mean]


def result_of(
    ceilings: Sequence[Ceiling],
    cells: Sequence[Cell],
    *,
    segment_tokens: int,
    hint_accuracy: float | None,
    seed: int,
    complete: bool,
) -> StudyResult:
    """The result of the study: adds to each run its comparisons with other runs, and the means of each policy."""
    compared = _compared(ceilings, cells)
    return StudyResult(
        segment_tokens=segment_tokens,
        hint_accuracy=hint_accuracy,
        seed=seed,
        complete=complete,
        ceilings=list(ceilings),
        cells=compared,
        means=_means(compared),
    )


def _compared(ceilings: Sequence[Ceiling], cells: Sequence[Cell]) -> list[Cell]:
    best = {(each.trace, each.capacity_tokens): each.clairvoyant for each in ceilings}
    known = {(each.trace, each.capacity_tokens, each.nodes, each.policy): each for each in cells}
    compared: list[Cell] = []
    for cell in cells:
        lru = known.get((cell.trace, cell.capacity_tokens, cell.nodes, LRU))
        alone = known.get((cell.trace, cell.capacity_tokens, 1, cell.policy))
        compared.append(
            msgspec.structs.replace(
                cell,
                of_clairvoyant=_ratio(cell.hit_rate, best[cell.trace, cell.capacity_tokens]),
                of_lru=_ratio(cell.hit_rate, lru.hit_rate) if lru else None,
                of_one_node=_ratio(cell.hit_rate, alone.hit_rate) if alone and cell.nodes > 1 else None,
                policy_of_lru=_ratio(cell.policy_us, lru.policy_us) if lru else None,
            )
        )
    return compared


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _means(cells: Sequence[Cell]) -> list[Mean]:
    means: list[Mean] = []
    for policy, nodes in dict.fromkeys((cell.policy, cell.nodes) for cell in cells):
        mine = [cell for cell in cells if (cell.policy, cell.nodes) == (policy, nodes)]
        shares = [cell.of_clairvoyant for cell in mine if cell.of_clairvoyant is not None]
        against = [cell.of_lru for cell in mine if cell.of_lru is not None]
        # The geometric mean of hit rates is 0 if one of them is 0, whose logarithm does not exist.
        mean = math.exp(math.fsum(map(math.log, shares)) / len(shares)) if shares and min(shares) > 0 else 0.0
        worst = min(against, default=None)
        means.append(Mean(policy=policy, nodes=nodes, cells=len(mine), of_clairvoyant=mean, worst_of_lru=worst))
    return means
