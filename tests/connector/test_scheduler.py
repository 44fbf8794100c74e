"""The scheduler's side against a pool that answers, is slow, or is not there."""

from __future__ import annotations

import time

import pytest

from tests.connector.fakes import FakePool, FakeRequest
from tests.connector.side import Bench, blocks_of, request
from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.entry import Scheduled
from tokenlake_client.engines.vllm.plan import StepReport
from tokenlake_client.engines.vllm.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.settings import EngineSettings


def test_a_hit_is_loaded_and_the_rest_stored() -> None:
    bench, asked = Bench(), request(29)
    bench.know(asked.all_token_ids[:16])
    assert bench.place(asked) == 16
    plan = bench.side.step([], lambda name: [])
    assert plan.idle
    (load,) = plan.loads
    assert (load.start, load.stop, load.blocks, load.here) == (0, 16, (100, 101, 102, 103), True)
    bench.side.worker_output(StepReport(plan.step, 0), ["r"], set())
    assert bench.pool.leases[0].released
    plan = bench.step(asked, 16, 13)
    (save,) = plan.saves
    assert (save.first, save.blocks, len(save.keys)) == (2, (104, 105), 1)
    assert (plan.session, plan.incarnation) == (7, 1)


@pytest.mark.parametrize(
    ("tokens", "local", "external"), [(16, 0, 12), (17, 0, 16), (16, 4, 8), (7, 0, 0), (24, 20, 0)]
)
def test_a_token_is_left_and_local_blocks_are_not_loaded(tokens: int, local: int, external: int) -> None:
    bench, asked = Bench(), request(tokens)
    bench.know(asked.all_token_ids)
    assert bench.place(asked, local) == external


def test_the_hook_answers_none_until_the_pool_does_and_no_hit_after_the_deadline() -> None:
    bench, asked = Bench(), request(17)
    bench.know(asked.all_token_ids)
    bench.pool.answers = False
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) is None
    bench.now = 0.019
    assert bench.side.matched(asked, 0) is None
    bench.now = 0.020
    assert bench.side.matched(asked, 0) == 0
    assert bench.counters.read().lookups_late == 1


def test_a_pool_that_owes_an_answer_is_not_asked_again_before_it_came() -> None:
    bench = Bench()
    bench.pool.answers = False
    first = request(17, "a")
    bench.side.new_request(first)
    bench.now = 1.0
    assert bench.side.matched(first, 0) == 0
    for number in range(5):
        # None of these costs a deadline.
        assert bench.place(request(17, f"b{number}", 50 * number)) == 0
    assert len(bench.pool.matches) == 1
    bench.pool.answers = True
    later = request(17, "c")
    bench.know(later.all_token_ids)
    assert bench.place(later) == 16
    assert bench.pool.leases[0].released, "the late answer's lease"


def test_a_prompt_is_hashed_once() -> None:
    bench, asked = Bench(), request(40)
    bench.place(asked)
    for computed in range(0, 40, 10):
        bench.step(asked, computed, 10)
    assert bench.pool.hashed == 1


def test_hooks_on_a_prompt_of_32k_tokens_take_a_millisecond_at_most() -> None:
    pool = FakePool(segment_tokens=256)
    settings = EngineSettings(segment_tokens=256)
    tokens = list(range(32768))
    best = 1.0
    for number in range(5):
        side = SchedulerSide(lambda: pool, settings, 128, Counters(), lambda what, error: None, segment_bytes=1)
        asked = FakeRequest(str(number), tokens)
        started = time.perf_counter()
        side.new_request(asked)
        assert side.matched(asked, 0) == 0
        best = min(best, time.perf_counter() - started)
    assert best < 0.001 * 2.5, f"{best * 1e3:.2f} ms"


def test_without_a_pool_nothing_is_asked_and_when_it_appears_it_is_used() -> None:
    bench = Bench()
    bench.there = False
    assert bench.place(request(17, "a")) == 0
    assert bench.step(request(17, "a"), 0, 17).saves == ()
    bench.there = True
    later = request(17, "b")
    bench.know(later.all_token_ids)
    assert bench.place(later) == 16


def test_a_failed_load_is_not_tried_again_for_the_request() -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids[:16])
    assert bench.place(asked) == 16
    plan = bench.side.step([], lambda name: [])
    bench.side.worker_output(StepReport(plan.step, 0), ["r"], {102, 103})
    assert bench.side.matched(asked, 0) == 0
    bench.side.allocated(asked, blocks_of(asked), 0)
    # All of it is offered again: what could not be read may be gone.
    plan = bench.step(asked, 0, 33)
    assert [save.first for save in plan.saves] == [0]


def test_a_step_that_waits_for_its_load_stores_nothing_before_it_is_known_to_be_right() -> None:
    bench, asked = Bench("sync"), request(33)
    bench.know(asked.all_token_ids[:16])
    bench.place(asked)
    plan = bench.step(asked, 16, 17)
    assert plan.wait
    assert (len(plan.loads), plan.saves) == (1, ())
    bench.side.worker_output(StepReport(plan.step, 0), [], set())
    assert bench.pool.leases[0].released
    asked.all_token_ids.append(1)
    plan = bench.step(asked, 33, 1)
    assert [(save.first, len(save.keys)) for save in plan.saves] == [(2, 2)]


