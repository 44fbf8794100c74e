"""The scheduler's side measures prefills and loads, and loads what pays."""

from __future__ import annotations

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import SEGMENT, Bench, blocks_of, request
from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.plan import LoadTime, StepReport

TOKEN_S = 1e-3
CHEAP = LoadTime(0.1e-3, 0.1e-3)
DEAR = LoadTime(1.0, 0.1e-3)
ENOUGH = 8


def prefill(bench: Bench, count: int = ENOUGH) -> None:
    """So many steps with one prompt each, whose times the rank reports."""
    for number in range(count):
        one = request(20 + 8 * number, f"prefill {number}", 10_000 + 100 * number)
        bench.place(one)
        plan = bench.step(one, 0, one.num_tokens)
        bench.side.worker_output(StepReport(plan.step, 0, computed={plan.step: one.num_tokens * TOKEN_S}), [], set())
        bench.side.finished(one, [], complete=False)


def load(bench: Bench, took: LoadTime, node: str = "here", count: int = ENOUGH) -> None:
    """So many loads of a segment of `node`."""
    for number in range(count):
        one = request(SEGMENT + 1, f"load {node} {number}", 20_000 + 100 * number)
        know(bench, one, [node])
        assert bench.place(one) == SEGMENT, "below eight loads everything is loaded"
        plan = bench.side.step([], lambda name: [])
        report = StepReport(plan.step, 0, loaded={one.request_id: took})
        bench.side.worker_output(report, [one.request_id] if not plan.wait else [], set())
        bench.side.finished(one, [], complete=False)


def know(bench: Bench, one: FakeRequest, nodes: list[str]) -> None:
    """The segments of `one` lie on these nodes."""
    keys = bench.pool.prefix(one.all_token_ids).keys[: len(nodes)]
    bench.pool.known |= set(keys)
    bench.pool.places |= dict(zip(keys, nodes, strict=True))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(("took", "tokens"), [(CHEAP, 32), (DEAR, 0)])
def test_what_was_measured_decides(mode: str, took: LoadTime, tokens: int) -> None:
    bench, asked = Bench(mode), request(33)
    prefill(bench)
    load(bench, took)
    know(bench, asked, ["here"] * 4)
    before = bench.counters.read()
    assert bench.place(asked) == tokens
    counts = bench.counters.read()
    assert counts.tokens_hit - before.tokens_hit == tokens
    assert counts.tokens_skipped_by_cost == 32 - tokens
    assert bench.pool.leases[-1].released == (tokens == 0)


def test_below_eight_prefills_everything_is_loaded() -> None:
    bench, asked = Bench(), request(33)
    prefill(bench, ENOUGH - 1)
    load(bench, DEAR)
    know(bench, asked, ["here"] * 4)
    assert bench.place(asked) == 32


def test_it_can_be_turned_off() -> None:
    bench, asked = Bench(weigh_loads=False), request(33)
    prefill(bench)
    load(bench, DEAR)
    know(bench, asked, ["here"] * 4)
    assert bench.place(asked) == 32
    assert bench.counters.read().tokens_skipped_by_cost == 0


def test_what_is_here_is_loaded_and_what_a_slow_node_has_is_computed() -> None:
    bench, asked = Bench(), request(45)
    prefill(bench)
    load(bench, CHEAP)
    load(bench, CHEAP, "near")
    load(bench, DEAR, "far")
    know(bench, asked, ["here", "near", "here", "far", "far"])
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) == 24
    lease = bench.pool.leases[-1]
    assert (lease.released_from, lease.released) == (3, False)
    # vLLM had no room, and asks again.
    assert bench.side.matched(asked, 0) == 24
    bench.side.allocated(asked, blocks_of(asked), 24)
    plan = bench.side.step([], lambda name: [])
    (loads,) = plan.loads
    assert (loads.start, loads.stop, loads.here) == (0, 24, False)
    assert bench.counters.read().tokens_skipped_by_cost == 16


