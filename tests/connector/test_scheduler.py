"""The scheduler's side with a pool that answers, is late, is unreachable, or raises any error."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.connector.fakes import FakePool, FakeRequest
from tests.connector.side import ABORTED, TOKEN_S, Bench, blocks_of, know, prefill, request
from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.request import ScheduledPart
from tokenlake_client.engines.vllm.known.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.known.step_plan import StepReport
from tokenlake_client.engines.vllm.settings import EngineSettings


def test_a_hit_is_loaded_and_the_rest_stored() -> None:
    bench, asked = Bench(), request(29)
    bench.know(asked.all_token_ids[:16])
    assert bench.place(asked) == 16
    plan = bench.idle()
    assert plan.idle
    (load,) = plan.loads
    assert (load.start, load.stop, load.blocks, load.local) == (0, 16, (100, 101, 102, 103), True)
    bench.report(0, ["r"])
    assert bench.pool.leases[0].released
    plan = bench.step(asked, 16, 13)
    (save,) = plan.saves
    assert (save.first, save.blocks, len(save.keys)) == (2, (104, 105), 1)
    assert (plan.session, plan.incarnation) == (7, 1)


@pytest.mark.parametrize(
    ("tokens", "known", "local", "took"),
    [(29, 16, 0, (0, 16)), (29, 16, 4, (4, 16)), (17, 16, 4, (4, 16)), (16, 16, 4, (4, 12)), (29, 16, 20, (20, 20))],
)
def test_the_lease_knows_which_tokens_are_loaded(tokens: int, known: int, local: int, took: tuple[int, int]) -> None:
    bench, asked = Bench(), request(tokens)
    bench.know(asked.all_token_ids[:known])
    bench.place(asked, local)
    assert bench.pool.leases[0].took == (*took, 0.0)
    assert bench.reported == []


def test_the_seconds_that_a_load_saves() -> None:
    bench, one = Bench(), request(29)
    prefill(bench)
    know(bench, one, ["here", "here"])
    assert bench.place(one, 4) == 12
    took = bench.pool.leases[-1].took
    assert took is not None
    assert took[:2] == (4, 16)
    assert took[2] == pytest.approx(12 * TOKEN_S, rel=0.1)


def test_a_late_answer_is_told_what_vllm_had() -> None:
    bench, asked = Bench(), request(29)
    bench.know(asked.all_token_ids[:16])
    bench.pool.answers = False
    bench.side.new_request(asked)
    bench.now = 1.0
    assert bench.side.matched(asked, 8) == 0
    bench.pool.answers = True
    bench.place(request(29, "later", 500))
    assert (bench.pool.leases[0].took, bench.pool.leases[0].released) == ((8, 8, 0.0), True)


def test_an_overdue_pool_is_not_asked_again() -> None:
    bench = Bench()
    bench.pool.answers = False
    first = request(17, "a")
    bench.side.new_request(first)
    bench.now = 1.0
    assert bench.side.matched(first, 0) == 0
    for number in range(5):
        # None of these requests waits for a deadline.
        assert bench.place(request(17, f"b{number}", 50 * number)) == 0
    assert len(bench.pool.matches) == 1
    bench.pool.answers = True
    later = request(17, "c")
    bench.know(later.all_token_ids)
    assert bench.place(later) == 16
    assert bench.pool.leases[0].released, "the lease of the late answer is given back"


def test_a_prompt_is_hashed_once() -> None:
    bench, asked = Bench(), request(40)
    bench.place(asked)
    for computed in range(0, 40, 10):
        bench.step(asked, computed, 10)
    assert bench.pool.hashed == 1


def test_hooks_make_a_bounded_number_of_calls_per_segment() -> None:
    """A hook that did work per token would hold vLLM's scheduler up on a long prompt."""
    segments = 128
    pool: Any = FakePool(segment_tokens=256)
    settings = EngineSettings(segment_tokens=256)
    side = SchedulerSide(lambda: pool, settings, 128, EngineCounters(), lambda what, error: None, segment_bytes=1)
    asked = FakeRequest("r", list(range(256 * segments)))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        side.new_request(asked)
        matched = side.matched(asked, 0)
    finally:
        sys.setprofile(None)
    assert matched == 0
    assert calls < 8 * segments


def test_a_failed_load_is_not_repeated() -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids[:16])
    assert bench.place(asked) == 16
    plan = bench.idle()
    bench.report(0, ["r"], {102, 103})
    assert bench.side.matched(asked, 0) == 0
    bench.side.allocated(asked, blocks_of(asked), 0)
    # All segments are offered again, because the one that could not be read may be lost.
    plan = bench.step(asked, 0, 33)
    assert [save.first for save in plan.saves] == [0]


def test_an_aborted_request_releases_its_lease() -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids)
    assert bench.ask(asked) == 32
    assert not bench.end(asked, ABORTED)[0]
    assert bench.pool.leases[0].released


def test_reused_blocks_are_taken_back() -> None:
    bench, first, second = Bench(), request(17, "a"), request(17, "b", 500)
    bench.place(first)
    plan = bench.step(first, 0, 17)
    (save,) = plan.saves
    bench.place(second)
    plan = bench.step(second, 0, 17)
    assert plan.reused == (save.job,)
    bench.report(plan.saves[0].job)
    assert bench.step(second, 17, 1).reused == ()


