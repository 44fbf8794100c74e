"""A lookup waits for another engine no longer than a prefill would take, and never for its own engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.fakes import FakeLease, FakePool, FakeRequest
from tests.connector.side import ABORTED, CHEAP, SEGMENT, TOKEN_S, Bench, blocks_of, load, prefill, request
from tokenlake.errors import Unreachable
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake_client import MatchOptions
from tokenlake_client.engines.common.in_flight import FACTOR, LONGEST_S, NO_WAIT
from tokenlake_client.engines.vllm.known.in_flight_waits import MAX_WAITING
from tokenlake_client.engines.vllm.known.load_cost import HERE, LOCAL, Owner
from tokenlake_client.engines.vllm.known.lookup import Lookup
from tokenlake_client.engines.vllm.known.request import RequestEnd
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.engines.vllm.polled_match import SILENT_S

DEADLINE_S = 0.020
TOKENS = 100
BOUND_S = FACTOR * TOKENS * TOKEN_S


def measured() -> Bench:
    """The prefill time is known; the pool does not answer from now on."""
    bench = Bench()
    prefill(bench)
    bench.pool.answers = False
    return bench


def asked(bench: Bench, name: str = "r", tokens: int = TOKENS, first: int = 0) -> FakeRequest:
    one = request(tokens, name, first)
    bench.side.new_request(one)
    return one


def may_wait(bench: Bench) -> bool:
    """Was the last lookup sent with a wait for other engines?"""
    return bench.pool.matches[-1].options.in_flight_wait_s > 0


def test_a_wait_is_limited_by_the_prefill_time() -> None:
    bench = measured()
    asked(bench)
    options = bench.pool.matches[-1].options
    assert options.in_flight_wait_s == pytest.approx(BOUND_S, rel=0.01)
    assert options.in_flight_wait_per_segment_s == pytest.approx(FACTOR * SEGMENT * TOKEN_S, rel=0.05)
    asked(bench, "long", 100_000, 1000)
    assert bench.pool.matches[-1].options.in_flight_wait_s == LONGEST_S


Measure = Callable[[Bench], None]
NO_WAITS: dict[str, tuple[int, list[Measure]]] = {
    "nothing is measured": (TOKENS, []),
    "a short prompt": (15, [prefill]),
    "slow copies": (TOKENS, [prefill, lambda bench: load(bench, LoadTime(0.0, 8.0))]),
    "slow fetches": (TOKENS, [prefill, lambda bench: load(bench, LoadTime(8.0, 0.0), "far")]),
}


@pytest.mark.parametrize("case", NO_WAITS)
def test_no_wait_where_it_does_not_pay(case: str) -> None:
    tokens, measures = NO_WAITS[case]
    bench = Bench()
    for measure in measures:
        measure(bench)
    asked(bench, tokens=tokens)
    assert not may_wait(bench)


def test_an_engine_that_does_not_store_sets_no_markers() -> None:
    for save in (True, False):
        bench = Bench(save=save)
        prefill(bench)
        load(bench, CHEAP)
        asked(bench)
        assert may_wait(bench) is save


def test_a_wait_ends_at_its_limit_beside_a_frozen_daemon() -> None:
    bench = measured()
    one = asked(bench)
    while bench.side.matched(one, 0) is None:
        bench.now += DEADLINE_S / 2
        assert bench.now < 1.0
    assert BOUND_S <= bench.now <= BOUND_S + 3 * DEADLINE_S
    assert bench.counters.read().lookups_late == 1
    before = len(bench.pool.matches)
    for number in range(5):
        assert bench.place(request(TOKENS, str(number), 20_000 * number)) == 0
    assert len(bench.pool.matches) == before, "no other request waits for a deadline"
    bench.pool.answers = True
    later = asked(bench, "later", TOKENS, 500_000)
    assert bench.pool.matches[before - 1].cancelled
    bench.know(later.all_token_ids)
    assert bench.side.matched(later, 0) == 96


def test_the_number_of_waiting_lookups_is_limited() -> None:
    bench = measured()
    many = [asked(bench, str(number), TOKENS, 1000 * number) for number in range(2 * MAX_WAITING)]
    for _ in range(3):
        assert [bench.side.matched(one, 0) for one in many] == [None] * len(many)
    waits = [match.options.in_flight_wait_s > 0 for match in bench.pool.matches[-len(many) :]]
    assert waits == [True] * MAX_WAITING + [False] * MAX_WAITING
    # An aborted request and an answered lookup leave room for two further waits.
    bench.end(many[0], ABORTED)
    bench.pool.answers = True
    assert bench.side.matched(many[1], 0) == 0
    bench.pool.answers = False
    for number in range(3):
        later = asked(bench, f"later {number}", TOKENS, 100_000 + 1000 * number)
        assert bench.side.matched(later, 0) is None
    assert [match.options.in_flight_wait_s > 0 for match in bench.pool.matches[-3:]] == [True, True, False]


def computes(bench: Bench, one: FakeRequest) -> None:
    """The pool lacks the prompt of `one`, so this engine computes it."""
    bench.pool.answers = True
    assert bench.side.matched(one, 0) == 0
    bench.pool.answers = False
    bench.side.allocated(one, blocks_of(one), 0)


def test_no_wait_for_a_request_of_the_same_engine() -> None:
    bench = measured()
    first, beside = asked(bench, "first"), asked(bench, "beside")
    computes(bench, first)
    # The lookup began before this engine computed the prompt, and may wait for other engines. It is repeated without a
    # wait.
    waiting = bench.pool.matches[-1]
    assert waiting.options.in_flight_wait_s > 0
    assert bench.side.matched(beside, 96) is None
    assert waiting.cancelled
    assert not may_wait(bench)
    longer = request(2 * TOKENS, "longer")
    bench.side.new_request(longer)
    assert not may_wait(bench)
    bench.pool.answers = True
    assert bench.side.matched(beside, 96) == 0
    # When that request has ended, its segments are in the pool or will not be stored any more.
    bench.end(first, ABORTED)
    bench.end(beside, ABORTED)
    bench.pool.answers = False
    asked(bench, "again")
    assert may_wait(bench)


def test_a_preempted_request_does_not_wait_for_itself() -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    bench.step(one, 0, TOKENS)
    bench.side.matched(one, 0)
    assert not may_wait(bench)


def test_no_wait_for_tokens_in_vllms_own_cache() -> None:
    bench = measured()
    one = asked(bench)
    bench.now += DEADLINE_S
    assert bench.side.matched(one, 96) is None
    assert not may_wait(bench)
    bench.pool.answers = True
    assert bench.side.matched(one, 96) == 0


def test_a_prompt_of_several_steps_is_marked_in_the_first() -> None:
    bench = measured()
    one = asked(bench)
    keys = tuple(bench.pool.prefix(one.all_token_ids).keys)
    bench.pool.known |= set(keys[:2])
    bench.pool.answers = True
    assert bench.side.matched(one, 0) == 16
    bench.side.allocated(one, blocks_of(one), 16)
    bench.step(one, 16, 40)
    bench.step(one, 56, 44)
    one.all_token_ids.append(1)
    bench.step(one, TOKENS, 1)
    ((marked, seconds),) = bench.pool.marked
    assert marked == keys[2:]
    # The pool lacks ten of the twelve segments of the prompt that could be loaded.
    assert seconds == pytest.approx(10 * FACTOR * SEGMENT * TOKEN_S, rel=0.05)
    bench.end(one, RequestEnd(complete=True, stop_reason="stop", output_tokens=1))
    assert len(bench.pool.marked) == 1


def test_a_prompt_of_one_step_sets_no_further_markers() -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    (save,) = bench.step(one, 0, TOKENS).saves
    assert (bench.pool.marked, save.marked) == ([], True), "the lookup set the marker"


def test_the_last_aborted_request_removes_the_markers() -> None:
    bench = measured()
    first, second = asked(bench, "first"), asked(bench, "second")
    for one in (first, second):
        computes(bench, one)
    bench.end(first, RequestEnd(complete=False, stop_reason="abort", output_tokens=0))
    assert bench.pool.marked == []
    bench.end(second, RequestEnd(complete=False, stop_reason="abort", output_tokens=0))
    assert bench.pool.marked == [(tuple(bench.pool.prefix(second.all_token_ids).keys), 0.0)]


def test_a_failing_marker_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    monkeypatch.setattr(bench.pool, "mark_in_flight", lambda keys, seconds: 1 // 0)
    assert bench.step(one, 0, 40).saves
    assert bench.reported == ["setting in-flight markers"]


def test_each_answer_for_a_long_prompt_has_a_deadline() -> None:
    """The daemon is asked for the next keys when the engine polls, which it does between its steps."""
    bench = Bench()
    one = asked(bench)
    (pending,) = bench.pool.matches
    bench.pool.answers = False
    for _ in range(3):
        bench.now += 0.9 * DEADLINE_S
        pending.further = True
        assert bench.side.matched(one, 0) is None
    bench.now += 1.1 * DEADLINE_S
    assert bench.side.matched(one, 0) == 0, "late"


def test_each_owner_comes_with_the_time_on_its_disk() -> None:
    pool = FakePool()
    keys = [SegmentKey(bytes([number]) * 32) for number in range(4)]
    match: Any = pool.engine.begin_match(keys, MatchOptions(), deadline_s=1.0)
    nodes = [pool.node, pool.node, "far", "away"]
    match.lease = FakeLease((LeaseId(1),), 4, 1, nodes=nodes, disk_s=[0.0, 0.1, 0.2, 0.0])
    lookup = Lookup(match, keys, pool.node, 1.0, lambda: 0.0, NO_WAIT)
    assert lookup.poll()
    assert lookup.owners == (LOCAL, Owner(HERE, 0.1), Owner("far", 0.2), Owner("away"))


def test_a_daemon_that_stays_silent() -> None:
    """It is noticed some time after the deadline of the lookup that was given up."""
    bench, one = Bench(), request(TOKENS)
    bench.pool.answers = False
    assert bench.ask(one) is None
    bench.now = 2 * DEADLINE_S
    assert bench.side.matched(one, 0) == 0
    silent = [bench.side.silent]
    bench.now += SILENT_S + 0.1
    silent.append(bench.side.silent)
    bench.pool.answers = True
    assert bench.place(request(TOKENS, "next", 1000)) == 0
    assert [*silent, bench.side.silent] == [False, True, False]


@pytest.mark.parametrize("error", [Unreachable, ZeroDivisionError])
def test_an_error_ends_a_late_lookup(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease would stay otherwise. An unforeseen error is raised once."""
    bench, one = Bench(), request(TOKENS)
    bench.pool.answers = False
    assert bench.ask(one) is None
    bench.now = 2 * DEADLINE_S
    assert bench.side.matched(one, 0) == 0
    late = bench.pool.matches[-1]

    def fail(match: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("tests.connector.fakes.FakeMatch.poll", fail)
        with pytest.raises(ZeroDivisionError) if error is ZeroDivisionError else contextlib.nullcontext():
            bench.side.new_request(request(TOKENS, "next", 1000))
    assert late.cancelled
    bench.pool.answers = True
    assert bench.place(request(TOKENS, "later", 2000)) == 0
