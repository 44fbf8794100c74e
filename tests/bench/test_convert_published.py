"""`tokenlake workload convert`: conversations and published traces, the order of requests, and what a trace holds."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from rich.console import Console

from tests.bench.test_convert import chat, converted, invoke, tokenizer, words, write
from tokenlake_bench.baselines import infinite_cache
from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.convert import sharegpt
from tokenlake_bench.convert.base import Log, Logged, Report, unix_s
from tokenlake_bench.convert.blocks import BlockIds
from tokenlake_bench.convert.command import ConvertArguments, run_convert
from tokenlake_bench.convert.order import in_order
from tokenlake_bench.convert.prompts import Prompts
from tokenlake_bench.convert.summary import Summary
from tokenlake_bench.simulation.command import Study
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.traces import MooncakeTrace

__all__ = ["tokenizer"]


def trace_of(log: Path | list[Path], source: str, **arguments: Any) -> MooncakeTrace:
    """The trace of a log, as the benchmarks read it."""
    converted(log, source, **arguments)
    path = (log[0] if isinstance(log, list) else log).parent / "trace.jsonl"
    trace = read_trace(path)
    assert isinstance(trace, MooncakeTrace)
    return trace


# -- ShareGPT


def conversation(number: int, turns: int) -> dict[str, Any]:
    roles = itertools.cycle(["human", "gpt"])
    texts = [f"t{1000 + number} {words(20, 30 * turn)}" for turn in range(2 * turns)]
    return {
        "id": str(number),
        "conversations": [{"from": role, "value": text} for role, text in zip(roles, texts, strict=False)],
    }


@pytest.mark.parametrize("form", ["array", "lines", "packed", "messages"])
def test_each_answer_of_a_conversation_is_a_request(tmp_path: Path, tokenizer: Path, form: str) -> None:
    """A prompt begins with the one before it and its answer; conversations begin by themselves, in order of time."""
    made = [conversation(number, 3) for number in range(20)]
    if form == "messages":
        roles = {"human": "user", "gpt": "assistant"}
        made = [
            {"messages": [{"role": roles[turn["from"]], "content": turn["value"]} for turn in each["conversations"]]}
            for each in made
        ]
    path = tmp_path / {"lines": "log.jsonl", "packed": "log.json.zst"}.get(form, "log.json")
    if form == "lines":
        write(path, made)
    else:
        text = json.dumps(made, indent=2 if form == "array" else None).encode()
        path.write_bytes(zstandard.compress(text) if form == "packed" else text)
    lines = converted(path, "sharegpt", tokenizer=tokenizer, rate=5.0, block_tokens=4)
    assert len(lines) == 60
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    assert sorted({line["input_length"] for line in lines}) == [23, 67, 111]
    assert {line["output_length"] for line in lines} == {21}
    heads = [tuple(line["hash_ids"][:1]) for line in lines]
    assert len(set(heads)) == 20
    for head in set(heads):
        turns = [line["hash_ids"] for line, each in zip(lines, heads, strict=True) if each == head]
        assert turns[1][:5] == turns[0][:5]
        assert turns[2][:16] == turns[1][:16]
    assert lines == [
        line | {"hash_ids": mine["hash_ids"]}
        for line, mine in zip(
            converted(path, "sharegpt", tokenizer=tokenizer, rate=5.0, block_tokens=4), lines, strict=True
        )
    ], "the seed draws the times"


def test_an_array_is_read_piece_by_piece(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end within an object, an escape or a character of several bytes; wrong conversations are left out by
    number, and an array that breaks off is an error."""
    made = [conversation(number, 1) for number in range(12)]
    made[3]["conversations"][0]["value"] = 'ü € "quoted \\ \u2028 𝄞 ]}, [' * 20
    made.insert(5, {"id": "x", "conversations": [{"from": "narrator", "value": "t1"}]})
    made.insert(7, {"id": "y", "conversations": [{"from": "human", "value": "t1"}]})
    path = tmp_path / "log.json"
    path.write_text(json.dumps(made, ensure_ascii=False))
    whole = len(converted(path, "sharegpt", tokenizer=tokenizer))
    for chunk in (1, 7, 100):
        monkeypatch.setattr(sharegpt, "CHUNK", chunk)
        result = invoke(path, "--from", "sharegpt", "--out", tmp_path / "t.jsonl", "--tokenizer", tokenizer)
        assert f"{path}, line 6: conversations: expected turns with 'from'" in result.output
        assert "conversations without an answer" in result.output
        assert len((tmp_path / "t.jsonl").read_text().splitlines()) == whole == 12
    path.write_text(json.dumps(made)[:-20])
    with pytest.raises(TraceError, match="line 14: expected a JSON array of conversations; it breaks off"):
        converted(path, "sharegpt", tokenizer=tokenizer)


