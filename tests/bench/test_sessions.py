"""Coding-agent sessions: global ids, seeded starts, chains equal to those of the tokens, and bad lines named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import global_lru, intern_segments
from tokenlake_bench.sessions import SessionTrace, read_sessions
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.traces import MooncakeTrace

TRACE = Path(__file__).parents[3] / "shared/traces/claude_code_sessions_a.rle.jsonl.zst"


def request(at_s: float, length: int, ids: str, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "in": length, "out": 7, "hash_ids": ids, "think_time": 1.5, "api_time": 2.5, **more}


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "a", "primary": True, "block_size": 64, "requests": list(requests), **more}


GOOD = session(request(0, 200, "1-3"), request(9, 270, "1-2,4-5"))


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()
    path.write_bytes(zstandard.compress(text) if path.suffix == ".zst" else text)
    return path


def read(tmp_path: Path, *lines: Any, **arguments: Any) -> SessionTrace:
    return read_sessions(write(tmp_path / "sessions.jsonl", list(lines)), **arguments)


def test_equal_ids_mean_equal_tokens_within_a_session(tmp_path: Path) -> None:
    found = list(read(tmp_path, GOOD, GOOD, sessions_per_hour=1e6))
    mine, other = ([each for each in found if each.conversation == number] for number in (0, 1))
    assert [len(each.tokens) for each in mine] == [200, 270]
    assert np.array_equal(mine[0].tokens[:128], mine[1].tokens[:128])
    assert not np.array_equal(mine[0].tokens[128:192], mine[1].tokens[128:192])
    assert not np.array_equal(mine[0].tokens[:64], other[0].tokens[:64])
    assert not np.array_equal(mine[0].tokens[192:], mine[1].tokens[192:200])


def test_chains_are_those_of_the_tokens(tmp_path: Path) -> None:
    # The second prompt differs from the first in block 2, so that equal blocks behind it belong to no shared prefix.
    # The blocks of the third are a prefix of the first.
    lines = [
        session(request(0, 64 * 6, "1-6"), request(1, 64 * 7, "1,9,3-7"), request(2, 64 * 5 + 3, "1-5")),
        session(request(0, 64 * 6, "1-6")),
    ]
    trace = read(tmp_path, *lines, sessions_per_hour=1e6)
    for tokens in (64, 128):
        mine, made = trace.accesses(tokens), intern_segments(trace, tokens)
        assert [prompt.chain for prompt in mine.prompts] == [prompt.chain for prompt in made.prompts]
        assert mine.prompt_tokens == made.prompt_tokens
        assert [prompt.at_s for prompt in mine.prompts] == [prompt.at_s for prompt in made.prompts]
    assert {prompt.output_tokens for prompt in trace.accesses(64).prompts} == {7}


def test_sub_agents_have_conversations_and_times_of_their_own(tmp_path: Path) -> None:
    agent = {"t": 5.0, "type": "subagent", "requests": [request(0, 64, "8"), request(3, 128, "8-9")]}
    trace = read(tmp_path, session(request(0, 64, "1"), agent, request(6, 128, "1-2")), GOOD, sessions_per_hour=1e-3)
    start = trace.requests[0].at_s
    found = [(each.at_s - start, each.conversation, each.block_ids.tolist()) for each in trace.requests[:4]]
    assert found == [(0, 0, [1]), (5, 1, [8]), (6, 0, [1, 2]), (8, 1, [8, 9])]
    assert [each.conversation for each in trace.requests[4:]] == [2, 2]


def turns_of(trace: SessionTrace) -> list[tuple[int | None, Any]]:
    return [(each.follows, pytest.approx(each.pause_s)) for each in trace.requests]


def test_a_request_follows_after_the_recorded_pause(tmp_path: Path) -> None:
    """A request follows the one before it after the recorded pause."""
    # Answers take 2.5 s. The third request begins before the second answer ends; the fourth comes after a request
    # whose answer's time is not recorded.
    without = request(11, 64, "1", api_time=None)
    turns = session(request(0, 64, "1"), request(9, 64, "1"), without, request(20, 64, "1"))
    trace = read(tmp_path, turns, GOOD, sessions_per_hour=1e-3)
    assert turns_of(trace) == [(None, 0.0), (0, 6.5), (1, 0.0), (2, 9.0), (None, 0.0), (4, 6.5)]
    assert turns_of(read(tmp_path, turns, GOOD, sessions_per_hour=1e-3, limit=3)) == turns_of(trace)[:3]
    assert [(p.follows, p.pause_s) for p in trace.accesses(64).prompts] == [
        (each.follows, each.pause_s) for each in trace.requests
    ]
    # Where sessions overlap, numbers are those of the common order.
    mixed = read(tmp_path, *[turns] * 8, sessions_per_hour=1e6)
    apart = {6.5: 9.0, 0.0: 2.0, 9.0: 9.0}
    later = [each for each in mixed.requests if each.follows is not None]
    assert len(later) == 24
    for each in later:
        assert each.follows is not None
        before = mixed.requests[each.follows]
        assert before.session == each.session
        assert each.at_s - before.at_s == pytest.approx(apart[each.pause_s])


def test_a_sub_agent_follows_the_request_that_started_it(tmp_path: Path) -> None:
    agent = {"t": 5.0, "type": "subagent", "requests": [request(0, 64, "8"), request(3, 128, "8-9")]}
    # A sub-agent that is recorded when it ended began 1.5 s after the answer.
    ended = {"t": 15.0, "type": "subagent", "duration_ms": 11_000, "requests": [request(0, 64, "7")]}
    lines = session(agent, request(0, 64, "1") | {"t": 5.0}, agent | {"t": 9.0}, ended, request(16, 64, "1"))
    trace = read(tmp_path, lines)
    start = trace.requests[0].at_s
    times = [round(each.at_s - start + 5, 6) for each in trace.requests]
    agents = [each.conversation for each in trace.requests]
    found = [(*each, *turn) for *each, turn in zip(times, agents, turns_of(trace), strict=True)]
    assert found == [
        (5, 1, None, 0.0),
        (5, 0, None, 0.0),
        (8, 1, 0, 0.5),
        (9, 2, 1, 1.5),
        (12, 2, 3, 0.5),
        (15, 3, 1, 0.0),
        (16, 0, 1, 8.5),
    ]


def test_sessions_start_at_the_rate_as_the_seed_draws(tmp_path: Path) -> None:
    lines = [session(request(0, 64, "1"))] * 400
    starts = [[each.at_s for each in read(tmp_path, *lines, seed=seed).requests] for seed in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]
    assert starts[0] == sorted(starts[0])
    assert starts[0][-1] / 400 == pytest.approx(150, rel=0.2)
    quick = read(tmp_path, *lines, sessions_per_hour=240).requests
    assert quick[-1].at_s == pytest.approx(starts[0][-1] / 10)


def test_copies_are_left_out_and_the_limit_counts_requests(tmp_path: Path) -> None:
    assert len(read(tmp_path, GOOD, GOOD | {"primary": False})) == 2
    assert len(read(tmp_path, GOOD, GOOD, limit=3)) == 3


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (session(request(0, 200, "1-2")), "hash_ids: expected 3,"),
        (session(request(0, 200, "1-9999999999")), "hash_ids: expected 3,"),
        (session(request(0, 200, "3-1")), "hash_ids: .*'3-1'"),
        (session(request(0, 200, "1-2,x")), "hash_ids: .*'x'"),
        (session(request(0, 200, "")), "hash_ids: .*got 0"),
        (session(request(0, 200, "9" * 5_000)), "hash_ids: .*ranges"),
        (session(request(0, 0, "")), ".*>= 1 - at .*in"),
        (session(request(-1, 64, "1")), ".*>= 0.* - at .*t"),
        (session(request(5, 64, "1"), request(4, 64, "1")), "t: expected at least 5"),
        (session(request(0, 64, "1", api_time=-1)), ".*>= 0.* - at .*api_time"),
        (session(request(0, 64, "1"), block_size=16), "block_size: expected 64, got 16"),
        ({"primary": True, "block_size": 64}, ".*requests"),
        ("broken", "JSON is malformed"),
        ('{"primary":true,"block_size":64,"requests":' + '[{"t":0,"requests":' * 100_000, ""),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: Any, expected: str) -> None:
    with pytest.raises(TraceError, match=f"line 2: {expected}"):
        read(tmp_path, GOOD, bad, GOOD)


def test_a_file_without_a_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one session"):
        read(tmp_path, GOOD | {"primary": False})


def test_arguments_out_of_range_are_named(tmp_path: Path) -> None:
    for arguments in ({"limit": 0}, {"sessions_per_hour": 0}, {"sessions_per_hour": float("nan")}):
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            read(tmp_path, GOOD, **arguments)
    with pytest.raises(ConfigurationError, match="segment_tokens"):
        read(tmp_path, GOOD).accesses(0)


def test_the_format_is_told_by_the_first_line(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1_030, "output_length": 5, "hash_ids": [0, 1, 2]}
    mooncake = read_trace(write(tmp_path / "a.jsonl", ["", line]))
    assert isinstance(mooncake, MooncakeTrace)
    assert isinstance(read_trace(write(tmp_path / "b.jsonl.zst", [GOOD])), SessionTrace)
    (prompt,) = mooncake.accesses(1024).prompts
    assert (prompt.tokens, prompt.chain, prompt.output_tokens) == (1_030, (0,), 5)
    for number, other in enumerate(["broken", [1], {"a": 1}]):
        with pytest.raises(TraceError, match=r"line 1: expected a trace in Mooncake's format or of .*docs/traces.md"):
            read_trace(write(tmp_path / f"c{number}.jsonl", [other]))
    with pytest.raises(TraceError, match="--from bailian"):
        read_trace(write(tmp_path / "d.jsonl", [line | {"parent_chat_id": -1}]))


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not here: {TRACE}")
def test_the_sessions_give_the_published_rates() -> None:
    trace = read_sessions(TRACE)
    assert len(trace) == 22_114
    found = trace.accesses()
    for capacity, rate in ((500_000, 0.271), (3_000_000, 0.913)):
        assert global_lru(found, capacity).rate == pytest.approx(rate, abs=0.02)
