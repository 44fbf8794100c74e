"""The data plane under plans: what an engine does with the plan of a batch that it was given.

::

    views = open_views(pool, plan, tree, heads, scale)       # local and fetched runs, and those to ask elsewhere
    buffer = pool.init_query([(views[index], new_tokens) for index in views])
    ticket = pool.query(buffer, layer)                       # for each layer; what is recomputed is the engine's own
    transfer = pool.init_transfer(new_cache(transfer_plan, tree))
    pool.put(transfer, layer, caches)
"""

from __future__ import annotations

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.planner import PrefixTree, QueryPlan, TransferPlan, Way
from tokenlake_client.pool import Pool
from tokenlake_client.queries import View

__all__ = ["new_cache", "open_views"]


def open_views(pool: Pool, plan: QueryPlan, tree: PrefixTree, heads: int, scale: float) -> dict[int, View]:
    """By request of the plan (index into the tree's), a view of what is not recomputed of its prefix; the caller closes
    them. Runs to be fetched are brought here first, once for all that read them.

    A plan may be stale: of what is gone a view has less (`view.hits`), and a request of which nothing can be attended
    to has none: its prefix is computed. Never raises what the pool raises.
    """
    stops: dict[int, int] = {}
    fetches: dict[int, list[tuple[int, int]]] = {}
    for decision in plan.decisions:
        start = tree.starts[decision.run] // tree.segment_tokens
        stop = start + len(tree.runs[decision.run].keys)
        if decision.way is not Way.RECOMPUTE:
            stops |= dict.fromkeys(decision.requests, stop)
        if decision.way is Way.FETCH:
            fetches.setdefault(decision.requests[0], []).append((start, stop))
    views: dict[int, View] = {}
    for request, stop in stops.items():
        view = _open(pool, tree.requests[request].keys[:stop], fetches.get(request, []), heads, scale)
        if view is not None:
            views[request] = view
    return views


def _open(
    pool: Pool, keys: tuple[SegmentKey, ...], fetches: list[tuple[int, int]], heads: int, scale: float
) -> View | None:
    try:
        lease = pool.match(keys)
    except TokenLakeError:
        return None
    try:
        for start, stop in fetches:
            lease.fetch(start, min(stop, lease.hits))
        view = pool.open_view(lease, heads, scale) if lease.hits else None
    except TokenLakeError:
        view = None
    if view is None:
        lease.release()
    elif not view.hits:
        view.close()
        view = None
    return view


def new_cache(plan: TransferPlan, tree: PrefixTree) -> list[tuple[tuple[SegmentKey, ...], int]]:
    """For `Pool.init_transfer`: the keys of the segments that the batch completes, and where they begin in their
    prompts, one per request of the plan that completes any."""
    return [(tree.requests[index].keys[first : first + count], first) for index, first, count in plan.segments]
