"""Turns the times of served batches into the planner's inputs, as a serving engine does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenlake.identity import NodeId
from tokenlake.planner import Model, Rates
from tokenlake_bench.planner.passes import Pass, mean_pass
from tokenlake_bench.planner.rig import OWNER, SEGMENT_TOKENS, PrefixUse, Timed


def measure(rates: Rates, model: Model, timed: Sequence[Timed]) -> None:
    """Add the times of served batches to the planner's inputs `rates`; runs that did not use the whole prefix in the
    intended way are left out.

    The cost of a fetch or a query is its time minus the time of this node's own computation and reads, so samples of
    local reads and of prefills are added first.
    """
    whole = [one for one in timed if one.served]
    for one in whole:
        if one.use is not PrefixUse.SHIP:
            _own(rates, one)
        if one.use is PrefixUse.LOCAL:
            rates.copy.add(_nbytes(model, one, 1), one.pool_s / one.work.sharing, time.monotonic())
    peer = rates.peer(NodeId(OWNER))
    for one in whole:
        if one.use is PrefixUse.FETCH:
            here = rates.copy.seconds(_nbytes(model, one, one.work.sharing), one.work.sharing)
            peer.fetch.add(_nbytes(model, one, 1), one.pool_s - here, time.monotonic())
        elif one.use is PrefixUse.SHIP:
            peer.open_s.add(one.pool_s, time.monotonic())
            prefill, decode = _passes(one)
            if prefill is not None:
                own = rates.prefill.seconds(prefill.tokens, prefill.cached - one.work.prefix)
                _queries(rates, model, one, prefill, own)
            if decode is not None:
                own = rates.decode.seconds(round(decode.rows), decode.cached - one.work.prefix)
                _queries(rates, model, one, decode, own)


def _own(rates: Rates, one: Timed) -> None:
    """Add to the planner's inputs the times of one run's forward passes, which attended to the engine's own cache
    only."""
    prefill, decode = _passes(one)
    # Prefills of several requests in one batch are left out, because no engine integration makes them.
    if prefill is not None and prefill.rows == 1:
        rates.prefill.add(round(prefill.tokens), round(prefill.cached), prefill.seconds, time.monotonic())
    if decode is not None:
        rates.decode.add(round(decode.rows), round(decode.cached), decode.seconds, time.monotonic())


def _queries(rates: Rates, model: Model, one: Timed, passes: Pass, own_s: float) -> None:
    queries = round(passes.rows * passes.tokens)
    seconds = (passes.seconds - own_s) / model.layers
    nbytes = queries * model.query_bytes
    rates.peer(NodeId(OWNER)).queries.add(queries, nbytes, one.work.prefix, seconds, time.monotonic())


def _passes(one: Timed) -> tuple[Pass | None, Pass | None]:
    """(mean of the prefills, mean of the decode steps) of one run's forward passes; None where the run had no such
    pass."""
    prefills = [each for each in one.passes if each.tokens > 1]
    return mean_pass(prefills), mean_pass([each for each in one.passes if each.tokens == 1])


def _nbytes(model: Model, one: Timed, times: int) -> int:
    return times * one.work.prefix // SEGMENT_TOKENS * model.segment_bytes
