"""Generators against their parameters and published figures; the command."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tokenlake.errors import ConfigurationError
from tokenlake_bench.traces import BLOCK_TOKENS, read_mooncake
from tokenlake_bench.workloads.base import TraceLine, Turn, lay_out
from tokenlake_bench.workloads.command import GENERATORS, generate, workload, write_lines
from tokenlake_bench.workloads.statistics import TraceStatistics, statistics_of

# -- what all generators keep


@pytest.mark.parametrize("name", GENERATORS)
def test_lines_are_what_the_format_says(name: str, tmp_path: Path) -> None:
    """Lines are in time order, each block that a prompt begins has one id, and an id always follows the same id. The
    reader accepts the lines."""
    lines = generate(name, {"requests": 500, "seed": 3})
    assert len(lines) == 500
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    behind: dict[int, int | None] = {}
    for line in lines:
        assert line.input_length >= 1
        assert line.output_length >= 1
        assert len(line.hash_ids) == -(-line.input_length // BLOCK_TOKENS)
        for before, block in itertools.pairwise([None, *line.hash_ids]):
            assert block is not None
            assert behind.setdefault(block, before) == before
    write_lines(lines, tmp_path / "trace.jsonl")
    read = read_mooncake(tmp_path / "trace.jsonl").accesses().prompts
    assert [prompt.tokens for prompt in read] == [line.input_length for line in lines]
    assert [prompt.output_tokens for prompt in read] == [line.output_length for line in lines]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_seed_decides(name: str) -> None:
    first, again, other = (generate(name, {"requests": 100, "seed": seed}) for seed in (1, 1, 2))
    assert first == again
    assert first != other


# -- statistics


def of(name: str, **values: Any) -> TraceStatistics:
    return statistics_of(generate(name, values))


def test_statistics_by_hand() -> None:
    lines = [
        TraceLine(0, 1024, 10, [0, 1]),
        TraceLine(500, 1100, 20, [0, 1, 2]),
        TraceLine(2_000, 1100, 30, [0, 3, 4]),
    ]
    found = statistics_of(lines)
    assert (found.requests, found.duration_s, found.output_mean, found.blocks) == (3, 2.0, 20.0, 5)
    assert found.input_mean == pytest.approx(3224 / 3)
    assert found.ideal_token_hit == pytest.approx((1024 + 512) / 3224)
    assert found.used_once == pytest.approx(3 / 5)
    assert found.top_percent == found.top_permille == pytest.approx(3 / 8)
    assert found.hottest == 1.0


def test_conversations_are_like_the_published_trace() -> None:
    """Published figures: `workloads.conversation`."""
    found = of("conversation")
    assert found.input_mean == pytest.approx(12_035, rel=0.1)
    assert found.input_p50 == pytest.approx(6_909, rel=0.1)
    assert found.input_p99 == pytest.approx(85_400, rel=0.15)
    assert found.output_mean == pytest.approx(343, rel=0.05)
    assert found.ideal_token_hit == pytest.approx(0.374, abs=0.04)
    assert found.blocks == pytest.approx(182_790, rel=0.1)
    assert found.used_once == pytest.approx(0.758, abs=0.04)
    assert found.top_permille == pytest.approx(0.057, abs=0.015)
    assert found.top_percent == pytest.approx(0.122, abs=0.03)
    assert found.hottest == 1.0


def test_tool_calls_are_like_the_published_trace() -> None:
    found = of("toolagent")
    assert found.input_mean == pytest.approx(8_864, rel=0.1)
    assert found.input_p50 == pytest.approx(6_464, rel=0.05)
    assert found.input_p99 == pytest.approx(66_228, rel=0.15)
    assert found.output_mean == pytest.approx(177, rel=0.05)
    assert found.ideal_token_hit == pytest.approx(0.546, abs=0.04)
    assert found.blocks == pytest.approx(205_018, rel=0.1)
    assert found.top_permille == pytest.approx(0.327, abs=0.03)
    assert found.top_percent == pytest.approx(0.374, abs=0.03)
    assert found.hottest == pytest.approx(0.49, abs=0.01)


def test_agents_are_like_the_published_sessions() -> None:
    found = of("agent")
    assert found.input_mean == pytest.approx(116_697, rel=0.2)
    assert found.input_p50 == pytest.approx(99_140, rel=0.2)
    assert found.input_p99 == pytest.approx(508_593, rel=0.25)
    assert found.output_mean == pytest.approx(437, rel=0.1)
    assert found.ideal_token_hit == pytest.approx(0.962, abs=0.02)


def test_questions_share_their_document_alone() -> None:
    found = of("documents", requests=1_000)
    assert found.input_mean == pytest.approx(98_304 + 200, rel=0.01)
    assert found.output_mean == pytest.approx(150, rel=0.1)
    assert found.ideal_token_hit == pytest.approx((1_000 - 37) / 1_000, abs=0.01)
    assert found.hottest < 0.05
    assert of("documents", requests=1_000, skew=2.0).hottest > 0.5


def test_parameters_do_what_they_say() -> None:
    few = of("conversation", requests=3_000, turns_exponent=10)
    many = of("conversation", requests=3_000, turns_exponent=1)
    assert few.ideal_token_hit < 0.2 < 0.4 < many.ideal_token_hit
    assert of("conversation", requests=3_000, system_blocks=0).hottest < 0.05
    assert of("toolagent", requests=3_000, first_share=0.9, second_share=0.1).hottest == pytest.approx(0.9, abs=0.02)
    assert of("agent", requests=3_000, resumed_share=0).input_mean < 0.8 * of("agent", requests=3_000).input_mean


# -- time


def test_sessions_are_laid_on_one_time_line() -> None:
    sessions = iter([iter([Turn(0.0, 1, 1, [0]), Turn(5.0, 2, 1, [0])]), iter([]), iter([Turn(1.0, 3, 1, [0])])])
    lines = lay_out(3, itertools.count(2.0, 1.0), lambda: next(sessions, iter([])))
    assert [(line.timestamp, line.input_length) for line in lines] == [(2_000, 1), (5_000, 3), (7_000, 2)]


# -- bad settings, the command


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("agent", {"requests": 0}, "'requests' is 0; expected `int` >= 1"),
        ("agent", {"rate": "fast"}, "'rate' is 'fast'; expected `float`, got `str`"),
        ("agent", {"rate": float("nan")}, "'rate' is nan; expected `float` > 0"),
        ("toolagent", {"first_share": 0.5, "second_share": 0.6}, "'second_share' is 0.6; expected at most 0.5"),
    ],
)
def test_settings_without_meaning_name_the_field(name: str, values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        generate(name, values)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(workload, list(arguments))


def test_the_command_writes_what_the_generator_gives(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl.zst"
    result = command("toolagent", "--out", str(out), "--requests", "200")
    assert result.exit_code == 0, result.output
    assert "tokens found, infinite cache" in result.output
    lines = generate("toolagent", {"requests": 200})
    assert [prompt.tokens for prompt in read_mooncake(out).accesses().prompts] == [line.input_length for line in lines]


@pytest.mark.parametrize("name", GENERATORS)
def test_each_parameter_is_explained(name: str) -> None:
    result = command(name, "--help")
    assert result.exit_code == 0
    for parameter in GENERATORS[name].settings.__struct_fields__:
        assert f"--{parameter.replace('_', '-')} NUMBER" in result.output
    assert "NUMBER  [default" not in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["agent", "--out", "trace.txt"], "setting 'out' is 'trace.txt'; expected a file name ending in .jsonl"),
        (["agent", "--out", "nowhere/trace.jsonl"], "a file in a directory that exists"),
        (["agent", "--out", "t.jsonl", "--systems", "many"], "setting 'systems' is 'many'"),
    ],
)
def test_bad_input_ends_the_command(arguments: list[str], problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == 1
    assert problem in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []
