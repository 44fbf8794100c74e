"""The scheduler's side measures prefills and loads, and loads the segments that are faster to load than to compute."""

from __future__ import annotations

import pytest

from tests.connector.side import CHEAP, DEAR, ENOUGH, SEGMENT, TOKEN_S, Bench, blocks_of, know, load, prefill, request
from tokenlake.planner.costs import LEAST_FETCH_S
from tokenlake_client.engines.vllm.known.step_plan import StepReport
from tokenlake_client.engines.vllm.load_worker import LoadTime


def test_weigh_loads_false_loads_every_hit() -> None:
    bench, asked = Bench(weigh_loads=False), request(33)
    prefill(bench)
    load(bench, DEAR)
    know(bench, asked, ["here"] * 4)
    assert bench.place(asked) == 32
    assert bench.counters.read().tokens_skipped_by_cost == 0
    (plan,) = bench.idle().loads
    assert plan.at_most_s == 0.0, "it may take longer than computing"


def test_segments_of_a_slow_node_are_computed() -> None:
    bench, asked = Bench(), request(45)
    prefill(bench)
    load(bench, CHEAP)
    load(bench, CHEAP, "near")
    load(bench, DEAR, "far")
    know(bench, asked, ["here", "near", "here", "far", "far"])
    assert bench.ask(asked) == 24
    lease = bench.pool.leases[-1]
    assert (lease.released_from, lease.released) == (3, False)
    # vLLM asks again for a request for which it had no free blocks.
    assert bench.side.matched(asked, 0) == 24
    bench.side.allocated(asked, blocks_of(asked), 24)
    plan = bench.idle()
    (loads,) = plan.loads
    assert (loads.start, loads.stop, loads.local) == (0, 24, False)
    assert (lease.took or ())[:2] == (0, 24)
    assert bench.counters.read().tokens_skipped_by_cost == 16


def test_a_load_waits_at_most_half_as_long_as_its_prefill() -> None:
    """Without measured prefills it has no limit, and a short load has that of a busy machine."""
    bench, asked = Bench(), request(4001)
    know(bench, asked, ["far"] * 500)
    assert bench.place(asked) == 4000
    (plan,) = bench.idle().loads
    assert plan.at_most_s == 0.0
    prefill(bench)
    load(bench, CHEAP, "far")
    for number, (tokens, at_most_s) in enumerate([(4000, 4000 * TOKEN_S / 2), (SEGMENT, LEAST_FETCH_S)]):
        asked = request(tokens + 1, f"long {number}", 30_000 * (number + 1))
        know(bench, asked, ["far"] * (tokens // SEGMENT))
        assert bench.place(asked) == tokens
        (plan,) = bench.idle().loads
        assert plan.at_most_s == pytest.approx(at_most_s, rel=0.01)


def test_token_counts_add_up() -> None:
    """The local tokens, the hit, the tokens not worth a load and the tokens that the pool lacks add up to those asked
    for."""
    bench = Bench()
    prefill(bench)
    load(bench, CHEAP)
    load(bench, DEAR, "far")
    before = bench.counters.read()
    missing = 0
    for number, (nodes, local) in enumerate(
        [(["here"] * 2, 0), (["here", "far"], 0), (["far"], 0), (["here", "here", "far"], 12), ([], 4), (["here"], 16)]
    ):
        one = request(33, str(number), 100 * number)
        know(bench, one, nodes)
        missing += 33 - max(local, SEGMENT * len(nodes))
        bench.place(one, local)
    unloaded = bench.pool.leases[-4]
    assert (unloaded.took, unloaded.released) == ((0, 0, 0.0), True), "nothing of it is worth a load"
    counts = bench.counters.read()
    asked = counts.tokens_asked - before.tokens_asked
    hit = counts.tokens_hit - before.tokens_hit
    assert asked == 6 * 33
    assert counts.tokens_local - before.tokens_local == 32
    assert (hit, counts.tokens_skipped_by_cost) == (16 + 8 + 4, 8 + 8 + 8)
    assert counts.tokens_not_found - before.tokens_not_found == missing
    assert counts.tokens_not_asked == before.tokens_not_asked


def test_a_failed_load_is_no_sample() -> None:
    bench = Bench()
    for number in range(ENOUGH):
        one = request(SEGMENT + 1, str(number), 100 * number)
        know(bench, one, ["here"])
        bench.place(one)
        plan = bench.idle()
        # Another rank has completed the load.
        report = StepReport(0, loaded={one.request_id: CHEAP})
        bench.side.worker_output(report, [one.request_id], {plan.loads[0].blocks[0]})
    assert bench.side.rates.copy.at is None


def test_a_load_takes_the_time_of_its_slowest_rank() -> None:
    bench, one = Bench(), request(SEGMENT + 1)
    know(bench, one, ["here"])
    bench.place(one)
    for took in (LoadTime(0, 2.0), LoadTime(0, 5.0), LoadTime(0, 1.0)):
        bench.idle()
        bench.report(0, loaded={"r": took})
    bench.report(0, ["r"])
    for _ in range(ENOUGH - 1):
        bench.side.rates.copy.add(1 << 20, 5.0, 0.0)
    assert bench.side.rates.copy.seconds(1 << 20) == pytest.approx(5.0)


def test_nodes_are_asked_for_without_waiting() -> None:
    bench, asked = Bench(), request(33)
    bench.pool.answers = bench.pool.answers_where = False
    know(bench, asked, ["far"] * 4)
    assert bench.ask(asked) is None
    bench.pool.answers = True
    bench.now = 0.019
    bench.side.worker_output(None, [], set())
    # The match found segments on other nodes. The request for the names of these nodes has a deadline of its own.
    bench.now = 0.030
    assert bench.side.matched(asked, 0) is None
    bench.pool.leases[0].answers = True
    assert bench.side.matched(asked, 0) == 32


def test_a_missing_answer_costs_one_deadline_and_no_lease() -> None:
    bench, asked = Bench(), request(33)
    bench.pool.answers_where = False
    know(bench, asked, ["far"] * 4)
    assert bench.ask(asked) is None
    bench.now = 0.020
    assert bench.side.matched(asked, 0) == 0
    assert bench.counters.read().lookups_late == 1
    assert bench.place(request(33, "next", 500)) == 0
    assert len(bench.pool.matches) == 1
    bench.pool.leases[0].answers = True
    assert bench.place(request(33, "later", 900)) == 0
    assert (len(bench.pool.matches), bench.pool.leases[0].released) == (2, True)


def test_pool_calls_carry_the_request_name() -> None:
    bench, asked = Bench(shared=True), request(33, "chatcmpl-7")
    bench.place(asked)
    (save,) = bench.step(asked, 0, 33).saves
    assert bench.pool.matches[0].options.request == bench.pool.reservations[0].request == save.request == "chatcmpl-7"
