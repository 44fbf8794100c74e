"""Sessions answer before they go on: no turn overtakes another, pauses are kept, and no request is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, Prompt, infinite_cache
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.routing import SYSTEMS, Answered, FleetOptions, SystemRow, at_rate, fleet_run, run_system
from tokenlake_bench.routing.outcome import row_of
from tokenlake_bench.simulation.arrivals import arrivals_of, merged
from tokenlake_bench.simulation.pooled import PooledRun, pool_options
from tokenlake_bench.turns import ClockedTurns
from tokenlake_testing.clock import Clock

ENGINE = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"])
TOKENS = 512
NODES = 4

forests = st.lists(st.tuples(st.floats(0, 50), st.one_of(st.none(), st.integers(0, 30)), st.floats(0, 50)), max_size=30)
"""Per request: seconds since the request before it, the request that it follows (modulo its number), its pause."""


def workload_of(forest: Sequence[tuple[float, int | None, float]]) -> list[Prompt]:
    """Prompts whose `tokens` are their numbers plus 1."""
    prompts: list[Prompt] = []
    at_s = 0.0
    for number, (gap_s, follows, pause_s) in enumerate(forest):
        at_s += gap_s
        after = None if follows is None or not number else follows % number
        prompts.append(Prompt(number + 1, (), at_s, 1, 0, after, 0.0 if after is None else pause_s))
    return prompts


@given(forests, st.integers(0, 1000))
def test_each_request_arrives_once_after_its_pause(
    forest: Sequence[tuple[float, int | None, float]], seed: int
) -> None:
    prompts, draw, clock = workload_of(forest), random.Random(seed), Clock()
    arrived: dict[int, float] = {}
    answered: dict[int, float] = {}

    def arrive(number: int, prompt: Prompt, at_s: float) -> None:
        assert prompt is prompts[number]
        assert number not in arrived
        assert at_s == pytest.approx(clock.now - 10.0)
        arrived[number] = at_s
        clock.after(draw.choice([0.0, draw.uniform(0, 100)]), answer, number)

    def answer(number: int) -> None:
        answered[number] = clock.now - 10.0
        turns.answered(number)

    turns = ClockedTurns(prompts, clock, arrive, 10.0)
    turns.start()
    while not turns.over:
        assert clock.now <= turns.last_s + 100
        clock.run_until(clock.now + 1.0)
    assert set(arrived) == set(range(len(prompts)))
    assert turns.closed == any(prompt.follows is not None for prompt in prompts)
    for number, prompt in enumerate(prompts):
        due = prompt.at_s if prompt.follows is None else answered[prompt.follows] + prompt.pause_s
        assert arrived[number] == pytest.approx(due)


def test_requests_that_follow_none_before_them_are_refused() -> None:
    prompts = [Prompt(1, (), 0.0), Prompt(1, (), 1.0, follows=1)]
    for wrong in (1, 2, -1):
        with pytest.raises(ConfigurationError, match="follows"):
            ClockedTurns([prompts[0], replace(prompts[1], follows=wrong)], Clock(), lambda number, prompt, at_s: None)


def sessions(count: int, turns: int, *, gap_s: float, pause_s: float, first: int = 8, more: int = 4) -> Accesses:
    """Sessions that begin 1 s apart and whose prompts extend each other. Recorded turns are `gap_s` apart, with
    `pause_s` after each answer. The number of tokens beyond the last segment is the prompt's number."""
    recorded = [(1.0 * session + gap_s * turn, session, turn) for session in range(count) for turn in range(turns)]
    recorded.sort()
    places: dict[tuple[int, int], int] = {}
    prompts: list[Prompt] = []
    for number, (at_s, session, turn) in enumerate(recorded):
        places[session, turn] = number
        segments = first + more * turn
        chain = tuple(range(1000 * session, 1000 * session + segments))
        follows = places[session, turn - 1] if turn else None
        prompts.append(Prompt(segments * TOKENS + number, chain, at_s, 40, session, follows, pause_s if turn else 0.0))
    return Accesses(TOKENS, prompts)


def opened_of(accesses: Accesses) -> Accesses:
    """The same prompts, each of which arrives at its recorded time."""
    return Accesses(accesses.segment_tokens, [replace(each, follows=None, pause_s=0.0) for each in accesses.prompts])


def by_number(answers: Sequence[Answered]) -> dict[int, Answered]:
    return {answer.prompt_tokens % TOKENS: answer for answer in answers}


