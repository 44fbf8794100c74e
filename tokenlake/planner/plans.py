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
from tokenlake.planner.router import Prefill, Router
from tokenlake.planner.tree import PrefixTree


class QueryPlan(msgspec.Struct, frozen=True):
    """How one batch uses the cached prefixes of its requests."""

    node: NodeId
    """Node of the first of the instances over which the batch is divided. The ways to use the cached prefixes are
    chosen for this node."""
    decisions: tuple[Decision, ...]
    seconds: float
    """Expected seconds that the batch's `decisions` cost in total, from its prefill to its last decode step."""


class TransferPlan(msgspec.Struct, frozen=True):
    """New cache of one batch: (index in the tree, first segment, number of segments) of each request whose prefill
    completes segments. They are stored at the node where the batch runs; the pool moves them to their owners."""

    node: NodeId
    segments: tuple[tuple[int, int, int], ...]


class Plans(msgspec.Struct, frozen=True):
    """The plans for some batches: one entry per batch in each field, in the order of the batches."""

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
    router: Router | None = None,
) -> Plans:
    """Plans for one iteration. Pure and deterministic.

    `batches`: indices of the tree's requests; no request is in two. `dops`: the number of instances for each batch, at
    least 1. `instances`: the node of each instance. `router`: the requests under way at the instances (default: none
    are). Batches are assigned to instances at the least sum of `_start_costs` (by the Hungarian method); in these, a
    sequence on another node counts with the bytes of its cache or of the batch's queries, whichever are fewer.

    Raises ValueError where `dops` asks for more instances than given, and for batches that share a request.
    """
    _check(batches, dops, instances)
    names = list(instances)
    made = [Batch(tree, batch, rates) for batch in batches]
    router = router or Router(instances, tree.segment_tokens, model.segment_bytes, rates)
    waiting = np.array([router.queued(name) for name in names])
    starts = [_start_costs(tree, batch, instances, model, router) for batch in made]
    places = _match(np.array(starts).reshape(len(made), len(names)), waiting, dops)
    groups = tuple(tuple(names[place] for place in group) for group in places)
    batch_nodes = [instances[group[0]] for group in groups]
    sharers = {
        each: _sharers(tree, [batch for batch, at in zip(made, batch_nodes, strict=True) if at == each])
        for each in dict.fromkeys(batch_nodes)
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


def _start_costs(
    tree: PrefixTree, batch: Batch, instances: Mapping[str, NodeId], model: Model, router: Router
) -> list[float]:
    """Returns the cost of starting the batch at each instance, without the prompts that wait there."""
    token_bytes = model.segment_bytes / tree.segment_tokens
    total, held = 0.0, dict.fromkeys(instances.values(), 0.0)
    coming, far = dict.fromkeys(instances, 0.0), dict.fromkeys(instances, 0.0)
    labelled = any(router.locations.values())
    for sequence in batch.readers:
        queries = model.layers * (batch.queries[sequence] + batch.decoded[sequence]) * model.query_bytes
        keys, owners = tree.sequences[sequence].keys, tree.sequences[sequence].owners
        tokens = min(float(tree.tokens[sequence]), queries / token_bytes)
        total += tokens
        for owner in owners:
            if owner in held:
                held[owner] += tokens
        # A request that contains the last segment of a sequence contains all of them.
        flying = router.in_flight(keys[-1])
        for name in flying:
            if name in coming and instances[name] not in owners:
                coming[name] += tokens
        for name, node in instances.items() if labelled else ():
            if name not in flying:
                far[name] += tokens * router.levels(node, owners)
    further = {
        request: router.further(tree.requests[request], tree.hit_tokens[request] // tree.segment_tokens)
        for request in batch.requests
    }
    anywhere = [Prefill(new, tree.hit_tokens[request]) for request, new in batch.new.items()]
    computing = router.computing(anywhere)
    furthest = sum(max(ahead.values(), default=0) for ahead in further.values())
    distances = {(total - held[node], far[name]) for name, node in instances.items()}
    moving = {(moved, away): router.moving(moved, far=away) for moved, away in distances}
    costs: list[float] = []
    for name, node in instances.items():
        moved = total - held[node]
        if not furthest and not coming[name]:
            costs.append(computing + moving[moved, far[name]])
            continue
        reach = {request: ahead[name] for request, ahead in further.items() if name in ahead}
        repeated = (furthest - sum(reach.values())) * tree.segment_tokens
        shortened = _shortened(anywhere, batch.requests, reach, tree)
        brought = max(0.0, moved - coming[name])
        costs.append(router.computing(shortened) + router.moving(brought, repeated, far[name]))
    return costs


def _shortened(
    prefills: Sequence[Prefill], requests: Sequence[int], reach: Mapping[int, int], tree: PrefixTree
) -> list[Prefill]:
    """Returns the prefills of `requests`, shortened by the segments (`reach`, by request) that other requests compute
    before they begin."""
    shorter = []
    for (_, prefix), request in zip(prefills, requests, strict=True):
        cached = prefix + reach.get(request, 0) * tree.segment_tokens
        shorter.append(Prefill(max(1, tree.requests[request].tokens - cached), cached))
    return shorter


def _match(costs: NDArray[np.float64], waiting: NDArray[np.float64], dops: Sequence[int]) -> list[list[int]]:
    """Returns, for each batch (row of `costs` [batches, instances]), `dops` many instances (columns), so that the sum
    of `costs` and `waiting` [instances] is least; no instance is chosen twice."""
    # Imported here: schedulers have scipy, engines that import this module need not.
    from scipy.optimize import linear_sum_assignment

    if not len(dops):
        return []
    rows = np.repeat(np.arange(len(dops)), dops)
    taken: list[list[int]] = [[] for _ in dops]
    for row, column in zip(*linear_sum_assignment(costs[rows] + waiting), strict=True):
        taken[rows[row]].append(int(column))
    # The ways are chosen for the first instance of a group: the one at which least has to be computed and brought.
    return [sorted(group, key=lambda column: (costs[row, column], column)) for row, group in enumerate(taken)]


def _sharers(tree: PrefixTree, batches: Sequence[Batch]) -> list[int]:
    """Returns, for each sequence of the tree, the number of `batches` that read it."""
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