# -- published traces


def bailian(length: int, ids: list[int], at_s: float = 0.0) -> dict[str, Any]:
    more = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1}
    return {"timestamp": at_s, "input_length": length, "output_length": 132, "hash_ids": ids, **more}


def test_bailian_has_blocks_of_16_tokens(tmp_path: Path) -> None:
    """Ids of full blocks or of all started ones; equal blocks behind different ones have other ids."""
    log = [bailian(33, [1, 2, 3], 61.114), bailian(33, [1, 2], 61.5), bailian(40, [9, 2], 62), bailian(32, [1, 2], 63)]
    lines = converted(write(tmp_path / "qwen_traceA_blksz_16.jsonl", log), "bailian")
    assert [(line["timestamp"], line["block_size"]) for line in lines] == [(0, 16), (386, 16), (886, 16), (1886, 16)]
    first, second, other, short = (line["hash_ids"] for line in lines)
    assert first[:2] == second[:2] == short
    assert first[2] != second[2], "a last block without an id is unlike all others"
    assert not set(other) & set(first)
    with pytest.raises(TraceError, match="line 1: hash_ids: expected 2 or 3, one per 16-token block; got 4"):
        converted(write(tmp_path / "wrong.jsonl", [bailian(33, [1, 2, 3, 4])]), "bailian", wrong_lines=0)


def test_mooncake_keeps_its_sharing(tmp_path: Path) -> None:
    mooncake = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1_600, "output_length": 5, "hash_ids": [7, 8, 10, 11]},
    ]
    path = write(tmp_path / "log.jsonl", mooncake)
    lines = converted(path, "mooncake")
    assert [line["timestamp"] for line in lines] == [0, 3000]
    assert lines[0]["hash_ids"][:2] == lines[1]["hash_ids"][:2]
    assert lines[0]["hash_ids"][2] != lines[1]["hash_ids"][2]
    wide = converted(path, "mooncake", block_tokens=1024)
    assert [len(line["hash_ids"]) for line in wide] == [2, 2]
    assert wide[0]["hash_ids"][0] == wide[1]["hash_ids"][0]
    dynamo = [{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1, 2]}]
    assert converted(write(tmp_path / "b.jsonl", dynamo), "mooncake", log_block_tokens=64)[0]["block_size"] == 64


def test_azure_has_no_sharing_and_says_so(tmp_path: Path) -> None:
    log = write(
        tmp_path / "azure.csv.zst",
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
            "2024-05-10 00:00:00.009930+00:00,100,5",
            "soon,1,1",
        ],
    )
    refused = invoke(log, "--from", "azure", "--out", tmp_path / "t.jsonl")
    assert refused.exit_code == 1
    assert "lengths alone, so that no hit rate can be computed from it" in refused.output
    taken = invoke(log, "--from", "azure", "--out", tmp_path / "t.jsonl", "--unshared")
    assert taken.exit_code == 0, taken.output
    assert "hit rates of this trace mean nothing" in taken.output
    assert "infinite memory" not in taken.output
    assert f"{log}, line 5: TIMESTAMP: expected" in taken.output
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(374, 44), (396, 109), (100, 5)]
    assert lines[1]["timestamp"] == 4315
    ids = [each for line in lines for each in line["hash_ids"]]
    assert len(ids) == len(set(ids)) == 6 + 7 + 2
    bare = write(tmp_path / "bare.csv", ["a,b", "1,2"])
    assert (
        "expected the columns TIMESTAMP"
        in invoke(bare, "--from", "azure", "--out", tmp_path / "t.jsonl", "--unshared").output
    )


