"""Carries out a scheduler's plans (`tokenlake.planner`) in an engine: opens views for the query plan of a batch, and
lists the new cache that its transfer plan stores.

::

    views = open_views(pool, plan, tree, heads, scale)       # over local, fetched and shipped sequences
    buffer = pool.init_query([(views[index], new_tokens) for index in views])
    ticket = pool.query(buffer, layer)                       # for each layer; the engine computes the rest
    transfer = pool.init_transfer(new_cache(transfer_plan, tree))
    pool.put(transfer, layer, caches)
"""

from __future__ import annotations

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.planner import PrefillFit, PrefixTree, QueryPlan, TransferPlan, Way, fetch_limit_s
from tokenlake_client.pool import Pool
from tokenlake_client.queries import View


def open_views(
    pool: Pool,
    plan: QueryPlan,
    tree: PrefixTree,
    heads: int,
    scale: float,
    match_s: float | None = None,
    prefill: PrefillFit | None = None,
) -> dict[int, View]:
    """For each request of the plan (an index into the requests of `tree`), a view of the part of its prefix that is not
    recomputed. The caller closes the views. The sequences that the plan fetches are fetched first, each once for all
    requests that read it.

    Segments may have been evicted since the plan was made: then a view covers fewer segments (`view.hits`), and a
    request without any segment left has no view, so that the engine computes its prefix. `match_s`: deadline of the
    match of each prefix. `prefill`: the measured time of prefills, from which the limit of each fetch follows
    (`tokenlake.planner.fetch_limit_s`). Raises no `TokenLakeError`.
    """
    stops: dict[int, int] = {}
    fetches: dict[int, list[tuple[int, int]]] = {}
    for decision in plan.decisions:
        start = tree.starts[decision.sequence] // tree.segment_tokens
        stop = start + len(tree.sequences[decision.sequence].keys)
        if decision.way is not Way.RECOMPUTE:
            stops |= dict.fromkeys(decision.requests, stop)
        if decision.way is Way.FETCH:
            fetches.setdefault(decision.requests[0], []).append((start, stop))
    views: dict[int, View] = {}
    size = tree.segment_tokens
    for request, stop in stops.items():
        parts = [
            (start, end, fetch_limit_s(prefill, start * size, end * size) if prefill is not None else 0.0)
            for start, end in fetches.get(request, [])
        ]
        view = _open(pool, tree.requests[request].keys[:stop], parts, heads, scale, match_s)
        if view is not None:
            views[request] = view
    return views


def _open(
    pool: Pool,
    keys: tuple[SegmentKey, ...],
    fetches: list[tuple[int, int, float]],
    heads: int,
    scale: float,
    match_s: float | None,
) -> View | None:
    try:
        lease = pool.match(keys, deadline_s=match_s)
    except TokenLakeError:
        return None
    try:
        for start, stop, limit_s in fetches:
            lease.fetch(start, min(stop, lease.hits), at_most_s=limit_s)
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
    """The argument of `Pool.init_transfer`: for each request of the plan, the keys of the segments that it completes
    and the index of the first of them in the prompt."""
    return [(tree.requests[index].keys[first : first + count], first) for index, first, count in plan.segments]