def check_pauses(accesses: Accesses, answers: Sequence[Answered]) -> None:
    found = by_number(answers)
    assert len(answers) == len(found) == len(accesses.prompts)
    for number, prompt in enumerate(accesses.prompts):
        after = prompt.follows
        due = prompt.at_s if after is None else found[after].finished_s + prompt.pause_s
        assert found[number].at_s == pytest.approx(due)


def pooled(accesses: Accesses, *, real: bool = False) -> PooledRun:
    options = pool_options(ENGINE, nodes=NODES, capacity_tokens=NODES * 600 * TOKENS, segment_tokens=TOKENS, seed=0)
    run = PooledRun(options, ENGINE, counts_memory=real)
    run.run(arrivals_of(accesses))
    assert run.simulation.cluster.idle()
    run.simulation.cluster.check_integrity()
    return run


FLEET = FleetOptions(instances=NODES, capacity_tokens=NODES * 600 * TOKENS, engine=ENGINE)


@pytest.mark.parametrize("real", [False, True])
def test_the_pool_waits_for_answers_and_pauses(real: bool) -> None:
    accesses = sessions(12, 5, gap_s=0.5, pause_s=2.0)
    run = pooled(accesses, real=real)
    check_pauses(accesses, run.answers)
    ends = max(answer.finished_s for answer in run.answers)
    row = run.row()
    assert row.goodput_rps == pytest.approx(row.slo_attainment * len(run.answers) / ends)


@pytest.mark.parametrize("name", ["round-robin-perfect", "cache-aware-real"])
def test_routed_systems_wait_for_answers_and_pauses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accesses = sessions(12, 5, gap_s=0.5, pause_s=2.0)
    seen: list[Answered] = []

    def kept(answers: Sequence[Answered], *arguments: Any, **more: Any) -> SystemRow:
        seen.extend(answers)
        return row_of(answers, *arguments, **more)

    monkeypatch.setattr(fleet_run, "row_of", kept)
    row = run_system(accesses, SYSTEMS[name], FLEET)
    check_pauses(accesses, seen)
    ends = max(answer.finished_s for answer in seen)
    assert row.goodput_rps == pytest.approx(row.slo_attainment * len(seen) / ends)
    assert run_system(accesses, SYSTEMS[name], FLEET) == row


def test_turns_that_wait_find_what_the_turn_before_computed() -> None:
    """In open loop a slow fleet gets the next turn before the previous one is computed, and computes its prefix
    again."""
    accesses = sessions(10, 6, gap_s=0.2, pause_s=0.1, first=24, more=8)
    ideal = infinite_cache(accesses)
    closed, opened = (pooled(each).row() for each in (accesses, opened_of(accesses)))
    assert closed.token_hit_rate == pytest.approx(ideal.rate, rel=0.01)
    assert opened.token_hit_rate < 0.8 * ideal.rate
    assert closed.ttft_p99_ms < opened.ttft_p99_ms


def test_another_rate_moves_beginnings_and_keeps_pauses() -> None:
    accesses = sessions(6, 4, gap_s=0.5, pause_s=2.0)
    own = (len(accesses.prompts) - 1) / accesses.prompts[-1].at_s
    moved = at_rate(accesses, own / 3)
    assert [(p.follows, p.pause_s) for p in moved.prompts] == [(p.follows, p.pause_s) for p in accesses.prompts]
    assert [p.at_s for p in moved.prompts] == pytest.approx([3 * p.at_s for p in accesses.prompts])
    assert arrivals_of(moved)[-1].pause_s == 2.0


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_sessions_wait_for_their_own_answers(copies: int) -> None:
    arrivals = arrivals_of(sessions(5, 4, gap_s=1.5, pause_s=1.0))
    many = list(merged(arrivals, copies))
    assert len(many) == copies * len(arrivals)
    ClockedTurns(many, Clock(), lambda number, arrival, at_s: None)
    cut = 0
    for each in many:
        turn = (len(each.chain) - 8) // 4
        if each.follows is None:
            cut += turn > 0
            continue
        before = many[each.follows]
        # Numbers of segments differ between copies and sessions.
        assert before.chain.tolist() == each.chain[: 8 + 4 * (turn - 1)].tolist()
        assert before.at_s <= each.at_s
    # A copy that begins in the middle of a session has its later turns first.
    assert (cut > 0) == (copies > 1)
