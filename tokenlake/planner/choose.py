"""The cheapest way for each run of a batch on one node: local, fetch, ship or recompute.

A run that is recomputed takes everything behind it along: an engine computes the end of a prompt, not its middle. So
the best of a run is the cheaper of recomputing all from it on, and using it in its cheapest way plus the best of each
run behind it. That is exact for a given set of peers that queries go to, whose round trips are paid once; all sets of
peers that could be worth theirs are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import NamedTuple

import msgspec

from tokenlake.identity import NodeId
from tokenlake.planner.costs import Costs

__all__ = ["MANY_PEERS", "Decision", "Way", "choose"]

MANY_PEERS = 4
"""Queries go to any set of so many peers, those that it saves most with; from the others runs are fetched."""


class Way(Enum):
    """How a cached run is used."""

    LOCAL = "local"
    FETCH = "fetch"
    SHIP = "ship"
    RECOMPUTE = "recompute"


class Decision(msgspec.Struct, frozen=True):
    """For one run of a batch."""

    run: int
    """Index into the tree's runs."""
    way: Way
    owner: NodeId | None
    """Who is read; None where it is recomputed."""
    requests: tuple[int, ...]
    """Those of the batch that read it, or recompute it."""


class _Option(NamedTuple):
    seconds: float
    way: Way
    owner: NodeId | None


class _Options(NamedTuple):
    """Of one run."""

    moved: _Option
    """Here, or fetched from where that is cheapest."""
    shipped: Mapping[NodeId, float]
    """Per owner that is a peer worth asking."""
    recomputed: float
    """With everything behind it; infinite where that is not known."""


def choose(costs: Costs, sharers: Sequence[int] | None = None, *, ship: bool = True) -> tuple[list[Decision], float]:
    """Decisions for all runs of the batch, parents first, and their cost in seconds. `sharers`: per run of the tree,
    how many batches on this node read it (default: this one alone). `ship`: can queries of this model be shipped?

    While the time of a prefill is not known runs are read here or fetched. Of several owners the one that is cheapest
    to fetch from, or to ship to, is taken, the first where they are equal.
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
    for run, readers in costs.batch.readers.items():
        if costs.tree.runs[run].parent in chosen and chosen[costs.tree.runs[run].parent].way is Way.RECOMPUTE:
            chosen[run] = _Option(0.0, Way.RECOMPUTE, None)
        decisions.append(Decision(run, chosen[run].way, chosen[run].owner, readers))
    return decisions, least


def _options(costs: Costs, sharers: Sequence[int] | None) -> dict[int, _Options]:
    known = costs.rates.prefill.known
    options: dict[int, _Options] = {}
    behind = dict.fromkeys(costs.batch.readers, 0.0)
    for run in reversed(costs.batch.readers):
        owners = costs.tree.runs[run].owners
        others = [owner for owner in owners if owner != costs.node] if costs.node in owners else owners
        moved = _Option(costs.local(run), Way.LOCAL, costs.node)
        if len(others) == len(owners):
            shared = 1 if sharers is None else sharers[run]
            fetched = [costs.fetch(run, each, shared) for each in others]
            least = min(fetched)
            moved = _Option(moved.seconds + least, Way.FETCH, others[fetched.index(least)])
        shipped: dict[NodeId, float] = {}
        recomputed = float("inf")
        if known:
            shipped = {each: seconds for each in others if (seconds := costs.ship(run, each)) < moved.seconds}
            attended = costs.attention(run) + behind[run]
            recomputed = costs.recompute(run) + attended
            parent = costs.tree.runs[run].parent
            if parent >= 0:
                behind[parent] += attended
        options[run] = _Options(moved, shipped, recomputed)
    return options


def _peers(costs: Costs, options: Mapping[int, _Options]) -> list[NodeId]:
    """Those with which shipping could save more than the round trips cost: no other is in a best set."""
    saved: dict[NodeId, float] = {}
    for option in options.values():
        for peer, seconds in option.shipped.items():
            saved[peer] = saved.get(peer, 0.0) + option.moved.seconds - seconds
    worth = [peer for peer, seconds in saved.items() if seconds > costs.round_trips(peer)]
    return sorted(worth, key=lambda peer: (-saved[peer], peer))[:MANY_PEERS]


def _best(costs: Costs, options: Mapping[int, _Options], asked: Sequence[NodeId]) -> tuple[dict[int, _Option], float]:
    """The best way of each run, and the cost of all, when queries may go to `asked`."""
    ways: dict[int, _Option] = {}
    behind = dict.fromkeys(options, 0.0)
    total = 0.0
    for run, (moved, shipped, recomputed) in options.items():
        best = moved
        for peer in asked if shipped else ():
            if shipped.get(peer, best.seconds) < best.seconds:
                best = _Option(shipped[peer], Way.SHIP, peer)
        seconds = best.seconds + behind[run]
        if recomputed < seconds:
            best, seconds = _Option(recomputed, Way.RECOMPUTE, None), recomputed
        ways[run] = best
        parent = costs.tree.runs[run].parent
        if parent < 0:
            total += seconds
        else:
            behind[parent] += seconds
    return ways, total
