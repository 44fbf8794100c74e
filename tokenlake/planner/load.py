"""Cache load: the share of each node's time that attention over its segments will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenlake.identity import NodeId
from tokenlake.planner.costs import Batch
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import PrefixTree

__all__ = ["cache_load"]


def cache_load(
    requests: Sequence[int], tree: PrefixTree, instances: Mapping[str, NodeId], layers: int, rates: Rates
) -> dict[NodeId, float]:
    """The load, 0 to 1, of each node of `instances` and of each owner, if all `requests` (indices into the tree's) are
    prefilled at once. It assumes the worst case: the first owner of each sequence computes attention over it.

    Source: the paper's `L = max(M / (M + N B T), F / (F + N P T))`. Here M / B and F / P are measured as one value, the
    seconds of attention `a`, and the load is taken per node: `a / (a + T)`. T is the least time that the instances need
    for the new tokens alone, shared evenly. While the time of a prefill is not known, T is 0 and the load of a node
    that owns any segment is 1.
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
