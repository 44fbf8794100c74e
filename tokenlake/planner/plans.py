"""`gen_plans`: which instances run which batch, and how each uses what is cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import NodeId
from tokenlake.planner.choose import Decision, choose
from tokenlake.planner.costs import Batch, Costs, Model
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import PrefixTree

__all__ = ["Plans", "QueryPlan", "TransferPlan", "gen_plans"]


class QueryPlan(msgspec.Struct, frozen=True):
    """How one batch uses what is cached of its prefixes."""

    node: NodeId
    """Of the first instance of its group, for which the ways were chosen."""
    decisions: tuple[Decision, ...]
    seconds: float
    """What the decisions are expected to cost, prefill to the last decode step."""


class TransferPlan(msgspec.Struct, frozen=True):
    """New cache of one batch: per request of the batch, (its index in the tree, first segment, number of segments) that
    its prefill completes. It is put where the batch runs; from there the pool moves it to its owners."""

    node: NodeId
    segments: tuple[tuple[int, int, int], ...]


class Plans(msgspec.Struct, frozen=True):
    """One entry per batch, in the order given."""

    query_plans: tuple[QueryPlan, ...]
    transfer_plans: tuple[TransferPlan, ...]
    groups: tuple[tuple[str, ...], ...]
    """Instances of each batch, as many as its degree of parallelism; no instance is in two."""


def gen_plans(
    batches: Sequence[Sequence[int]],
    dops: Sequence[int],
    tree: PrefixTree,
    instances: Mapping[str, NodeId],
    model: Model,
    rates: Rates,
) -> Plans:
    """Plans for one iteration. Pure and deterministic; changes nothing that it is given.

    `batches`: indices of the tree's requests, no request in two; `dops`: instances that each batch takes, at least 1;
    `instances`: the node of each. Batches are matched to instances at least total bytes (the Hungarian method), the
    bytes of a run on another node being the fewer of its segments and of the batch's queries.

    Raises ValueError for more instances asked for than there are, and for batches that share a request.
    """
    _check(batches, dops, instances)
    names = list(instances)
    nodes = sorted(set(instances.values()))
    made = [Batch(tree, batch, rates) for batch in batches]
    by_node = np.stack([_bytes(tree, batch, nodes, model) for batch in made]) if made else np.zeros((0, len(nodes)))
    places = _match(by_node[:, [nodes.index(instances[name]) for name in names]], dops)
    groups = tuple(tuple(names[place] for place in group) for group in places)
    instances_of = [instances[group[0]] for group in groups]
    sharers = {
        node: _sharers(tree, [batch for batch, at in zip(made, instances_of, strict=True) if at == node])
        for node in nodes
    }
    queries = []
    for batch, instance in zip(made, instances_of, strict=True):
        decisions, seconds = choose(Costs(tree, batch, instance, model, rates), sharers[instance])
        queries.append(QueryPlan(instance, tuple(decisions), seconds))
    transfers = [
        TransferPlan(instance, _new_segments(tree, batch)) for batch, instance in zip(made, instances_of, strict=True)
    ]
    return Plans(tuple(queries), tuple(transfers), groups)


def _check(batches: Sequence[Sequence[int]], dops: Sequence[int], instances: Mapping[str, NodeId]) -> None:
    if len(batches) != len(dops) or any(dop < 1 for dop in dops):
        raise ValueError(
            f"{len(batches)} batches with the degrees of parallelism {list(dops)}; expected one of each, from 1"
        )
    if sum(dops) > len(instances):
        raise ValueError(f"batches take {sum(dops)} instances; there are {len(instances)}")
    members = [index for batch in batches for index in batch]
    if len(set(members)) != len(members):
        raise ValueError("a request is in two batches")


def _bytes(tree: PrefixTree, batch: Batch, nodes: Sequence[NodeId], model: Model) -> NDArray[np.float64]:
    """Bytes that the batch moves on each node. Shape [nodes]."""
    total, held = 0.0, dict.fromkeys(nodes, 0.0)
    for run in batch.readers:
        queries = model.layers * (batch.queries[run] + batch.decoded[run]) * model.query_bytes
        nbytes = min(len(tree.runs[run].keys) * model.segment_bytes, queries)
        total += nbytes
        for owner in tree.runs[run].owners:
            if owner in held:
                held[owner] += nbytes
    return total - np.array(list(held.values()))


def _match(nbytes: NDArray[np.float64], dops: Sequence[int]) -> list[list[int]]:
    """Columns of each row of `nbytes` [batches, instances], `dops` many, at the least sum; none twice."""
    # Imported here: a scheduler needs scipy, the engines that import these rules do not.
    from scipy.optimize import linear_sum_assignment

    if not len(dops):
        return []
    rows = np.repeat(np.arange(len(dops)), dops)
    taken: list[list[int]] = [[] for _ in dops]
    for row, column in zip(*linear_sum_assignment(nbytes[rows]), strict=True):
        taken[rows[row]].append(int(column))
    # The first of a group is where most of its prefix is.
    return [sorted(group, key=lambda column: (nbytes[row, column], column)) for row, group in enumerate(taken)]


def _sharers(tree: PrefixTree, batches: Sequence[Batch]) -> list[int]:
    """Per run, how many of these batches read it."""
    counts = [0] * len(tree.runs)
    for batch in batches:
        for run in batch.readers:
            counts[run] += 1
    return counts


def _new_segments(tree: PrefixTree, batch: Batch) -> tuple[tuple[int, int, int], ...]:
    size = tree.segment_tokens
    new = []
    for index in batch.requests:
        request = tree.requests[index]
        first, stop = tree.hit_tokens[index] // size, min(request.tokens // size, len(request.keys))
        if stop > first:
            new.append((index, first, stop - first))
    return tuple(new)
