"""Plans for some batches: the instances that run each batch, and the way to use each cached sequence."""

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
    """How one batch uses the cached prefixes of its requests."""

    node: NodeId
    """Node of the first instance of the batch's group. The ways are chosen for this node."""
    decisions: tuple[Decision, ...]
    seconds: float
    """Expected cost of the decisions, from the prefill to the last decode step."""


class TransferPlan(msgspec.Struct, frozen=True):
    """New cache of one batch: (index in the tree, first segment, number of segments) of each request whose prefill
    completes segments. They are stored at the node where the batch runs; the pool moves them to their owners."""

    node: NodeId
    segments: tuple[tuple[int, int, int], ...]


class Plans(msgspec.Struct, frozen=True):
    """One entry per batch, in the order of the batches."""

    query_plans: tuple[QueryPlan, ...]
    transfer_plans: tuple[TransferPlan, ...]
    groups: tuple[tuple[str, ...], ...]
    """Instances of each batch, as many as its degree of parallelism. No instance is in two groups."""


def gen_plans(
    batches: Sequence[Sequence[int]],
    dops: Sequence[int],
    tree: PrefixTree,
    instances: Mapping[str, NodeId],
    model: Model,
    rates: Rates,
) -> Plans:
    """Plans for one iteration. Pure and deterministic.

    `batches`: indices of the tree's requests; no request is in two. `dops`: the number of instances for each batch, at
    least 1. `instances`: the node of each instance. Batches are assigned to instances so that the fewest bytes are
    moved (the Hungarian method); a sequence on another node counts with the bytes of its segments or of the
    batch's queries, whichever are fewer.

    Raises ValueError for more instances than there are, and for batches that share a request.
    """
    _check(batches, dops, instances)
    names = list(instances)
    nodes = sorted(set(instances.values()))
    made = [Batch(tree, batch, rates) for batch in batches]
    by_node = np.stack([_bytes(tree, batch, nodes, model) for batch in made]) if made else np.zeros((0, len(nodes)))
    places = _match(by_node[:, [nodes.index(instances[name]) for name in names]], dops)
    groups = tuple(tuple(names[place] for place in group) for group in places)
    batch_nodes = [instances[group[0]] for group in groups]
    sharers = {
        each: _sharers(tree, [batch for batch, at in zip(made, batch_nodes, strict=True) if at == each])
        for each in nodes
    }
    queries = []
    for batch, node in zip(made, batch_nodes, strict=True):
        decisions, seconds = choose(Costs(tree, batch, node, model, rates), sharers[node])
        queries.append(QueryPlan(node, tuple(decisions), seconds))
    transfers = [TransferPlan(node, _new_segments(tree, batch)) for batch, node in zip(made, batch_nodes, strict=True)]
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
    """Bytes that the batch moves if it runs on each of `nodes`. Shape [nodes]."""
    total, held = 0.0, dict.fromkeys(nodes, 0.0)
    for sequence in batch.readers:
        queries = model.layers * (batch.queries[sequence] + batch.decoded[sequence]) * model.query_bytes
        nbytes = min(len(tree.sequences[sequence].keys) * model.segment_bytes, queries)
        total += nbytes
        for owner in tree.sequences[sequence].owners:
            if owner in held:
                held[owner] += nbytes
    return total - np.array(list(held.values()))


def _match(nbytes: NDArray[np.float64], dops: Sequence[int]) -> list[list[int]]:
    """Columns for each row of `nbytes` [batches, instances], `dops` many, at the least sum; no column twice."""
    # Imported here: schedulers have scipy, engines that import this module need not.
    from scipy.optimize import linear_sum_assignment

    if not len(dops):
        return []
    rows = np.repeat(np.arange(len(dops)), dops)
    taken: list[list[int]] = [[] for _ in dops]
    for row, column in zip(*linear_sum_assignment(nbytes[rows]), strict=True):
        taken[rows[row]].append(int(column))
    # The first instance of a group is on the node that has most of the prefix.
    return [sorted(group, key=lambda column: (nbytes[row, column], column)) for row, group in enumerate(taken)]


def _sharers(tree: PrefixTree, batches: Sequence[Batch]) -> list[int]:
    """For each sequence, the number of these batches that read it."""
    counts = [0] * len(tree.sequences)
    for batch in batches:
        for sequence in batch.readers:
            counts[sequence] += 1
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
