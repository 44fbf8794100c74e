"""The wait for segments that other engines compute, and the in-flight markers of this engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import SEGMENT, prompt
from tests.robustness.live import LAYOUT, LIMIT_S
from tokenlake.identity import NodeId
from tokenlake.planner import Rates
from tokenlake.planner.costs import LEAST_FETCH_S
from tokenlake.planner.fits import ENOUGH, NEWEST
from tokenlake.wire import Code
from tokenlake_client.engines.common.in_flight import FACTOR, LEAST_S, LONGEST_S
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_client.engines.transformers.measurements import Measurements

EACH_S = 0.01
"""The time to compute one token."""
SIZE = LAYOUT.segment_tokens


def rates_of(each_s: float = EACH_S, samples: int = ENOUGH, fetch_s: float | None = None) -> Rates:
    """`fetch_s`: the time to fetch a segment of `LAYOUT` from the only peer; None: there is no peer."""
    rates = Rates()
    measure(rates, each_s, samples)
    for count in range(1, ENOUGH + 1) if fetch_s is not None else ():
        rates.peer(NodeId("far")).fetch.add(count * LAYOUT.segment_bytes, count * (fetch_s or 0.0), 0.0)
    return rates


def measure(rates: Rates, each_s: float, samples: int = ENOUGH) -> None:
    for sample in range(samples):
        tokens = 16 * (1 + sample % ENOUGH)
        rates.prefill.add(tokens, 0, each_s * tokens, 0.0)
        rates.copy.add(tokens << 10, 1e-9 * tokens, 0.0)


def patience_s(rates: Rates, found: int, wanted: int) -> float:
    return Measurements(rates).in_flight_wait(LAYOUT, found, wanted).seconds(wanted - found)


def test_the_wait_follows_the_predicted_time() -> None:
    for found, wanted in ((0, 8), (4, 8), (7, 8)):
        computing = EACH_S * (wanted - found) * SIZE
        assert patience_s(rates_of(), found, wanted) == pytest.approx(FACTOR * computing, rel=0.01)
    slower = patience_s(rates_of(fetch_s=0.5 * EACH_S * SIZE), 0, 4)
    assert slower == pytest.approx(FACTOR * 1.5 * EACH_S * 4 * SIZE, rel=0.01)


@pytest.mark.parametrize(
    ("rates", "found", "wanted"),
    [
        (rates_of(samples=ENOUGH - 1), 0, 4),
        (rates_of(), 4, 4),
        (rates_of(), 6, 4),
        (rates_of(each_s=0.9 * LEAST_S / SIZE), 0, 1),
        (rates_of(fetch_s=1.1 * EACH_S * SIZE), 0, 4),
        (rates_of(each_s=1.1 * LONGEST_S / SIZE), 0, 1),
    ],
    ids=["not measured", "all found", "more found than needed", "short prefill", "slow fetch", "too long"],
)
def test_no_wait_where_it_does_not_pay(rates: Rates, found: int, wanted: int) -> None:
    assert patience_s(rates, found, wanted) == 0.0


def test_the_wait_is_limited_by_the_daemon() -> None:
    assert patience_s(rates_of(each_s=0.9 * LONGEST_S / SIZE), 0, 1) == LONGEST_S


def patience(pool: FaultyPool, first: int) -> list[float]:
    """The wait of each match for other engines, from the `first` one on."""
    asked = zip(pool.asked[first:], pool.missed[first:], strict=True)
    return [min(each.in_flight_wait_s, each.in_flight_wait_per_segment_s * missed) for each, missed in asked]


def serve(model: Any, pool: FaultyPool, mode: Any, rows: int = 1) -> list[float]:
    """The wait of each match of a call. The predicted time to compute a segment is 0.16 s."""
    ids = torch.tensor([prompt(4 * SEGMENT + 3, number) for number in range(rows)])
    before = len(pool.asked)
    with TokenLakeEngine(model, pool, EngineOptions(mode=mode, segment_tokens=SEGMENT)) as engine:
        measure(engine.rates, EACH_S, NEWEST)
        expected = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert torch.equal(engine.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None), expected)
        engine.flush()
        assert engine.counts.failures == 0
    return patience(pool, before)


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_each_prompt_is_waited_for_once(model: Any, pool: FaultyPool, mode: str) -> None:
    waits = pytest.approx(FACTOR * EACH_S * 4 * SEGMENT, rel=0.05)
    planned = [0.0] if mode == "auto" else []
    assert serve(model, pool, mode) == [*planned, waits]
    pool.evict()
    # The plan matches without a wait; then each row has a match with a wait.
    assert [wait > 0 for wait in serve(model, pool, mode, rows=2)] == [False] * len(2 * planned) + [True] * 2


def test_no_wait_for_a_complete_hit(model: Any, pool: FaultyPool) -> None:
    serve(model, pool, "fetch")
    assert serve(model, pool, "fetch") == [0.0]
    assert serve(model, pool, "auto") == [0.0]
    # Each of several rows is matched by the plan and by its load.
    serve(model, pool, "auto", rows=2)
    assert serve(model, pool, "auto", rows=2) == [0.0] * 4


def test_no_wait_for_segments_that_the_plan_computes(model: Any, pool: FaultyPool) -> None:
    serve(model, pool, "fetch")
    pool.evict(2)
    pool.far = "far"
    ids = torch.tensor([prompt(4 * SEGMENT + 3)])
    before = len(pool.asked)
    with TokenLakeEngine(model, pool, EngineOptions(segment_tokens=SEGMENT)) as engine:
        measure(engine.rates, EACH_S, NEWEST)
        for count in range(1, ENOUGH + 1):
            engine.rates.peer(NodeId("far")).fetch.add(count << 10, 100.0 * count, 0.0)
            engine.rates.peer(NodeId("far")).queries.add(count, count << 10, 16 * count, 100.0, 0.0)
        engine.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert engine.counts.tokens_skipped == 2 * SEGMENT
    assert patience(pool, before) == [0.0]


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_markers_are_set_and_removed_if_not_stored(model: Any, pool: FaultyPool, mode: str) -> None:
    serve(model, pool, mode)
    assert len(pool.marked) == 4
    assert all(seconds > LEAST_S for seconds in pool.marked.values())
    kept = next(iter(pool.segments))
    pool.evict(1)
    pool.refuse = Code.WRITE_BUDGET
    pool.marked.clear()
    serve(model, pool, mode)
    assert kept not in pool.marked
    assert [*pool.marked.values()] == [0.0] * 3


def test_a_full_queue_removes_markers(model: Any, pool: FaultyPool) -> None:
    options = EngineOptions(mode="fetch", segment_tokens=SEGMENT, write_queue=0)
    with TokenLakeEngine(model, pool, options) as engine:
        measure(engine.rates, EACH_S, NEWEST)
        engine.prefill(prompt(4 * SEGMENT + 3))
        assert engine.counts.tokens_not_stored == 4 * SEGMENT
    assert [*pool.marked.values()] == [0.0] * 4


@pytest.mark.parametrize(("each_s", "limit_s"), [(EACH_S, EACH_S * 4 * SEGMENT / 2), (1e-6, LEAST_FETCH_S)])
def test_fetches_last_at_most_half_as_long_as_the_prefill(
    model: Any, pool: FaultyPool, each_s: float, limit_s: float
) -> None:
    """All fetches of a prompt share the limit. Without measured prefills there is none."""
    row = prompt(4 * SEGMENT + 3)
    options = EngineOptions(mode="fetch", segment_tokens=SEGMENT, window=2)
    with TokenLakeEngine(model, pool, options) as engine:
        engine.prefill(row)
        assert engine.flush(LIMIT_S)
        engine.prefill(row)
        assert pool.limits == [0.0, 0.0]
        measure(engine.rates, each_s, NEWEST)
        pool.limits.clear()
        engine.prefill(row)
    first, second = pool.limits
    assert first == pytest.approx(limit_s, rel=0.01)
    assert 0 < second < first


def test_no_markers_without_a_wait(model: Any, pool: FaultyPool) -> None:
    with TokenLakeEngine(model, pool, EngineOptions(segment_tokens=SEGMENT)) as engine:
        engine.prefill(prompt(4 * SEGMENT + 3))
        engine.flush()
    assert not pool.marked
