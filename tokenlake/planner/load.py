"""Cache load: the share of each node's time that attention over its segments will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenlake.identity import NodeId
from tokenlake.planner.costs import Batch
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import PrefixTree


def cache_load(
    requests: Sequence[int], tree: PrefixTree, instances: Mapping[str, NodeId], layers: int, rates: Rates
) -> dict[NodeId, float]:
    """Returns the load, 0 to 1, of each node: the share of its time that attention over cached segments takes if all
    `requests` (indices into `tree.requests`) are prefilled at once. The nodes are those of `instances` and every node
    that computes attention. The worst case is assumed: the first owner of each sequence (consecutive cached segments of
    a prompt) computes all attention over it.

    The load of a node is `a / (a + T)`. `a`: seconds of attention over the sequences of which it is the first owner.
    `T`: the least seconds in which the instances, sharing the work evenly, prefill the new tokens without a cache.
    While the time of a prefill is not known, T is 0, so the load is 1 where `a` is not 0.

    Source: the paper TokenLake (arXiv 2508.17219), `L = max(M / (M + N B T), F / (F + N P T))`, for N instances with
    memory bandwidth B and compute P that read M bytes and do F operations. Here M / B and F / P are one measured value,
    `a`.
    """
    batch = Batch(tree, requests, rates)
    seconds = dict.fromkeys(instances.values(), 0.0)
    for sequence, queries in batch.queries.items():
        owner = tree.sequences[sequence].owners[0]
        layer = rates.peer(owner).queries.seconds(len(batch.readers[sequence]), queries, 0, tree.tokens[sequence])
        seconds[owner] = seconds.get(owner, 0.0) + layers * layer
    least = 0.0
    if rates.prefill.known:
        least = sum(rates.prefill.seconds(new, 0) for new in batch.new.values()) / max(1, len(instances))
    return {node: spent / (spent + least) if spent else 0.0 for node, spent in seconds.items()}
