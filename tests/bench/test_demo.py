"""The checks of the demo pass; its speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokenlake_bench.baselines import infinite_cache, private_round_robin, private_routed
from tokenlake_bench.cli import demo
from tokenlake_bench.demo import WINDOW, DemoOptions, run_demo
from tokenlake_bench.demo_plan import ENGINES, NODES, REQUESTS, SEGMENT_TOKENS, make_plan
from tokenlake_bench.sizing import bench_layout


def test_the_plan_has_enough_requests_evictions_and_reuse() -> None:
    layout = bench_layout(SEGMENT_TOKENS)
    plan = make_plan(None, REQUESTS, layout, vocabulary=1024, positions=32_768)
    assert len(plan.workload) == len(plan.accesses.prompts) >= 200
    distinct = {segment for prompt in plan.accesses.prompts for segment in prompt.chain}
    places = NODES * plan.size.node_segments
    assert len(distinct) > 1.5 * places, "the segments do not all fit, so that some are evicted"
    assert plan.size.node_segments >= 200, "a node has enough slots for the budgets, which are shares of them"
    longest = max(len(prompt.chain) for prompt in plan.accesses.prompts)
    assert plan.size.node_segments > 3 * longest, "a node has room for several prompts"
    capacity = plan.size.capacity_tokens
    ideal, routed, private = (
        infinite_cache(plan.accesses).rate,
        private_routed(plan.accesses, ENGINES, capacity, seed=0).rate,
        private_round_robin(plan.accesses, ENGINES, capacity).rate,
    )
    assert ideal >= routed > private + 0.05, "one shared cache finds more than private ones"
    assert routed > ideal - 0.05, "the open conversations fit into the private caches"
    shortest = min(prompt.tokens for prompt in plan.accesses.prompts)
    assert shortest > WINDOW * SEGMENT_TOKENS / 2, "a hit is several segments long"


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(600)
def test_tokens_are_equal_though_a_node_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.json"
    result, details = run_demo(DemoOptions(requests=48, json_file=file))
    printed = capsys.readouterr().out
    print(printed)
    assert result.tokens_equal
    assert details.compared == details.equal == details.requests == 48
    assert result.errors == 0
    assert 0 < result.control_changed_tokens == details.controls
    assert 0 < result.token_hit_rate <= result.ideal_token_hit_rate
    assert 0 < details.remote_share < 1
    before = details.until_kill
    assert 0 < before.requests < details.requests
    assert 0 < before.token_hit_rate <= before.ideal_token_hit_rate
    assert f"of the {before.requests} requests before the kill: pool" in printed
    assert details.evictions > 0
    assert details.killed_node == "node0"
    assert details.served_again_s is not None
    assert "tokens equal 48 of 48" in printed
    assert "the milliseconds do not" in printed
    assert set(json.loads(file.read_bytes())) == {
        "token_hit_rate",
        "private_token_hit_rate",
        "private_routed_token_hit_rate",
        "ideal_token_hit_rate",
        "ttft_pool_ms",
        "ttft_cold_ms",
        "tokens_equal",
        "control_changed_tokens",
        "longest_call_ms",
        "errors",
        "ship",
        "restart",
    }
    ship = result.ship
    assert ship.tokens_equal
    assert ship.cached_tokens > 0
    # Frames add a little to the bytes of the formulae. On a busy machine some prefixes are recomputed or fetched
    # instead of shipped, so that fewer bytes move.
    assert 0 < ship.ship_bytes <= 1.05 * ship.ship_formula_bytes
    assert ship.ship_bytes < ship.fetch_bytes
    restart = result.restart
    assert restart.requests == 16
    assert restart.tokens_equal
    assert 0 < restart.hit_rate_before <= restart.ideal_before
    assert 0.75 * restart.ideal_after < restart.hit_rate_after <= restart.ideal_after
    assert "hits of the next 16 requests" in printed


def test_a_trace_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(demo, ["--trace", str(tmp_path / "no.jsonl")])
    assert outcome.exit_code == 1
    assert outcome.output.splitlines()[-1].startswith("Error: ")
    assert "no.jsonl" in outcome.output.splitlines()[-1]