def test_shared_blocks_are_not_taken_back() -> None:
    bench, first, second = Bench(), request(17, "a"), request(17, "b")
    bench.place(first)
    bench.step(first, 0, 17)
    bench.place(second, local=16)
    part = ScheduledPart("b", 16, 1, [100, 101, 102, 103, 200], whole=True)
    assert bench.side.step([part], lambda name: [100, 101, 102, 103, 200]).reused == ()


def test_ranks_that_share_segments_get_one_reservation() -> None:
    bench, asked = Bench(shared=True), request(33)
    bench.place(asked)
    bench.pool.refuse_from = 3
    plan = bench.step(asked, 0, 33)
    (save,) = plan.saves
    assert (save.write, len(save.keys), len(save.blocks)) == (1, 3, 6)
    # The refused segment is offered again in the next step.
    bench.pool.refuse_from = 1 << 30
    plan = bench.step(asked, 33, 1)
    assert [(later.write, later.first) for later in plan.saves] == [(2, 3)]
    assert not bench.pool.reservations[0].released
    bench.report(save.job)
    assert [reservation.released for reservation in bench.pool.reservations] == [True, False]


def test_an_unreachable_pool_does_not_fail_a_step() -> None:
    bench, asked = Bench(shared=True), request(33)
    bench.place(asked)
    bench.pool.reachable = False
    assert bench.step(asked, 0, 33).saves == ()
    assert bench.reported == ["planning which segments to store"]
    with pytest.raises(Unreachable):
        bench.side.new_request(request(33, "b"))


def test_early_lookups_are_limited() -> None:
    bench = Bench()
    many = [request(17, str(number), 50 * number) for number in range(40)]
    for one in many:
        bench.side.new_request(one)
    assert len(bench.pool.matches) == 16
    assert bench.side.matched(many[-1], 0) == 0
    assert len(bench.pool.matches) == 17


def test_promised_loads_reach_the_ranks_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids)
    assert bench.ask(asked) == 32
    monkeypatch.setattr("tests.connector.fakes.FakeLease.incarnation", property(lambda lease: 1 // 0), raising=False)
    bench.side.allocated(asked, blocks_of(asked), 32)
    assert bench.reported == ["preparing a load"]
    (load,) = bench.idle().loads
    assert (load.leases, load.incarnation, load.blocks) == ((), 0, tuple(range(100, 108)))
    bench.side.worker_output(StepReport(0), ["r"], set(load.blocks))
    bench.side.close()


def test_a_preempted_request_begins_anew() -> None:
    """Its tokens in vLLM's own cache are those of the blocks that it has now. Otherwise the blocks of a save that is
    under way would not be taken back when this request writes them, and foreign bytes would be stored."""
    bench, asked, other = Bench(), request(64, "r"), request(17, "other", 500)
    bench.place(asked, local=32)
    bench.step(asked, 32, 32)
    bench.place(other)
    (save,) = bench.step(other, 0, 17).saves
    assert bench.side.matched(asked, 0, reads=False) == 0
    bench.side.allocated(asked, blocks_of(asked), 0)
    assert save.job in bench.step(asked, 0, 8).reused


PROMISED = 32


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("it is broken")


def promised() -> tuple[Bench, Any]:
    """A request that was given blocks for the load of `PROMISED` tokens."""
    bench, one = Bench(), request(40)
    know(bench, one, ["here"] * 4)
    assert bench.place(one) == PROMISED
    return bench, one


@pytest.mark.parametrize("where", ["connected", "session", "incarnation", "there"])
def test_a_step_hands_out_its_loads_when_the_pool_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is lost leaves its request waiting for ever, or computing with blocks that were never filled."""
    bench, one = promised()
    # `SchedulerSide` gets its pool from the test's bench, if it is there.
    owner = Bench if where == "there" else FakePool
    monkeypatch.setattr(owner, where, property(broken, lambda each, value: None), raising=False)
    plan = bench.step(one, PROMISED, 8)
    assert [(load.request, len(load.blocks)) for load in plan.loads] == [("r", PROMISED // 4)]
    assert plan.session == 0
    assert "planning a step" in bench.reported


def test_saves_of_finished_requests_outlast_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of a finished request until its save job is reported as done."""
    bench, one = Bench(), request(33)
    bench.place(one)
    one.num_computed_tokens = 33
    assert bench.end(one)[0]
    with monkeypatch.context() as patch:
        patch.setattr(FakePool, "connected", property(broken, lambda pool, value: None), raising=False)
        assert bench.idle().saves == ()
    plan = bench.idle()
    assert [request for request, _ in plan.held] == ["r"]
    assert [save.request for save in plan.saves] == ["r"]


def test_a_lease_that_cannot_be_released_ends_no_other_load_late(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    loads = [request(40, name, 100 * number) for number, name in enumerate("ab")]
    for one in loads:
        know(bench, one, ["here"] * 4)
        assert bench.place(one) == PROMISED
    bench.idle()
    monkeypatch.setattr("tests.connector.fakes.FakeLease.release", broken)
    bench.report(0, ["a", "b"])
    assert bench.reported.count("releasing a lease") == 2
    assert bench.idle().loads == ()
    bench.side.close()
