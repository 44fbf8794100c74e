"""`bench cache-hit --mode simulate`: its output, its files and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.cli import bench
from tokenlake_bench.routing import Answered
from tokenlake_bench.routing.base import CacheAwareSettings
from tokenlake_bench.simulation import command, pooled
from tokenlake_bench.simulation.command import Study
from tokenlake_bench.simulation.pools import POOLS

DISK = {"disk_share", "disk_written_bytes_per_day", "disk_written_share"}
COLD = {"cold_share", "cold_written_bytes_per_day", "cold_written_share"}
ITEM_5 = {
    "token_hit_rate",
    "remote_share",
    "engine_share",
    "load_cv",
    "busy_share",
    "busy_cv",
    "duplication",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "goodput_rps",
    "slo_attainment",
    "bytes_moved",
    "long_prompts",
}


def run(*arguments: str) -> str:
    """The output of a run that ended well."""
    outcome = CliRunner().invoke(bench, ["cache-hit", "--mode", "simulate", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def result(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return loaded


def test_chosen_systems_are_in_table_and_json(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    names = "round-robin-perfect,cache-aware-real"
    printed = run("--limit", "60", "--baselines", names, "--json", str(json_file), "--gpu", "h100")
    assert "built-in conversations" in printed
    written = result(json_file)
    assert list(written["systems"]) == ["pool", "pool-real", *names.split(",")]
    assert all(set(row) == ITEM_5 | DISK | COLD for row in written["systems"].values())
    assert written["systems"]["pool"]["token_hit_rate"] == pytest.approx(written["token_hit_rate"])
    assert written["systems"]["pool"]["bytes_moved"] == written["bytes_moved"] > 0
    assert written["systems"]["pool"]["load_cv"] == written["load_cv"] > 0
    assert written["systems"]["pool"]["remote_share"] == pytest.approx(written["remote_share"])
    assert written["systems"]["cache-aware-real"]["load_cv"] is None
    assert (written["model"], written["gpu"], written["gpus"]) == ("llama-3-8b", "h100", 1)
    assert written["requests"] == 60
    assert written["complete"]


def test_prompts_longer_than_a_node_are_printed_apart(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    arguments = ("--limit", "40", "--capacity-tokens", "3000", "--baselines", "round-robin-perfect")
    printed = run(*arguments, "--json", str(json_file))
    assert "longer than a node's memory" in printed
    rows = result(json_file)["systems"].values()
    (share,) = {row["long_prompts"]["token_share"] for row in rows}
    assert 0 < share < 1
    assert all(row["long_prompts"]["prompts"] > 0 for row in rows)


def test_perfect_routers_need_one_run_of_the_pool(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    run("--limit", "40", "--rate", "5", "--baselines", "round-robin-perfect", "--json", str(json_file))
    written = result(json_file)
    assert list(written["systems"]) == ["pool", "round-robin-perfect"]
    assert written["rate"] == pytest.approx(5.0)


def test_one_form_of_the_pool_can_run_alone(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    run("--limit", "60", "--pools", "pool-planned-real", "--baselines", "none", "--json", str(json_file))
    written = result(json_file)
    assert list(written["systems"]) == ["pool-planned-real"]
    assert written["requests"] == 60
    assert written["systems"]["pool-planned-real"]["token_hit_rate"] == pytest.approx(written["token_hit_rate"])


def test_instances_may_have_gpu_caches_in_front_of_the_memory(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    names = "cache-aware-real,round-robin-perfect"
    arguments = ["--limit", "30", "--nodes", "4", "--pools", "all", "--baselines", names, "--json", str(json_file)]
    run(*arguments, "--engine-cache-tokens", "1000")
    written = result(json_file)
    assert written["engine_cache_tokens"] == 1000
    assert len(written["systems"]) == 6
    assert all(0 < row["engine_share"] <= 1 for row in written["systems"].values())
    run(*arguments)
    written = result(json_file)
    assert written["engine_cache_tokens"] is None
    assert all(row["engine_share"] == 0 for row in written["systems"].values())


def session(number: int, gap_s: float = 60.0) -> dict[str, Any]:
    """Two turns of one agent, 1,024 and 2,048 tokens, `gap_s` and a little apart."""
    return {
        "primary": True,
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 1024, "out": 10, "hash_ids": "1-16"},
            {"t": gap_s + number / 100, "in": 2048, "out": 10, "hash_ids": "1-32"},
        ],
    }


def test_coding_agent_sessions_are_a_trace(tmp_path: Path) -> None:
    trace, json_file = tmp_path / "sessions.jsonl", tmp_path / "result.json"
    trace.write_bytes(b"\n".join(msgspec.json.encode(session(number)) for number in range(4)))
    run("--trace", str(trace), "--capacity-tokens", "300000", "--nodes", "2", "--json", str(json_file))
    assert result(json_file)["token_hit_rate"] == pytest.approx(1 / 3)


def test_sessions_answer_before_they_go_on_unless_told_otherwise(tmp_path: Path) -> None:
    """The second turn is recorded long before this engine has computed the prompt of the first one. In open loop it
    waits for that."""
    trace = tmp_path / "sessions.jsonl"
    trace.write_bytes(b"\n".join(msgspec.json.encode(session(number, 0.001)) for number in range(4)))
    arguments = ["--trace", str(trace), "--capacity-tokens", "300000", "--nodes", "2"]
    found: list[dict[str, Any]] = []
    for more in ([], ["--open-loop"]):
        json_file = tmp_path / "result.json"
        run(*arguments, *more, "--baselines", "round-robin-perfect", "--json", str(json_file))
        found.append(result(json_file))
    assert [each["token_hit_rate"] for each in found] == pytest.approx([1 / 3, 1 / 3])
    closed, opened = (each["systems"]["pool"]["ttft_p99_ms"] for each in found)
    assert opened > 1.5 * closed
    arrivals, recorded = (
        CacheHitArguments(trace=trace, open_loop=open_loop).arrivals()[1] for open_loop in (False, True)
    )
    assert [each.arrived(each.at_s).at_s for each in arrivals] == [each.at_s for each in recorded]
    assert sum(each.follows is not None for each in arrivals) == 4
    assert all(each.follows is None for each in recorded)


def test_copies_are_as_much_load_on_as_many_more_nodes(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    arguments = ["--limit", "40", "--copies", "2", "--nodes", "6", "--capacity-tokens", "48000"]
    run(*arguments, "--json", str(json_file))
    written = result(json_file)
    assert written["requests"] == 80


def test_interrupted_it_writes_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_system", interrupted)
    json_file = tmp_path / "result.json"
    arguments = ["cache-hit", "--mode", "simulate", "--limit", "40", "--json", str(json_file)]
    outcome = CliRunner().invoke(bench, arguments)
    assert outcome.exit_code == 130
    assert "interrupted" in outcome.output
    written = result(json_file)
    assert list(written["systems"]) == ["pool"]
    assert not written["complete"]


def test_an_interrupted_pool_counts_finished_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(**fields: Any) -> Answered:
        if fields["first_s"] > 5.0:
            raise KeyboardInterrupt
        return Answered(**fields)

    monkeypatch.setattr(pooled, "Answered", counted)
    written = Study(CacheHitArguments(limit=100), Console(quiet=True)).run()
    assert written is not None
    assert 0 < written.requests < 100
    assert not written.complete


def test_options_of_engines_and_router_reach_pool_and_routers() -> None:
    given = CacheHitArguments(tensor_parallel=4, chunk_tokens=512, balance_threshold=2, nvlink=True)
    pool, fleet = given.run_of(POOLS["pool-real"]), given.fleet(given.engine())
    assert pool.engine.gpus == fleet.engine.gpus == 4
    assert pool.chunk_tokens == fleet.chunk_tokens == 512
    assert fleet.cache_aware == CacheAwareSettings(balance_abs_threshold=2)
    gpu = pool.engine.gpu
    assert given.options().link.bandwidth == 4 * gpu.link_rate * gpu.link_efficiency
    usual = CacheHitArguments()
    assert usual.fleet(usual.engine()).cache_aware == CacheAwareSettings()
    assert usual.options().link.bandwidth == gpu.network_rate * gpu.network_efficiency


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        ("simulate", ["--model", "gpt-5"], "setting 'model' is 'gpt-5'"),
        ("simulate", ["--gpu", "tpu"], "setting 'gpu' is 'tpu'"),
        ("simulate", ["--baselines", "fifo"], "setting 'baselines' is 'fifo'"),
        ("simulate", ["--pools", "pond"], "setting 'pools' is 'pond'"),
        ("simulate", ["--pools", "pool-planned", "--route", "round-robin"], "setting 'route' is 'round-robin'"),
        ("simulate", ["--rate", "0"], "setting 'rate' is 0.0"),
        ("simulate", ["--restart-every", "0"], "setting 'restart_every' is 0.0"),
        ("simulate", ["--rate", "nan"], "setting 'rate' is nan"),
        ("simulate", ["--copies", "0"], "setting 'copies' is 0"),
        ("simulate", ["--nodes", "0"], "setting 'nodes' is 0"),
        ("simulate", ["--route", "conversation"], "setting 'route' is 'conversation'"),
        ("simulate", ["--disk-tokens", "0"], "setting 'disk_tokens' is 0"),
        ("simulate", ["--cold-tokens", "0"], "setting 'cold_tokens' is 0"),
        ("simulate", ["--cold-rate", "5"], "setting 'cold_rate' is 5.0"),
        ("simulate", ["--cold-tokens", "5000", "--cold-rate", "0"], "setting 'cold_rate' is 0.0"),
        ("simulate", ["--cold-tokens", "5000", "--stop-at", "1e9"], "setting 'stop_at' is 1000000000.0"),
        ("simulate", ["--capacity-tokens", "100"], "setting 'capacity_tokens' is 100"),
        ("simulate", ["--engine-cache-tokens", "63"], "setting 'engine_cache_tokens' is 63"),
        ("simulate", ["--limit", "0"], "setting 'limit' is 0"),
        ("simulate", ["--tensor-parallel", "3"], "setting 'tensor_parallel' is 3"),
        ("simulate", ["--chunk-tokens", "255"], "setting 'chunk_tokens' is 255"),
        ("simulate", ["--balance-threshold", "-1"], "setting 'balance_threshold' is -1"),
        ("simulate", ["--acts", "pin"], "setting 'acts' is 'pin'"),
        ("simulate", ["--acts-right", "0.5"], "setting 'acts_right' is 0.5"),
        ("simulate", ["--acts", "both", "--acts-right", "1.5"], "setting 'acts_right' is 1.5"),
        ("simulate", ["--trace", "absent.jsonl"], "absent.jsonl"),
        ("live", ["--limit", "0"], "setting 'limit' is 0"),
        ("live", ["--segment-tokens", "0"], "setting 'segment_tokens' is 0"),
        ("live", ["--capacity-tokens", "100"], "setting 'capacity_tokens' is 100"),
        ("live", ["--trace", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(mode: str, arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(bench, ["cache-hit", "--mode", mode, *arguments])
    assert outcome.exit_code == 1
    last = outcome.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "llama-3-8b"],
        ["--gpu", "h100"],
        ["--rate", "1"],
        ["--baselines", "all"],
        ["--pools", "all"],
        ["--copies", "2"],
        ["--open-loop"],
        ["--engine-cache-tokens", "1000"],
        ["--tensor-parallel", "2"],
        ["--chunk-tokens", "512"],
        ["--balance-threshold", "1"],
        ["--nvlink"],
        ["--acts", "both"],
    ],
)
def test_what_live_mode_cannot_do_is_refused_there(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(bench, ["cache-hit", *arguments])
    assert outcome.exit_code == 1
    assert f"setting '{arguments[0][2:].replace('-', '_')}'" in outcome.output


def test_a_stop_is_in_table_and_json(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    cold = ("--cold-tokens", "200000", "--cold-rate", "50", "--stop-at", "1", "--model", "llama-2-7b")
    printed = run("--limit", "60", "--baselines", "none", *cold, "--json", str(json_file))
    assert "with the cold tier" in printed
    assert "hits from the cold tier" in printed
    written = result(json_file)
    assert written["cold_tokens"] == 200_000
    assert 0 < written["stop"]["requests"] < 60
    assert written["cold"]["written_bytes"] >= 0
