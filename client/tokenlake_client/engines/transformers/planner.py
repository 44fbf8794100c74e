"""Mode `auto`: the planner chooses how the known prefix of each row is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tokenlake.attention import AttentionShape
from tokenlake.errors import TokenLakeError
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.planner import (
    Batch,
    Costs,
    Decision,
    Model,
    PrefixTree,
    Rates,
    Request,
    Way,
    choose,
    fetch_limit_s,
    grow,
)
from tokenlake_client.engines.common.counters import Counters
from tokenlake_client.engines.common.pool import CachePool
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.rows import Row

RETRY_S = 30.0
"""Seconds until plans ship queries again after no query engine was found."""


class BatchPlanner:
    """Plans the batches of one model. After an error of the pool, prefixes are fetched as without a plan."""

    def __init__(
        self,
        layout: Layout,
        shape: AttentionShape | None,
        rates: Rates,
        counters: Counters[Counts],
        pool_failed: Callable[[str, BaseException], None],
    ) -> None:
        """`shape`: the shape of the model's queries; None if query engines do not support it, so that no query is
        shipped."""
        self._layout = layout
        self._ship_from = 0.0 if shape is not None else math.inf
        self._model = Model.of(layout, shape or AttentionShape.of(layout, layout.kv_heads))
        self._rates = rates
        self._counters = counters
        self._pool_failed = pool_failed

    def plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int) -> bool:
        """Choose how the prefixes of the rows are used, and set each row's `limit` and `found`. True: queries are
        shipped to the prefixes; False: prefixes are fetched.

        If the batch has one row, its `lease` is kept for its load. The leases of several rows are released except for
        their first segments, because together they could exceed the limit of a session. Planning sets no in-flight
        markers and waits for no other engine, because rows are computed one after the other: the load of each row does
        that itself."""
        started = time.perf_counter()
        ship = False
        try:
            ship = self._plan(pool, rows, new_tokens)
        except Exception as error:
            for row in rows:
                # After an error of the pool the rows load nothing (limit 0), so that a pool that failed delays the
                # batch by one deadline only.
                row.limit = 0 if isinstance(error, TokenLakeError) else None
                with suppress(Exception):
                    row.release_lease()
            self._pool_failed("planning", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)
        return ship

    def could_not_ship(self) -> None:
        """Record that no query engine was found for the queries of a plan: plans ship no queries for the next `RETRY_S`
        seconds."""
        self._ship_from = time.monotonic() + RETRY_S

    def _plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int) -> bool:
        owners: dict[SegmentKey, tuple[NodeId, ...]] = {}
        disk_s: dict[SegmentKey, float] = {}
        requests = []
        size = self._layout.segment_tokens
        steps = min(new_tokens, round(self._rates.answer_tokens.value))
        for number, row in enumerate(rows):
            keys = tuple(row.keys_to_use(size))
            requests.append(Request(name=str(number), keys=keys, tokens=len(row.tokens), answer_tokens=steps))
            if not keys:
                continue
            row.lease = lease = pool.match(keys, row.info.match_options())
            nodes, seconds = (
                lease.sources() if lease.local_hits < lease.hits else ([pool.node] * lease.hits, [0.0] * lease.hits)
            )
            if len(rows) > 1:
                lease.release(1)
            owners |= {key: (NodeId(node),) for key, node in zip(keys, nodes, strict=False)}
            disk_s |= {key: each for key, each in zip(keys, seconds, strict=False) if each}
        tree = grow(requests, owners, size, disk_s)
        costs = Costs(tree, Batch(tree, range(len(rows)), self._rates), NodeId(pool.node), self._model, self._rates)
        decisions, _ = choose(costs, ship=time.monotonic() >= self._ship_from)
        return self._carry_out(pool, tree, decisions, rows)

    def _carry_out(self, pool: CachePool, tree: PrefixTree, decisions: Sequence[Decision], rows: Sequence[Row]) -> bool:
        ship = any(decision.way is Way.SHIP for decision in decisions)
        size = self._layout.segment_tokens
        limits = [0] * len(rows)
        for decision in decisions:
            start, count = tree.starts[decision.sequence] // size, len(tree.sequences[decision.sequence].keys)
            if decision.way is not Way.RECOMPUTE:
                for number in decision.requests:
                    limits[number] = start + count
            if decision.way is Way.FETCH and ship:
                # Other sequences of the batch are shipped, so this one is fetched into this node's arena now: the view
                # that is opened later finds the cached copy.
                keys = tree.requests[decision.requests[0]].keys[: start + count]
                with pool.match(keys) as lease:
                    limit_s = fetch_limit_s(self._rates.prefill, start * size, (start + count) * size)
                    lease.fetch(start, start + count, at_most_s=limit_s)
                    # The tokens count with the match of each row.
                    lease.release(counted=False)
        for row, limit, found in zip(rows, limits, tree.hit_tokens, strict=True):
            row.limit, row.found = limit, found // size
            self._counters.add(tokens_skipped=found - limit * size)
        return ship
