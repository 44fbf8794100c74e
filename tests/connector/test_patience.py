"""A prompt that another engine computes is waited for, as long as computing it would take and no longer, and never
for what this engine computes itself."""

from __future__ import annotations

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import SEGMENT, Bench, blocks_of, request
from tests.connector.test_costs import CHEAP, TOKEN_S, load, prefill
from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.patience import LONGEST_S, MOST_WAITING, PATIENCE
from tokenlake_client.engines.vllm.plan import LoadTime

DEADLINE_S = 0.020
TOKENS = 100
BOUND_S = PATIENCE * TOKENS * TOKEN_S


def measured(mode: str = "async") -> Bench:
    """It knows what a prefill takes; the pool says nothing yet of what it is asked for from now on."""
    bench = Bench(mode)
    prefill(bench)
    bench.pool.answers = False
    return bench


def asked(bench: Bench, name: str = "r", tokens: int = TOKENS, first: int = 0) -> FakeRequest:
    one = request(tokens, name, first)
    bench.side.new_request(one)
    return one


def test_a_prompt_may_wait_as_long_as_computing_it_takes() -> None:
    bench = measured()
    asked(bench)
    assert bench.pool.matches[-1].options.in_flight_wait_s == pytest.approx(BOUND_S, rel=0.01)
    assert bench.pool.matches[-1].options.in_flight_wait_per_segment_s == pytest.approx(
        PATIENCE * SEGMENT * TOKEN_S, rel=0.05
    )
    asked(bench, "long", 100_000, 1000)
    assert bench.pool.matches[-1].options.in_flight_wait_s == LONGEST_S


def test_nothing_is_waited_for_where_nothing_is_measured_or_soon_computed_or_dear_to_load() -> None:
    bench = Bench()
    asked(bench, "unknown")
    prefill(bench)
    asked(bench, "short", 15, 1000)
    load(bench, CHEAP)
    asked(bench, "long", TOKENS, 2000)
    assert [
        match.options.in_flight_wait_s > 0
        for match in bench.pool.matches
        if match.options.request in ("unknown", "short", "long")
    ] == [
        False,
        False,
        True,
    ]
    slow = Bench()
    prefill(slow)
    load(slow, LoadTime(0.0, 8.0))
    asked(slow)
    assert slow.pool.matches[-1].options.in_flight_wait_s == 0.0
    far = Bench()
    prefill(far)
    load(far, LoadTime(8.0, 0.0), "far")
    asked(far)
    assert far.pool.matches[-1].options.in_flight_wait_s == 0.0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_while_it_waits_others_run_and_what_came_is_loaded(mode: str) -> None:
    bench = measured(mode)
    one = asked(bench)
    for _ in range(6):
        assert bench.side.matched(one, 0) is None
        bench.now += DEADLINE_S
    bench.know(one.all_token_ids)
    bench.pool.answers = True
    assert bench.side.matched(one, 0) == 96
    assert bench.counters.read().lookups_late == 0


def test_it_goes_on_after_the_bound_and_the_next_one_is_asked_for() -> None:
    bench = measured()
    one = asked(bench)
    while bench.side.matched(one, 0) is None:
        bench.now += DEADLINE_S / 2
        assert bench.now < 1.0
    assert BOUND_S <= bench.now <= BOUND_S + 3 * DEADLINE_S
    assert bench.pool.matches[-1].cancelled
    assert bench.counters.read().lookups_late == 1
    # The daemon is there: it owes nothing that the next one would have to wait for.
    bench.pool.answers = True
    other = asked(bench, "other", TOKENS, 1000)
    bench.know(other.all_token_ids)
    assert bench.side.matched(other, 0) == 96


@pytest.mark.parametrize("frozen_s", [0.0, 0.05])
def test_a_frozen_daemon_costs_one_deadline_however_long_it_might_wait(frozen_s: float) -> None:
    bench = measured()
    one = asked(bench, "one", 10_000)
    while bench.now < frozen_s:
        assert bench.side.matched(one, 0) is None
        bench.now += 0.001
    bench.pool.alive = False
    while bench.side.matched(one, 0) is None:
        bench.now += 0.001
        assert bench.now < 1.0
    # Asked anew once in a deadline: what it answered then it owes no more.
    assert bench.now <= frozen_s + (2 if frozen_s else 1) * DEADLINE_S + 0.002
    asked_before = len(bench.pool.matches)
    for number in range(5):
        assert bench.place(request(TOKENS, str(number), 20_000 * number)) == 0
    assert len(bench.pool.matches) == asked_before
    bench.pool.answers = bench.pool.alive = True
    later = request(TOKENS, "later", 500_000)
    bench.know(later.all_token_ids)
    assert bench.place(later) == 96


def test_signs_of_life_are_asked_for_once_in_a_deadline() -> None:
    bench = measured()
    many = [asked(bench, str(number), 1000, 2000 * number) for number in range(8)]
    while bench.now < 0.5:
        assert [bench.side.matched(one, 0) for one in many] == [None] * 8
        bench.now += 0.001
    assert bench.pool.beats <= 8 + 0.5 / DEADLINE_S
    quiet = Bench()
    quiet.place(request(TOKENS))
    assert quiet.pool.beats == 0


