"""Mode `auto`: the planner says how the known prefix of each row is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tokenlake.attention import AttentionShape
from tokenlake.errors import TokenLakeError
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.planner import Batch, Costs, Decision, Model, PrefixTree, Rates, Request, Way, choose, grow
from tokenlake_client.engines.base import CachePool
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.rows import Row

__all__ = ["Planning"]

RETRY_S = 30.0
"""Until queries are shipped again after no query engine was found."""


class Planning:
    """Of one model. Errors of the pool are reported, and everything is fetched as without a plan."""

    def __init__(
        self,
        layout: Layout,
        shape: AttentionShape | None,
        rates: Rates,
        counters: Counters,
        pool_failed: Callable[[str, BaseException], None],
    ) -> None:
        """`shape`: of the model's queries; None where they cannot be shipped."""
        self._layout = layout
        self._ship_from = 0.0 if shape is not None else math.inf
        self._model = Model.of(layout, shape or AttentionShape.of(layout, layout.kv_heads))
        self._rates = rates
        self._counters = counters
        self._pool_failed = pool_failed

    def plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int) -> bool:
        """Set each row's `limit` and `found`. Are prefixes to be attended where they lie, or where they were brought?
        The `lease` of one row alone is kept for whoever reads it; of several it would be too much of what a session may
        lease. Waits for nobody, and makes nobody wait: rows are computed one after the other, and each is waited for
        when its turn has come."""
        started = time.perf_counter()
        ship = False
        try:
            ship = self._plan(pool, rows, new_tokens)
        except Exception as error:
            for row in rows:
                # A pool that fails is not asked again by those who read: it may cost one deadline, not two.
                row.limit = 0 if isinstance(error, TokenLakeError) else None
                with suppress(Exception):
                    row.give_back()
            self._pool_failed("planning", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)
        return ship

    def could_not_ship(self) -> None:
        """A plan's queries found no query engine: for a while none is asked for."""
        self._ship_from = time.monotonic() + RETRY_S

    def _plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int) -> bool:
        holders: dict[SegmentKey, tuple[NodeId, ...]] = {}
        requests = []
        size = self._layout.segment_tokens
        steps = min(new_tokens, round(self._rates.answer_tokens.value))
        for number, row in enumerate(rows):
            keys = tuple(row.wanted(size))
            requests.append(Request(name=str(number), keys=keys, tokens=len(row.tokens), answer_tokens=steps))
            if not keys:
                continue
            row.lease = lease = pool.match(keys, request=row.name, hints=row.hints, tokens=len(row.tokens))
            nodes = lease.nodes() if lease.local_hits < lease.hits else [pool.node] * lease.hits
            if len(rows) > 1:
                row.give_back()
            holders |= {key: (NodeId(node),) for key, node in zip(keys, nodes, strict=False)}
        tree = grow(requests, holders, size)
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
                # Attended here, once it is here: the view is opened over what is cached then.
                keys = tree.requests[decision.requests[0]].keys[: start + count]
                with pool.match(keys) as lease:
                    lease.fetch(start, start + count)
        for row, limit, found in zip(rows, limits, tree.hit_tokens, strict=True):
            row.limit, row.found = limit, found // size
            self._counters.add(tokens_skipped=found - limit * size)
        return ship
