"""`tokenlake bench serve` against small servers: figures, forms of requests, faults, and its own plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("aiohttp")

from tests.bench.openai_server import OpenAiServer
from tests.robustness.live import wait_until
from tokenlake.errors import ConfigurationError
from tokenlake_bench.cli import bench
from tokenlake_bench.serve import plan as planning
from tokenlake_bench.serve.api import Answer, ServeError, base_of
from tokenlake_bench.serve.pages import EngineTokens, Pages, page_of, parsed
from tokenlake_bench.serve.plan import Sizes, generated, objective, recorded
from tokenlake_bench.serve.results import Measured, Quantiles, ServeResult, Settings, result_of, warnings
from tokenlake_bench.serve.words import WORDS, text_of
from tokenlake_testing.children import start_child

pytestmark = pytest.mark.live

SIZES = Sizes(requests=40, rate=100.0, context=4096, answer_tokens=4, pause_s=0.01, seed=3)
FAST = ("--requests", "12", "--rate", "200", "--answer-tokens", "4", "--pause", "0.01", "--seed", "5")


def run(*arguments: object, key: str = "") -> Result:
    """The command in this process. No traceback may come out."""
    result = CliRunner().invoke(bench, ["serve", *map(str, arguments)], env={"OPENAI_API_KEY": key or None})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def measured(directory: Path, *arguments: object, status: int = 0, key: str = "") -> ServeResult:
    """The JSON of a run."""
    file = directory / "result.json"
    result = run(*arguments, *FAST, "--save", file, key=key)
    assert result.exit_code == status, result.output
    return msgspec.json.decode(file.read_bytes(), type=ServeResult)


# -- servers that work


@pytest.mark.parametrize("workload", planning.WORKLOADS)
def test_the_tokens_by_source_add_up(workload: str, tmp_path: Path) -> None:
    with OpenAiServer() as one, OpenAiServer() as other:
        urls = ("--url", one.url, "--url", f"{other.url}/v1")
        result = measured(tmp_path, *urls, "--workload", workload, "--objective", "ttft=60s,tpot=60s,e2e=60s")
        assert len(one.prompts) == len(other.prompts) == 6
        tokens = result.engines
        assert tokens is not None
        assert tokens.prompt == result.prompt_tokens == sum(map(len, one.prompts + other.prompts))
        assert tokens.own + tokens.computed == tokens.prompt
        assert (tokens.pool_here, tokens.pool_elsewhere, tokens.other) == (0, 0, 0)
        assert result.cached_tokens == tokens.own > 0
    assert (result.sent, result.answered, result.in_objective, result.errors) == (12, 12, 12, {})
    assert (result.not_read, result.cut, result.complete) == ({}, 0, True)
    assert result.ttft is not None
    assert 0 < result.ttft.p50_s <= result.ttft.p90_s <= result.ttft.p99_s
    assert result.output_tokens >= 12
    assert result.settings.form == "completions, prompts of token ids below 32,000"


def test_a_run_beside_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    with OpenAiServer() as server:
        before = run("--url", server.url, *FAST, "--save", file)
        assert (before.exit_code, "earlier run" in before.stdout) == (0, False), before.output
        again = run("--url", server.url, *FAST, "--against", file, "--concurrency", 2)
        assert (again.exit_code, "either --rate or --concurrency" in again.stderr) == (1, True)
        now = run("--url", server.url, *FAST[:2], *FAST[4:], "--concurrency", 2, "--against", file)
    assert now.exit_code == 0, now.output
    assert server.most_at_once <= 12
    assert "differ in more than the servers: rate 200.0 and None; concurrency None and 2" in now.stdout
    # The server kept the prompts of the first run.
    assert "the caches had prompts of an earlier run" in now.stdout
    (row,) = [line.split() for line in now.stdout.splitlines() if line.startswith(" requests answered")]
    assert row == ["requests", "answered", "12", "12", "1.00"]
    tables = [line for line in (before.stdout + now.stdout).splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    assert "…" not in before.stdout + now.stdout


def test_so_many_at_a_time(tmp_path: Path) -> None:
    with OpenAiServer() as server:
        result = run("--url", server.url, "--requests", 30, "--concurrency", 3, "--answer-tokens", 4)
        assert (result.exit_code, server.most_at_once <= 3, len(server.prompts)) == (0, True, 30), result.output


def test_requests_of_a_session_go_to_one_server(tmp_path: Path) -> None:
    with OpenAiServer() as one, OpenAiServer() as other:
        measured(tmp_path, "--url", one.url, "--url", other.url, "--route", "session")
        first = {tuple(prompt[600:664]) for prompt in one.prompts if len(prompt) > 664}
        assert first.isdisjoint(tuple(prompt[600:664]) for prompt in other.prompts)


@pytest.mark.parametrize(
    ("server", "form"),
    [
        ({"vocabulary": 1024}, "completions, prompts of token ids below 1,024"),
        ({"ids": False}, "completions, prompts of text, a word for a token"),
        ({"strict": True}, "completions, prompts of token ids below 32,000; answers may end early"),
        ({"apis": ("chat/completions",)}, "chat completions, prompts of text, a word for a token"),
        (
            {"apis": ("chat/completions",), "strict": True},
            "chat completions, prompts of text, a word for a token; answers may end early",
        ),
    ],
)
def test_the_form_of_requests_is_found(server: dict[str, object], form: str, tmp_path: Path) -> None:
    with OpenAiServer(**server) as running:  # type: ignore[arg-type]
        result = measured(tmp_path, "--url", running.url)
    assert (result.settings.form, result.answered) == (form, 12)


def test_a_key_and_no_metrics(tmp_path: Path) -> None:
    with OpenAiServer(key="secret", metrics=False) as server:
        refused = run("--url", server.url)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "set the variable OPENAI_API_KEY" in refused.stderr
        result = measured(tmp_path, "--url", server.url, key="secret")
        assert result.engines is None
        assert server.keys_at_metrics == {None}
        assert list(result.not_read.values()) == ["status 404; SGLang serves it with --enable-metrics"]
        # The answers tell how many of their tokens were found.
        assert result.cached_tokens


# -- servers that do not


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("429", "status 429", "fault 429"),
        ("500", "status 500", "fault 500"),
        ("garbage", "no valid answer", "a line of a stream was expected"),
        ("cut", "cut off", ""),
        ("stall", "stalled", "no part of the answer for 5 s"),
    ],
)
def test_faults_are_counted_by_kind(fault: str, kind: str, said: str, tmp_path: Path) -> None:
    with OpenAiServer(lambda number: fault if number in (3, 7) else "") as server:
        result = measured(tmp_path, "--url", server.url, "--timeout", 5 if fault == "stall" else 60)
    assert (result.answered, result.errors) == (10, {kind: 2})
    assert said in result.said[kind]
    assert any(f"failed: 2 x {kind}" in line for line in warnings(result))


def test_a_server_that_ends_in_the_middle(tmp_path: Path) -> None:
    with OpenAiServer() as stays:
        ends = OpenAiServer(lambda number: ends.close() or "" if number == 2 else "")  # type: ignore[func-returns-value]
        result = measured(tmp_path, "--url", stays.url, "--url", ends.url)
    assert result.errors.keys() <= {"not reachable", "cut off"}
    assert result.servers[0].answered == 6
    assert 6 <= result.answered < 12
    assert list(result.not_read) == [f"{ends.url}/metrics"]
    assert result.engines is None


def test_all_fail(tmp_path: Path) -> None:
    with OpenAiServer(lambda number: "500") as server:
        result = measured(tmp_path, "--url", server.url, status=1)
    assert (result.answered, result.ttft, result.errors) == (0, None, {"status 500": 12})


def test_a_run_that_cannot_begin(tmp_path: Path) -> None:
    with OpenAiServer() as server, OpenAiServer(model="other") as other:
        for arguments, said in (
            (("--url", "127.0.0.1:9"), "is not reachable: Connect"),
            (("--url", "ftp://x"), "is no address of a server"),
            (("--url", server.url, "--model", "x"), "has no model 'x'; it has m"),
            (("--url", server.url, "--url", other.url), "the servers have different models: m, other"),
            (("--url", server.url, "--against", tmp_path / "none"), "expected a file that `--save` wrote"),
            (("--url", server.url, "--rate", "0"), "rate"),
            (("--url", server.url, "--context", "1000"), "give prompts with --trace"),
        ):
            result = run(*arguments)
            assert (result.exit_code, result.stdout) == (1, ""), result.output
            assert said in result.stderr.replace("\n", " "), result.stderr
    assert run("--url", server.url, "--objective", "ttft=2").exit_code == 2


def test_an_interrupt_prints_what_was_measured(tmp_path: Path) -> None:
    with OpenAiServer(lambda number: "stall" if number == 5 else "") as server:
        file = tmp_path / "result.json"
        words = ["bench", "serve", "--url", server.url, *FAST, "--workload", "documents", "--save", str(file)]
        command = [sys.executable, "-c", "from tokenlake.command import main; main()", *words]
        with (tmp_path / "log").open("wb") as log:
            process = start_child(command, stdout=subprocess.PIPE, stderr=log, env=dict(os.environ))
        wait_until(lambda: len(server.prompts) == 12, "all are sent")
        wait_until(lambda: "11 of 12" in (tmp_path / "log").read_text(), "all but one are answered")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, (tmp_path / "log").read_text()
    assert b"requests answered" in output
    result = json.loads(file.read_bytes())
    assert (result["answered"], result["complete"]) == (11, False)


# -- the plan


def test_prompts_share_prefixes_as_the_plan_says() -> None:
    for name in planning.WORKLOADS:
        plan = generated(name, SIZES)
        tokens = [plan.tokens(each.number) for each in plan.requests]
        assert [len(each) for each in tokens] == [each.prompt_tokens for each in plan.requests]
        assert max(each.prompt_tokens + each.output_tokens for each in plan.requests) <= SIZES.context
        seen: list[bytes] = []
        repeated = 0
        for each in tokens:
            texts = [each[: 512 * (block + 1)].tobytes() for block in range(len(each) // 512)]
            repeated += 512 * sum(any(text == other[: len(text)] for other in seen) for text in texts)
            seen.append(each.tobytes())
        assert plan.repeated_tokens == repeated > 0, name
        again = generated(name, SIZES)
        assert all((plan.tokens(at) == again.tokens(at)).all() for at in range(len(tokens)))


def test_turns_wait_for_their_answers() -> None:
    chats = generated("chats", SIZES)
    assert any(each.follows is not None for each in chats.requests)
    for each in chats.requests:
        if each.follows is not None:
            assert chats.requests[each.follows].conversation == each.conversation
            assert each.follows < each.number
    assert all(each.follows is None for each in generated("documents", SIZES).requests)


def test_a_trace_is_stretched_and_cut(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 + 500 * at, "input_length": 1000, "output_length": 50, "hash_ids": [0, at + 1]}
        for at in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = recorded(path, limit=None, seed=0, rate=None, context=None, answer_tokens=None)
    assert [each.at_s for each in whole.requests] == [0, 0.5, 1, 1.5, 2]
    assert (whole.cut, whole.repeated_tokens, whole.requests[0].prompt_tokens) == (0, 4 * 512, 1000)
    short = recorded(path, limit=4, seed=0, rate=8, context=600, answer_tokens=100)
    assert short.requests[-1].at_s == pytest.approx(4 / 8)
    assert (short.cut, {each.prompt_tokens for each in short.requests}) == (4, {500})
    assert (short.tokens(1) == whole.tokens(1)[:500]).all()


def test_recorded_sessions_keep_their_pauses(tmp_path: Path) -> None:
    first = {"t": 0, "in": 130, "out": 5, "hash_ids": "1-2", "api_time": 1}
    then = {"t": 3, "in": 200, "out": 5, "hash_ids": "1-3", "api_time": 1}
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"primary": True, "block_size": 64, "requests": [first, then]}) + "\n")
    plan = recorded(path, limit=None, seed=0, rate=None, context=None, answer_tokens=None)
    assert [(each.follows, each.pause_s) for each in plan.requests] == [(None, None), (0, 2.0)]
    assert plan.repeated_tokens == 128
    with OpenAiServer() as server:
        result = run("--url", server.url, "--trace", path)
        assert (result.exit_code, len(server.prompts)) == (0, 2), result.output
        assert server.prompts[0][:128] == server.prompts[1][:128]
        assert server.prompts[0][128:] != server.prompts[1][128:130]


def test_texts_share_words_where_tokens_are_shared() -> None:
    tokens = np.array([5, 7, 11, 5], dtype=np.uint32)
    assert len(set(WORDS)) == len(WORDS) > 250
    assert text_of(tokens).startswith(text_of(tokens[:2]) + " ")
    assert text_of(tokens).split()[3] == text_of(tokens).split()[0]


# -- words and figures


def test_objectives() -> None:
    assert objective("ttft=2s,tpot=100ms") == {"ttft": 2.0, "tpot": 0.1}
    for text in ("", "ttft", "ttft=2", "ttft=-1s", "ttft=infs", "p99=2s", "ttft=nans"):
        with pytest.raises(click.BadParameter, match="expected ttft="):
            objective(text)


def test_addresses() -> None:
    assert base_of("h:8000") == base_of("http://h:8000/v1/") == "http://h:8000"
    assert base_of("https://h/llm/v1") == "https://h/llm"
    for address in ("", "http://", "h:x", "ftp://h"):
        with pytest.raises(ServeError, match="no address"):
            base_of(address)
    assert page_of("h:7441") == "http://h:7441/metrics"
    assert page_of("http://h/x/metrics") == "http://h/x/metrics"


def test_what_a_reader_must_know() -> None:
    settings = Settings(
        workload="chats",
        seed=0,
        requests=2,
        rate=1.0,
        concurrency=None,
        servers=1,
        route="-",
        model="m",
        form="f",
        longest_prompt=9,
        objective={},
    )
    answers = [
        Answer(at, 0, 0.0, 0.0, 1.0, 2.0, prompt_tokens=100, output_tokens=11, at_s=[1.0, 2.0]) for at in range(2)
    ]
    tokens = EngineTokens(prompt=250, own=200, pool_here=0, pool_elsewhere=0, other=0, computed=50)
    result = result_of(
        settings,
        Measured(
            answers=answers,
            urls=["u"],
            planned_tokens=200,
            repeated_tokens=0,
            cut=1,
            engines=tokens,
            daemons=None,
            not_read={"p": "why"},
            busy_s=1.9,
            complete=True,
        ),
    )
    assert result.tpot == Quantiles(0.1, 0.1, 0.1)
    said = "\n".join(warnings(msgspec.structs.replace(result, late=Quantiles(0.1, 0.2, 0.3))))
    for words in (
        "not read: p: why",
        "1 prompts were cut",
        "this client was late: 300 ms",
        "computed 95.0 % of the time",
        "the engines counted 250 prompt tokens and the answers 200",
        "the caches had prompts of an earlier run",
    ):
        assert words in said


VLLM_OLD = """
vllm:prompt_tokens_total{{engine="0"}} {prompt}
vllm:prompt_tokens_total{{engine="1"}} 100
vllm:prefix_cache_hits_total{{engine="0"}} {own}
vllm:external_prefix_cache_hits_total{{engine="0"}} {external}
vllm:tokenlake_prompt_tokens_total{{engine="0",source="this_node"}} {here}
vllm:tokenlake_prompt_tokens_total{{engine="0",source="other_nodes"}} {elsewhere}
"""
SGLANG = """
sglang:prompt_tokens_total{{is_streaming="true"}} {prompt}
sglang:cached_tokens_total{{cache_source="device"}} {own}
sglang:cached_tokens_total{{cache_source="storage"}} {external}
sglang:tokenlake_looked_up_tokens_total{{source="this_node"}} {here}
sglang:tokenlake_looked_up_tokens_total{{source="other_nodes"}} {elsewhere}
"""


@pytest.mark.parametrize("page", [VLLM_OLD, SGLANG])
@pytest.mark.parametrize(("here", "elsewhere", "other"), [(24, 6, 0), (0, 0, 30)])
def test_pages_of_engines(page: str, here: int, elsewhere: int, other: int) -> None:
    """Counters are growths; what is not the pool's came from another connector."""
    if page is VLLM_OLD and not other:
        here, elsewhere = 20, 10
    pages = Pages(["e"], [])
    zero = {"prompt": 0, "own": 0, "external": 0, "here": 0, "elsewhere": 0}
    grown = {"prompt": 100, "own": 40, "external": 30, "here": here, "elsewhere": elsewhere}
    pages.before, pages.after = ({"e": parsed(page.format(**each))} for each in (zero, grown))
    assert pages.engine_tokens() == EngineTokens(
        prompt=100, own=40, pool_here=here, pool_elsewhere=elsewhere, other=other, computed=30
    )
    pages.before, pages.after = pages.after, pages.before
    assert pages.engine_tokens() is None
    assert pages.unread == {"e": "its counters fell: the process was restarted in the run"}


def test_pages_that_are_not_those_of_engines_or_daemons() -> None:
    pages = Pages(["e"], ["d"])
    pages.before = pages.after = {each: parsed("tokenlake_router_requests_total 1\n") for each in ("e", "d")}
    assert pages.engine_tokens() is None
    assert pages.daemon_tokens() is None
    assert pages.unread == {
        "e": "it has no counters of prompt tokens of vLLM or SGLang",
        "d": "it is not the metrics page of a daemon",
    }


def test_a_context_that_is_too_short() -> None:
    with pytest.raises(ConfigurationError, match="context"):
        generated("documents", Sizes(4, 1.0, 1000, 16, 1.0, 0))