def test_so_many_wait_at_a_time_and_others_are_computed() -> None:
    bench = measured()
    many = [asked(bench, str(number), TOKENS, 1000 * number) for number in range(2 * MOST_WAITING)]
    for _ in range(3):
        assert [bench.side.matched(one, 0) for one in many] == [None] * len(many)
    assert [match.options.in_flight_wait_s > 0 for match in bench.pool.matches[-len(many) :]] == [
        *[True] * MOST_WAITING,
        *[False] * MOST_WAITING,
    ]
    # One that is given up and one that is answered make room.
    bench.side.finished(many[0], [], complete=False)
    bench.pool.answers = True
    assert bench.side.matched(many[1], 0) == 0
    bench.pool.answers = False
    for number in range(3):
        later = asked(bench, f"later {number}", TOKENS, 100_000 + 1000 * number)
        assert bench.side.matched(later, 0) is None
    assert [match.options.in_flight_wait_s > 0 for match in bench.pool.matches[-3:]] == [True, True, False]


def test_a_daemon_that_dies_meanwhile_ends_the_wait() -> None:
    bench = measured()
    one = asked(bench)
    assert bench.side.matched(one, 0) is None
    bench.pool.reachable = False
    with pytest.raises(Unreachable):
        bench.side.matched(one, 0)


def computes(bench: Bench, one: FakeRequest) -> None:
    """The pool lacks its prompt, and it is computed here."""
    bench.pool.answers = True
    assert bench.side.matched(one, 0) == 0
    bench.pool.answers = False
    bench.side.allocated(one, blocks_of(one), 0)


def test_what_this_engine_computes_is_not_waited_for() -> None:
    bench = measured()
    first, beside = asked(bench, "first"), asked(bench, "beside")
    computes(bench, first)
    # Asked for before it was known who computes: asked for again without patience.
    waiting = bench.pool.matches[-1]
    assert waiting.options.in_flight_wait_s > 0
    assert bench.side.matched(beside, 96) is None
    assert waiting.cancelled
    assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0
    longer = request(2 * TOKENS, "longer")
    bench.side.new_request(longer)
    assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0
    bench.pool.answers = True
    assert bench.side.matched(beside, 96) == 0
    # When that one ended it is in the pool, or it never will be.
    bench.side.finished(first, [], complete=False)
    bench.side.finished(beside, [], complete=False)
    bench.pool.answers = False
    asked(bench, "again")
    assert bench.pool.matches[-1].options.in_flight_wait_s > 0


def test_a_prompt_that_lost_its_blocks_does_not_wait_for_itself() -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    bench.step(one, 0, TOKENS)
    bench.side.matched(one, 0)
    assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0


def test_what_vllm_has_by_now_is_not_waited_for() -> None:
    bench = measured()
    one = asked(bench)
    bench.now += DEADLINE_S
    assert bench.side.matched(one, 96) is None
    assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0
    bench.pool.answers = True
    assert bench.side.matched(one, 96) == 0


def test_one_that_asks_while_an_answer_is_owed_is_computed() -> None:
    bench = measured()
    owed = asked(bench, "owed", TOKENS, 5000)
    one = asked(bench)
    bench.pool.alive = False
    bench.now += 2 * DEADLINE_S
    assert bench.side.matched(owed, 0) == 0
    assert bench.side.matched(one, 96) == 0


def test_a_prompt_of_several_steps_is_claimed_with_the_first() -> None:
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
    ((claimed, seconds),) = bench.pool.claimed
    assert claimed == keys[2:]
    # Of twelve segments that could be loaded ten are missing.
    assert seconds == pytest.approx(10 * PATIENCE * SEGMENT * TOKEN_S, rel=0.05)
    bench.side.finished(one, [], complete=True, stop_reason="stop", output_tokens=1)
    assert len(bench.pool.claimed) == 1


def test_a_prompt_of_one_step_claims_nothing_more() -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    (save,) = bench.step(one, 0, TOKENS).saves
    assert bench.pool.claimed == []
    assert save.claimed, "by the question"


def test_what_is_given_up_is_waited_for_no_longer_unless_another_request_computes_it() -> None:
    bench = measured()
    first, second = asked(bench, "first"), asked(bench, "second")
    for one in (first, second):
        computes(bench, one)
    bench.side.finished(first, [], complete=False, stop_reason="abort", output_tokens=0)
    assert bench.pool.claimed == []
    bench.side.finished(second, [], complete=False, stop_reason="abort", output_tokens=0)
    assert bench.pool.claimed == [(tuple(bench.pool.prefix(second.all_token_ids).keys), 0.0)]


def test_an_engine_that_stores_nothing_makes_nobody_wait() -> None:
    bench = Bench(save=False)
    prefill(bench)
    asked(bench)
    assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0


def test_a_claim_that_fails_costs_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = measured()
    one = asked(bench)
    computes(bench, one)
    monkeypatch.setattr(bench.pool, "claim", lambda keys, seconds: 1 // 0)
    assert bench.step(one, 0, 40).saves
    assert bench.reported == ["claiming what is computed"]
