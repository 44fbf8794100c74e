"""The demo keeps its promises; how fast is not asked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokenlake_bench.cli import demo
from tokenlake_bench.demo import DemoOptions, run_demo


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
    }


def test_a_trace_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(demo, ["--trace", str(tmp_path / "no.jsonl")])
    assert outcome.exit_code == 1
    assert outcome.output.splitlines()[-1].startswith("Error: ")
    assert "no.jsonl" in outcome.output.splitlines()[-1]