# -- block sizes


def dialogues(requests: int) -> list[dict[str, Any]]:
    """Completions by token ids: conversations that grow, over a common beginning."""
    rng = random.Random(5)
    texts = [list(range(700)) + [rng.randrange(3000) for _ in range(100)] for _ in range(8)]
    log = []
    for number in range(requests):
        text = rng.choice(texts)
        text += [rng.randrange(3000) for _ in range(rng.randrange(50, 700))]
        log.append({"time": number, "prompt": list(text), "usage": {"completion_tokens": 20}})
    return log


def test_16_and_512_tokens_differ_by_rounding_alone(tmp_path: Path) -> None:
    """The same requests with blocks of 16 and of 512 tokens: the same hits with segments of 512, in the comparison and
    in the simulated pool; with smaller segments the coarse blocks find at most one block less per request."""
    log = write(tmp_path / "log.jsonl", dialogues(60))
    found: dict[int, list[Any]] = {}
    for size in (16, 512):
        trace = trace_of(log, "openai", block_tokens=size)
        (tmp_path / "trace.jsonl").rename(path := tmp_path / f"{size}.jsonl")
        arguments = CacheHitArguments(trace=path, capacity_tokens=60_000, nodes=2, baselines="none")
        result = Study(arguments, Console(file=io.StringIO())).run()
        assert result is not None
        found[size] = [
            [each.chain for each in trace.accesses(512).prompts],
            result.systems,
            infinite_cache(trace.accesses(64)).hit_tokens,
        ]
    assert found[16][:2] == found[512][:2]
    assert 0 < found[16][2] - found[512][2] < 60 * 512


# -- order, files, standard streams


def log_with(report: Report) -> Log:
    return Log(Path("log"), io.BytesIO(), 0.0, report, BlockIds(b"k", 4), Prompts(None), None, 0)


def request(at_s: float, blocks: int = 1) -> Logged:
    return Logged(at_s, 4 * blocks, np.arange(blocks, dtype=np.uint64), 1, 7)


def test_requests_are_put_in_order_within_a_window() -> None:
    said: list[str] = []
    report = Report(said.append, 1)
    times = [5, 3, 4, 1, 9, 8, 2, 12, 11, 0.5]
    found = [each.at_s for each in in_order(log_with(report), map(request, times), window=5)]
    assert found == [1, 2, 3, 4, 5, 8, 9, 11, 12]
    assert said == ["log, line 7: time: more than 5 requests behind; sort the log by time"]


def test_a_window_holds_a_bounded_number_of_ids() -> None:
    """A reader of a log is never further ahead of its trace than the window, whatever the prompts' lengths."""
    taken = 0

    def requests() -> Iterator[Logged]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield request(number, 100)

    for number, _ in enumerate(itertools.islice(in_order(log_with(Report(print, 0)), requests(), ids=1_000), 500)):
        assert taken - number <= 12


def test_logs_of_a_fleet_become_one_trace(tmp_path: Path) -> None:
    """Several logs, compressed or not, are merged by time; ids are equal across them."""
    logs = [
        write(tmp_path / name, [{"time": at, "prompt": [1, 2, at]} for at in range(first, 10, 2)])
        for first, name in enumerate(("a.jsonl.gz", "b.jsonl.zst"))
    ]
    lines = converted(logs, "openai", block_tokens=2)
    assert [line["timestamp"] for line in lines] == [1000 * at for at in range(10)]
    assert len({line["hash_ids"][0] for line in lines}) == 1
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(logs[0].read_bytes()[:-6])
    with pytest.raises(TraceError, match=r"cut.jsonl.gz: expected gzip data"):
        converted(cut, "openai")
    with pytest.raises(TraceError, match="missing.jsonl: expected a readable file; No such file"):
        converted([logs[0], tmp_path / "missing.jsonl"], "openai")


