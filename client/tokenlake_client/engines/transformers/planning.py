"""Mode `auto`: the planner says how the known prefix of each row is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.planner import Batch, Costs, Decision, Model, PrefixTree, Rates, Request, Way, choose, grow
from tokenlake_client.engines.base import CachePool
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.rows import Row

__all__ = ["Plan", "Planning"]

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

    def plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int) -> Plan:
        """Set each row's `limit`. The plan holds leases: close it when the rows are filled, or their views open."""
        started = time.perf_counter()
        plan = Plan()
        try:
            self._plan(pool, rows, new_tokens, plan)
        except Exception as error:
            plan.close()
            plan.ship = False
            for row in rows:
                row.limit = None
            self._pool_failed("planning", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)
        return plan

    def could_not_ship(self) -> None:
        """A plan's queries found no query engine: for a while none is asked for."""
        self._ship_from = time.monotonic() + RETRY_S

    def _plan(self, pool: CachePool, rows: Sequence[Row], new_tokens: int, plan: Plan) -> None:
        holders: dict[SegmentKey, tuple[NodeId, ...]] = {}
        requests = []
        size = self._layout.segment_tokens
        steps = min(new_tokens, round(self._rates.answer_tokens.value))
        for number, row in enumerate(rows):
            keys = tuple(row.chain.keys[: (len(row.tokens) - 1) // size]) if row.chain is not None else ()
            requests.append(Request(name=str(number), keys=keys, tokens=len(row.tokens), answer_tokens=steps))
            lease = pool.match(keys) if keys else None
            plan.leases.append(lease)
            if lease is not None and lease.hits:
                nodes = lease.nodes() if lease.local_hits < lease.hits else [pool.node] * lease.hits
                holders |= {key: (NodeId(node),) for key, node in zip(keys, nodes, strict=False)}
        tree = grow(requests, holders, size)
        if not tree.runs:
            return
        costs = Costs(tree, Batch(tree, range(len(rows)), self._rates), NodeId(pool.node), self._model, self._rates)
        decisions, _ = choose(costs, ship=time.monotonic() >= self._ship_from)
        self._carry_out(tree, decisions, rows, plan)

    def _carry_out(self, tree: PrefixTree, decisions: Sequence[Decision], rows: Sequence[Row], plan: Plan) -> None:
        plan.ship = any(decision.way is Way.SHIP for decision in decisions)
        size = self._layout.segment_tokens
        limits = [0] * len(rows)
        for decision in decisions:
            start, count = tree.starts[decision.run] // size, len(tree.runs[decision.run].keys)
            if decision.way is not Way.RECOMPUTE:
                for number in decision.requests:
                    limits[number] = start + count
            if decision.way is Way.FETCH and plan.ship:
                # Attended here, once it is here: the view is opened over what is staged now.
                lease = plan.leases[decision.requests[0]]
                assert lease is not None
                lease.fetch(start, start + count)
        for row, limit, found in zip(rows, limits, tree.hit_tokens, strict=True):
            row.limit = limit
            self._counters.add(tokens_skipped=found - limit * size)


class Plan:
    """How one batch uses what is cached."""

    def __init__(self, *, ship: bool = False) -> None:
        self.ship = ship
        """Are prefixes attended where they lie, or where they were brought?"""
        self.leases: list[Any] = []

    def close(self) -> None:
        """Give the leases back. Idempotent; never raises."""
        for lease in self.leases:
            if lease is not None:
                lease.release()
        self.leases = []
