"""Chooses the cheapest way to use each cached sequence of a batch on one node: local, fetch, ship or recompute.

An engine computes the end of a prompt, not its middle. A sequence that is recomputed therefore takes all sequences
behind it along. So the least cost from a sequence on is the smaller of two: recomputing everything from it on, or using
it in its cheapest way plus the least costs of the sequences behind it. That is exact for a given set of peers that
queries are shipped to, whose round trips are paid once. All sets of peers that could save more than their round trips
are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import NamedTuple

import msgspec

from tokenlake.identity import NodeId
from tokenlake.planner.costs import Costs

MANY_PEERS = 4
"""At most this many peers are considered for shipping, those with which it saves most; sequences of other peers are
fetched or recomputed."""


class Way(Enum):
    """The ways to use a cached sequence."""

    LOCAL = "local"
    FETCH = "fetch"
    SHIP = "ship"
    RECOMPUTE = "recompute"


class Decision(msgspec.Struct, frozen=True):
    """The way chosen for one sequence of a batch."""

    sequence: int
    """Index of the sequence in the prefix tree."""
    way: Way
    owner: NodeId | None
    """The node from which the sequence is read, or to which queries are sent; None if the sequence is recomputed. A
    fetch from the batch's own node reads its disk."""
    requests: tuple[int, ...]
    """Indices of the batch's requests that read or recompute the sequence."""


class _Option(NamedTuple):
    seconds: float
    way: Way
    owner: NodeId | None


class _Options(NamedTuple):
    """The costs in seconds of the ways to use one sequence."""

    moved: _Option
    """Cost of reading the sequence on this node, or of fetching it from the owner from which that is cheapest."""
    shipped: Mapping[NodeId, float]
    """Cost of sending queries to each owner for which that costs less than `moved`."""
    recomputed: float
    """Cost of computing the sequence and everything behind it again; infinite while the time of a prefill is not
    known."""


def choose(costs: Costs, sharers: Sequence[int] | None = None, *, ship: bool = True) -> tuple[list[Decision], float]:
    """Decisions for all sequences of the batch, parents first, and their total cost in seconds.

    `sharers`: for each sequence of the tree, the number of batches on this node that read it (default: this batch
    alone). `ship`: False where queries of this model cannot be shipped. While the time of a prefill is not known,
    sequences are only read here or fetched. Among several owners the cheapest one is chosen, the first of equal ones.
    """
    options = _options(costs, sharers)
    peers = _peers(costs, options) if ship else []
    chosen: dict[int, _Option] = {}
    least = float("inf")
    for count in range(len(peers) + 1):
        for asked in combinations(peers, count):
            ways, seconds = _best(costs, options, asked)
            seconds += sum(costs.round_trips(peer) for peer in asked)
            if seconds < least:
                chosen, least = ways, seconds
    decisions: list[Decision] = []
    for sequence, readers in costs.batch.readers.items():
        parent = costs.tree.sequences[sequence].parent
        if parent in chosen and chosen[parent].way is Way.RECOMPUTE:
            chosen[sequence] = _Option(0.0, Way.RECOMPUTE, None)
        decisions.append(Decision(sequence, chosen[sequence].way, chosen[sequence].owner, readers))
    return decisions, least


def _options(costs: Costs, sharers: Sequence[int] | None) -> dict[int, _Options]:
    known = costs.rates.prefill.known
    options: dict[int, _Options] = {}
    behind = dict.fromkeys(costs.batch.readers, 0.0)
    for sequence in reversed(costs.batch.readers):
        owners = costs.tree.sequences[sequence].owners
        others = [owner for owner in owners if owner != costs.node] if costs.node in owners else owners
        moved = _Option(costs.local(sequence), Way.LOCAL, costs.node)
        if len(others) == len(owners) or costs.tree.sequences[sequence].disk_s:
            shared = 1 if sharers is None else sharers[sequence]
            fetched = [costs.fetch(sequence, each, shared) for each in owners]
            least = min(fetched)
            moved = _Option(moved.seconds + least, Way.FETCH, owners[fetched.index(least)])
        shipped: dict[NodeId, float] = {}
        recomputed = float("inf")
        if known:
            shipped = {each: seconds for each in others if (seconds := costs.ship(sequence, each)) < moved.seconds}
            attended = costs.attention(sequence) + behind[sequence]
            recomputed = costs.recompute(sequence) + attended
            parent = costs.tree.sequences[sequence].parent
            if parent >= 0:
                behind[parent] += attended
        options[sequence] = _Options(moved, shipped, recomputed)
    return options


def _peers(costs: Costs, options: Mapping[int, _Options]) -> list[NodeId]:
    """Returns the peers for which sending queries could save more than their round trips cost; an optimal choice uses
    no other peer."""
    saved: dict[NodeId, float] = {}
    for option in options.values():
        for peer, seconds in option.shipped.items():
            saved[peer] = saved.get(peer, 0.0) + option.moved.seconds - seconds
    cheaper = [peer for peer, seconds in saved.items() if seconds > costs.round_trips(peer)]
    return sorted(cheaper, key=lambda peer: (-saved[peer], peer))[:MANY_PEERS]


def _best(costs: Costs, options: Mapping[int, _Options], asked: Sequence[NodeId]) -> tuple[dict[int, _Option], float]:
    """Returns the cheapest way to use each sequence and the total cost in seconds without the round trips, if queries
    may be sent only to the peers `asked`."""
    ways: dict[int, _Option] = {}
    behind = dict.fromkeys(options, 0.0)
    total = 0.0
    for sequence, (moved, shipped, recomputed) in options.items():
        best = moved
        for peer in asked if shipped else ():
            if shipped.get(peer, best.seconds) < best.seconds:
                best = _Option(shipped[peer], Way.SHIP, peer)
        seconds = best.seconds + behind[sequence]
        if recomputed < seconds:
            best, seconds = _Option(recomputed, Way.RECOMPUTE, None), recomputed
        ways[sequence] = best
        parent = costs.tree.sequences[sequence].parent
        if parent < 0:
            total += seconds
        else:
            behind[parent] += seconds
    return ways, total