def test_standard_input_and_output_are_streams(tmp_path: Path) -> None:
    """The trace alone goes to standard output, and the summary to standard error."""
    given = b"".join(json.dumps({"time": at, "prompt": [1, 2]}).encode() + b"\n" for at in range(3))
    result = invoke("-", "--from", "openai", "--out", "-", given=given)
    assert result.exit_code == 0
    assert [json.loads(line)["timestamp"] for line in result.stdout.splitlines()] == [0, 1000, 2000]
    assert "requests" in result.stderr
    for name in ("t.jsonl.zst", "t.jsonl.gz"):
        run_convert(
            ConvertArguments(
                logs=(write(tmp_path / "log.jsonl", [given.decode()]),), source="openai", out=tmp_path / name
            )
        )
        assert len(read_trace(tmp_path / name)) == 3


# -- what a trace holds


def test_the_summary_is_what_an_infinite_cache_finds(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", dialogues(80))
    summary = run_convert(ConvertArguments(logs=(path,), source="openai", out=tmp_path / "trace.jsonl"))
    trace = read_trace(tmp_path / "trace.jsonl")
    accesses = trace.accesses(64)
    assert (summary.every, summary.requests, summary.output_tokens) == (1, 80, 1600)
    assert summary.input_tokens == accesses.prompt_tokens
    assert summary.shared_tokens == infinite_cache(accesses).hit_tokens > 0
    assert summary.distinct_tokens == 64 * len({each for prompt in accesses.prompts for each in prompt.chain})
    assert summary.last_s - summary.first_s == 79


def test_a_summary_in_bounded_memory_is_an_estimate() -> None:
    """Beyond its limit the summary looks at one id in 2, 4, ... and stays within a few percent."""
    rng = np.random.default_rng(3)
    exact, bounded = Summary(4), Summary(4, most_ids=2_000)
    texts = [rng.integers(0, 1 << 53, 300, dtype=np.uint64) for _ in range(400)]
    for number in range(2_000):
        text = texts[int(rng.integers(0, 400))]
        logged = Logged(number, 4 * 300, text, 1, 1)
        exact.add(logged)
        bounded.add(logged)
        assert len(bounded._known) <= 2_000
    assert bounded.every >= 64
    assert bounded.shared == pytest.approx(exact.shared, rel=0.03)
    assert bounded.distinct_tokens == pytest.approx(exact.distinct_tokens, rel=0.05)


@pytest.mark.parametrize(
    ("value", "at_s"),
    [
        (1_795_899_770, 1_795_899_770),
        (1_795_899_770.5, 1_795_899_770.5),
        (1_795_899_770_500, 1_795_899_770.5),
        (1_795_899_770_500_000, 1_795_899_770.5),
        (1_795_899_770_500_000_000, 1_795_899_770.5),
        ("1795899770.5", 1_795_899_770.5),
        ("2026-11-28T21:02:50.5Z", 1_795_899_770.5),
        ("2026-11-28 21:02:50.5", 1_795_899_770.5),
        ("2026-11-28T22:02:50.500+01:00", 1_795_899_770.5),
    ],
)
def test_times_are_read_in_all_usual_forms(value: object, at_s: float) -> None:
    assert unix_s(value, "time") == pytest.approx(at_s, abs=1e-4)


def test_chats_of_one_template_share_their_beginning(tmp_path: Path, tokenizer: Path) -> None:
    """A following turn contains the whole prompt before it: what an engine's prefix cache finds is found."""
    first, second = words(100), words(50, 500)
    log = [chat(first, time=0), chat(first, "t7 t8", second, time=1)]
    path = write(tmp_path / "log.jsonl", log)
    summary = run_convert(
        ConvertArguments(logs=(path,), source="openai", out=tmp_path / "t.jsonl", tokenizer=tokenizer, block_tokens=2)
    )
    assert summary.shared_tokens == 102
