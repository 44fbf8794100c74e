"""`get_cache_load`: the share of each node's time that attention over its segments will take."""

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
    """Per node of `instances` or of a owner, 0 to 1: what the pool itself needs there if all `requests` (indices into
    the tree's) are prefilled at once, in the worst case, where each run is attended at its first owner.

    The paper's `L = max(M / (M + N B T), F / (F + N P T))` with M / B and F / P measured as one, the seconds of
    attention `a`, and taken per node: `a / (a + T)`. T is the least time that the instances need for the new tokens
    alone, shared evenly; 0 while the time of a prefill is not known, which makes the share of a node that holds any 1.
    """
    batch = Batch(tree, requests, rates)
    seconds = dict.fromkeys(instances.values(), 0.0)
    for run, queries in batch.queries.items():
        owner = tree.runs[run].owners[0]
        layer = rates.peer(owner).queries.seconds(len(batch.readers[run]), queries, 0, tree.tokens[run])
        seconds[owner] = seconds.get(owner, 0.0) + layers * layer
    least = 0.0
    if rates.prefill.known:
        least = sum(rates.prefill.seconds(new, 0) for new in batch.new.values()) / max(1, len(instances))
    return {node: spent / (spent + least) if spent else 0.0 for node, spent in seconds.items()}
