"""The checks of the demo pass; its speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenlake_bench.baselines import infinite_cache, private_round_robin, private_routed
from tokenlake_bench.demo.command import WINDOW, DemoArguments, DemoResult, run_demo
from tokenlake_bench.demo.plan import NODES, REQUESTS, SEGMENT_TOKENS, make_plan
from tokenlake_bench.sizing import bench_layout


def test_the_plan_has_enough_requests_evictions_and_reuse() -> None:
    layout = bench_layout(SEGMENT_TOKENS)
    plan = make_plan(REQUESTS, layout, vocabulary=1024, positions=32_768)
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
        private_routed(plan.accesses, NODES, capacity, seed=0).rate,
        private_round_robin(plan.accesses, NODES, capacity).rate,
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
    result = run_demo(DemoArguments(requests=48, json_file=file))
    printed = capsys.readouterr().out
    print(printed)
    assert max(map(len, printed.splitlines())) <= 80
    for each in (result.in_turn, result.cache_aware, result.pool):
        assert each.equal == result.requests == 48
        assert each.errors == 0
        assert 0 < each.hit_rate <= result.ideal
        assert each.ttft_p50_ms <= each.ttft_p99_ms
        assert 0.5 <= each.busier_share < 1
    assert result.in_turn.busier_share == 0.5
    assert 0 < result.controls_changed == result.controls
    assert result.evicted > 0
    assert result.bytes_moved > 0
    assert result.served_again_s is not None
    assert result.ship_equal
    assert result.ship_tokens > 0
    # On a busy machine some prefixes are recomputed or fetched instead of shipped, so that fewer bytes move.
    assert 0 < result.ship_bytes < result.fetch_bytes
    assert result.restart_equal
    assert 0 < result.restart_before.pool <= result.restart_before.ideal
    assert 0.75 * result.restart_after.ideal < result.restart_after.pool <= result.restart_after.ideal
    assert set(json.loads(file.read_bytes())) == set(DemoResult.__struct_fields__)