def test_neighbours_of_a_load_store_nothing_either_and_what_failed_is_void() -> None:
    bench, loads, shares = Bench("sync"), request(33, "loads"), request(33, "shares")
    bench.know(loads.all_token_ids[:16])
    bench.place(loads)
    bench.side.new_request(shares)
    bench.side.matched(shares, 16)
    bench.side.allocated(shares, blocks_of(shares), 0)
    parts = [Scheduled(one.request_id, 16, 17, blocks_of(one), whole=True) for one in (loads, shares)]
    plan = bench.side.step(parts, lambda name: blocks_of(loads))
    assert plan.saves == ()
    bench.side.worker_output(StepReport(plan.step, 0), [], {100})
    # vLLM takes both back to what is right, and computes again.
    plan = bench.side.step(
        [Scheduled("loads", 0, 10, (), whole=False), Scheduled("shares", 0, 10, (), whole=False)],
        lambda name: blocks_of(loads),
    )
    assert [save.first for save in plan.saves] == [0, 0]
    assert all(len(save.keys) == 1 for save in plan.saves)


def test_what_is_left_at_the_end_is_stored_and_its_blocks_are_kept() -> None:
    bench, asked = Bench("sync"), request(33)
    bench.know(asked.all_token_ids[:16])
    bench.place(asked)
    bench.step(asked, 16, 17)
    asked.all_token_ids.append(1)
    assert bench.side.finished(asked, blocks_of(asked), complete=True)
    plan = bench.side.step([], lambda name: [])
    assert [(save.first, len(save.keys)) for save in plan.saves] == [(2, 2)]
    assert plan.held == (("r", plan.saves[0].job),)


def test_an_aborted_request_gives_everything_back() -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids)
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) == 32
    assert not bench.side.finished(asked, [], complete=False)
    assert bench.pool.leases[0].released


def test_blocks_that_are_handed_out_again_are_taken_back_from_their_jobs() -> None:
    bench, first, second = Bench(), request(17, "a"), request(17, "b", 500)
    bench.place(first)
    plan = bench.step(first, 0, 17)
    (save,) = plan.saves
    bench.place(second)
    plan = bench.step(second, 0, 17)
    assert plan.reused == (save.job,)
    bench.side.worker_output(StepReport(plan.step, plan.saves[0].job), [], set())
    assert bench.step(second, 17, 1).reused == ()


def test_shared_blocks_are_not_taken_back() -> None:
    bench, first, second = Bench(), request(17, "a"), request(17, "b")
    bench.place(first)
    bench.step(first, 0, 17)
    bench.place(second, local=16)
    part = Scheduled("b", 16, 1, [100, 101, 102, 103, 200], whole=True)
    assert bench.side.step([part], lambda name: [100, 101, 102, 103, 200]).reused == ()


def test_ranks_that_share_segments_get_one_reservation() -> None:
    bench, asked = Bench(shared=True), request(33)
    bench.place(asked)
    bench.pool.refuse_from = 3
    plan = bench.step(asked, 0, 33)
    (save,) = plan.saves
    assert (save.write, len(save.keys), len(save.blocks)) == (1, 3, 6)
    # The refused one is asked for with the next step.
    bench.pool.refuse_from = 1 << 30
    plan = bench.step(asked, 33, 1)
    assert [(later.write, later.first) for later in plan.saves] == [(2, 3)]
    assert not bench.pool.reservations[0].released
    bench.side.worker_output(StepReport(plan.step, save.job), [], set())
    assert [reservation.released for reservation in bench.pool.reservations] == [True, False]


def test_a_pool_that_is_gone_costs_a_step_nothing() -> None:
    bench, asked = Bench(shared=True), request(33)
    bench.place(asked)
    bench.pool.reachable = False
    assert bench.step(asked, 0, 33).saves == ()
    assert bench.reported == ["planning what to store"]
    with pytest.raises(Unreachable):
        bench.side.new_request(request(33, "b"))


def test_many_waiting_requests_do_not_lease_what_they_read_much_later() -> None:
    bench = Bench()
    many = [request(17, str(number), 50 * number) for number in range(40)]
    for one in many:
        bench.side.new_request(one)
    assert len(bench.pool.matches) == 16
    assert bench.side.matched(many[-1], 0) == 0
    assert len(bench.pool.matches) == 17


def test_what_was_promised_to_vllm_reaches_the_ranks_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), request(33)
    bench.know(asked.all_token_ids)
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) == 32
    monkeypatch.setattr("tests.connector.fakes.FakeLease.incarnation", property(lambda lease: 1 // 0), raising=False)
    bench.side.allocated(asked, blocks_of(asked), 32)
    assert bench.reported == ["preparing a load"]
    (load,) = bench.side.step([], lambda name: []).loads
    assert (load.lease, load.incarnation, load.blocks) == (0, 0, tuple(range(100, 108)))
    bench.side.worker_output(StepReport(1, 0), ["r"], set(load.blocks))
    bench.side.close()