def test_tokens_add_up() -> None:
    """asked = local + hit + skipped + what the pool does not have."""
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
    counts = bench.counters.read()
    asked = counts.tokens_asked - before.tokens_asked
    hit = counts.tokens_hit - before.tokens_hit
    assert asked == 6 * 33
    assert counts.tokens_local - before.tokens_local == 32
    assert (hit, counts.tokens_skipped_by_cost) == (16 + 8 + 4, 8 + 8 + 8)
    assert asked == 32 + hit + counts.tokens_skipped_by_cost + missing


def test_a_load_that_failed_is_no_sample() -> None:
    bench = Bench()
    for number in range(ENOUGH):
        one = request(SEGMENT + 1, str(number), 100 * number)
        know(bench, one, ["here"])
        bench.place(one)
        plan = bench.side.step([], lambda name: [])
        # Another rank was done with it.
        report = StepReport(plan.step, 0, loaded={one.request_id: CHEAP})
        bench.side.worker_output(report, [one.request_id], {plan.loads[0].blocks[0]})
    assert bench.side.rates.copy.at is None


def test_the_slowest_rank_is_what_a_load_took() -> None:
    bench, one = Bench(), request(SEGMENT + 1)
    know(bench, one, ["here"])
    bench.place(one)
    for took in (LoadTime(0, 2.0), LoadTime(0, 5.0), LoadTime(0, 1.0)):
        plan = bench.side.step([], lambda name: [])
        bench.side.worker_output(StepReport(plan.step, 0, loaded={"r": took}), [], set())
    bench.side.worker_output(StepReport(plan.step, 0), ["r"], set())
    for _ in range(ENOUGH - 1):
        bench.side.rates.copy.add(1 << 20, 5.0, 0.0)
    assert bench.side.rates.copy.seconds(1 << 20) == pytest.approx(5.0)


def test_where_segments_lie_is_asked_behind_the_step_and_waited_for_by_nobody() -> None:
    bench, asked = Bench(), request(33)
    bench.pool.answers = bench.pool.answers_where = False
    know(bench, asked, ["far"] * 4)
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) is None
    bench.pool.answers = True
    bench.now = 0.019
    bench.side.worker_output(None, [], set())
    # Found on other nodes: the second question has a deadline of its own.
    bench.now = 0.030
    assert bench.side.matched(asked, 0) is None
    bench.pool.leases[0].answers = True
    assert bench.side.matched(asked, 0) == 32


def test_an_answer_that_never_comes_costs_one_deadline_and_no_lease() -> None:
    bench, asked = Bench(), request(33)
    bench.pool.answers_where = False
    know(bench, asked, ["far"] * 4)
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) is None
    bench.now = 0.020
    assert bench.side.matched(asked, 0) == 0
    assert bench.counters.read().lookups_late == 1
    assert bench.place(request(33, "next", 500)) == 0
    assert len(bench.pool.matches) == 1
    bench.pool.leases[0].answers = True
    assert bench.place(request(33, "later", 900)) == 0
    assert (len(bench.pool.matches), bench.pool.leases[0].released) == (2, True)


def test_a_question_that_fails_gives_its_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), request(33)
    bench.pool.answers_where = False
    know(bench, asked, ["far"] * 4)
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) is None
    bench.now = 0.020
    assert bench.side.matched(asked, 0) == 0

    def gone(nodes: object) -> None:
        raise Unreachable("gone")

    monkeypatch.setattr("tests.connector.fakes.FakeNodes.poll", gone)
    bench.side.new_request(request(33, "next", 500))
    assert bench.pool.leases[0].released
    assert len(bench.pool.matches) == 2


def test_calls_of_the_pool_carry_the_name_of_the_request() -> None:
    bench, asked = Bench(shared=True), request(33, "chatcmpl-7")
    bench.place(asked)
    (save,) = bench.step(asked, 0, 33).saves
    assert bench.pool.matches[0].options.request == bench.pool.reservations[0].request == save.request == "chatcmpl-7"
