"""Generators against their parameters and published figures; arrivals; the command."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from tokenlake.errors import ConfigurationError
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.traces import BLOCK_TOKENS, read_mooncake
from tokenlake_bench.workloads import (
    GENERATORS,
    TraceLine,
    TraceStatistics,
    bursts,
    generate,
    poisson,
    read_azure,
    statistics_of,
)
from tokenlake_bench.workloads.base import Draw, Turn, lay_out, zipf_mean
from tokenlake_bench.workloads.command import workload
from tokenlake_bench.workloads.writer import write_lines

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def row(second: float, text: str = "374,44") -> str:
    return f"2023-11-16 18:15:{second:010.7f},{text}\r\n"


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


@pytest.mark.parametrize("name", ["uniform", "rag"])
def test_requests_come_at_the_rate(name: str) -> None:
    lines = generate(name, {"requests": 8_000, "rate": 20.0})
    assert 8_000 / (lines[-1].timestamp / 1000) == pytest.approx(20.0, rel=0.1)


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


def test_questions_go_to_popular_documents() -> None:
    """60 % of the requests are about the top 3 % of the documents. With one document per prompt, the block behind the
    system prompt identifies the document."""
    lines = generate("rag", {"retrieved": 1, "requests": 20_000, "document_median": 2_000, "document_sigma": 0})
    uses = Counter(line.hash_ids[1] for line in lines)
    top = sum(count for _, count in uses.most_common(300))
    assert top / len(lines) == pytest.approx(0.60, abs=0.03)
    assert statistics_of(lines).hottest == 1.0


def test_reordered_documents_share_only_the_first() -> None:
    values = {"documents": 2, "retrieved": 2, "requests": 300, "system_blocks": 0, "zipf": 0, "document_sigma": 0}
    lines = generate("rag", values)
    paths = {tuple(line.hash_ids[:10]) for line in lines}
    assert len(paths) == 2
    first, second = paths
    assert not set(first) & set(second)


def test_every_question_retrieves_enough_documents() -> None:
    lines = generate("rag", {"documents": 8, "retrieved": 8, "zipf": 10, "requests": 20, "document_sigma": 0})
    assert {line.input_length // 2_700 for line in lines} == {8}


def test_uniform_prompts_hit_as_computed() -> None:
    requests, prefixes = 5_000, 800
    lines = generate("uniform", {"requests": requests, "prefixes": prefixes, "prefix_blocks": 3, "own_tokens": 600})
    seen = prefixes * (1 - (1 - 1 / prefixes) ** requests)
    found = (requests - seen) / requests * 3 * BLOCK_TOKENS / (3 * BLOCK_TOKENS + 600)
    assert statistics_of(lines).ideal_token_hit == pytest.approx(found, rel=0.01)
    assert statistics_of(lines).input_p50 == 3 * BLOCK_TOKENS + 600


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


def test_mean_of_a_zipf_draw() -> None:
    assert zipf_mean(1.0, 3) == pytest.approx(3 / (1 + 1 / 2 + 1 / 3))
    assert zipf_mean(0.0, 5) == 3.0


def test_a_text_keeps_its_full_blocks_only() -> None:
    text = Draw(0).text()
    assert text.hash_ids(700) == [0, 1]
    assert text.hash_ids(1_500) == [0, 2, 3]
    assert text.hash_ids(1_024) == [0, 2]


def test_poisson_arrivals() -> None:
    times = list(itertools.islice(poisson(5.0, 1), 10_000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2_000, rel=0.05)


def test_bursts_keep_their_shape_at_another_rate() -> None:
    """Three requests at once, one 9 s later, and a period of 12 s: at a rate of one request per second the period takes
    4 s."""
    shape = [0.0, 0.0, 0.0, 9.0]
    times = list(itertools.islice(bursts(shape, 1.0, seed=0), 40))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(39, abs=4)
    gaps = Counter(round(after - before, 6) for before, after in itertools.pairwise(times))
    assert gaps[0.0] == pytest.approx(20, abs=1)
    assert gaps[3.0] + gaps[1.0] == pytest.approx(20, abs=1)


@pytest.mark.parametrize("shape", [[], [1.0], [2.0, 2.0]])
def test_arrivals_without_duration_are_refused(shape: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="arrivals"):
        next(bursts(shape, 1.0, 0))


# -- Azure's file


def test_azure_arrivals_are_read(tmp_path: Path) -> None:
    text = HEADER + row(46.68059) + row(50.9951690) + row(51.2224670)
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.zst"
    plain.write_text(text)
    packed.write_bytes(zstandard.compress(text.encode()))
    for path in (plain, packed):
        times, malformed = read_azure(path)
        assert times == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-6)
        assert malformed == []


def test_few_malformed_arrivals_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + row(1) * 150 + row(1, "x,1") + row(2) * 49)
    times, malformed = read_azure(path)
    assert len(times) == 199
    assert "line 152, field 'ContextTokens': expected a number of tokens, got 'x'" in str(malformed[0])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "line 1: expected the columns TIMESTAMP,ContextTokens,GeneratedTokens; got a,b"),
        (HEADER, "at least one arrival"),
        (HEADER + row(5) + row(4), "line 3, field 'TIMESTAMP': expected a time not before"),
        (HEADER + "yesterday,1,2\n", "1 of 1 are: .*line 2, field 'TIMESTAMP': expected a time like"),
        (HEADER + row(1, "1"), "line 2: expected 3 fields, got 2"),
        (HEADER + row(1, "1,2,3"), "line 2: expected 3 fields, got 4"),
        (HEADER + row(1, "1,-2"), "field 'GeneratedTokens'"),
        (HEADER + "2023-11-16 18:15:46.xx,1,2\n", "field 'TIMESTAMP'"),
        (HEADER + "2023-11-16 18:15:46+01:00,1,2\n", "field 'TIMESTAMP'"),
        (HEADER + "\udcff,1,2\n", "line 2: expected comma-separated text"),
    ],
)
def test_arrivals_that_mean_nothing_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match=problem):
        read_azure(path)


# -- bad settings, the command


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("chat", {}, "'workload' is 'chat'; expected conversation or agent"),
        ("uniform", {"requests": 0}, "'requests' is 0; expected `int` >= 1"),
        ("uniform", {"rate": "fast"}, "'rate' is 'fast'; expected `float`, got `str`"),
        ("uniform", {"rate": float("nan")}, "'rate' is nan; expected `float` > 0"),
        ("uniform", {"zipf": 1}, "'zipf' is 1; expected one of requests, rate, seed, prefixes"),
        ("rag", {"documents": 3, "retrieved": 4}, "'retrieved' is 4; expected at most 3, the number of documents"),
        ("toolagent", {"first_share": 0.5, "second_share": 0.6}, "'second_share' is 0.6; expected at most 0.5"),
    ],
)
def test_settings_without_meaning_name_the_field(name: str, values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        generate(name, values)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(workload, list(arguments))


def test_the_command_writes_what_the_generator_gives(tmp_path: Path) -> None:
    arrivals = tmp_path / "a.csv"
    arrivals.write_text(HEADER + "".join(row(second) for second in (1, 1, 1, 10)))
    out = tmp_path / "trace.jsonl.zst"
    options = ["--requests", "200", "--own-tokens", "100", "--rate", "2"]
    result = command("uniform", "--out", str(out), "--arrivals", str(arrivals), *options)
    assert result.exit_code == 0, result.output
    assert "tokens found, infinite cache" in result.output
    prompts = read_mooncake(out).accesses().prompts
    assert {prompt.tokens for prompt in prompts} == {4 * BLOCK_TOKENS + 100}
    simultaneous = sum(before.at_s == after.at_s for before, after in itertools.pairwise(prompts))
    assert simultaneous == pytest.approx(100, abs=2)


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
        (["uniform", "--out", "trace.txt"], "setting 'out' is 'trace.txt'; expected a file name ending in .jsonl"),
        (["uniform", "--out", "nowhere/trace.jsonl"], "a file in a directory that exists"),
        (["uniform", "--out", "t.jsonl", "--prefixes", "many"], "setting 'prefixes' is 'many'"),
        (["uniform", "--out", "t.jsonl", "--arrivals", "missing.csv"], "No such file"),
    ],
)
def test_bad_input_ends_the_command(arguments: list[str], problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == 1
    assert problem in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []
