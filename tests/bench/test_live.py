"""The replay against real daemons finds no wrong byte, and detects wrong ones."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake.memory.region import RegionShape
from tokenlake_bench.cli import bench
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.sizing import bench_layout, pool_size
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl.zst"
SEGMENT = 64


@pytest.mark.live
def test_a_replay_has_no_wrong_byte_and_remote_hits(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["cache-hit", "--limit", "400", "--nodes", "3", "--json", str(result_file)]
    if TRACE.exists():
        arguments += ["--trace", str(TRACE)]
    outcome = CliRunner().invoke(bench, arguments)
    print(outcome.output)
    assert outcome.exit_code == 0, outcome.output
    assert TRACE.exists() or "built-in workload" in outcome.output
    result = json.loads(result_file.read_bytes())
    assert result["wrong_bytes"] == 0
    assert result["requests"] == 400
    assert 0 < result["token_hit_rate"] <= result["ideal_token_hit_rate"]
    assert 0 < result["private_token_hit_rate"] <= result["ideal_token_hit_rate"]
    assert 0 < result["remote_share"] < 1
    assert result["load_max_over_mean"] >= 1
    assert result["bytes_moved"] > 0


@pytest.mark.rest
@pytest.mark.live
def test_interrupted_it_writes_what_is_done(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["bench", "cache-hit", "--limit", "2000", "--json", str(result_file)]
    command = [sys.executable, "-c", "from tokenlake.command import main; main()", *arguments]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if "replaying: " in line:
                process.send_signal(signal.SIGINT)
                break
        output += process.stdout
    assert process.returncode == 0, "".join(output)
    result = json.loads(result_file.read_bytes())
    assert 0 < result["requests"] < 2000
    assert f"interrupted after {result['requests']:,} requests" in "".join(output)
    assert result["wrong_bytes"] == 0


@pytest.mark.live
def test_bytes_of_another_prompt_are_found() -> None:
    """One text behind two different first segments, each twice; then a client that expects other bytes of it."""
    text = np.arange(1000, 1000 + 4 * SEGMENT, dtype=np.uint32)
    prompts = [np.concatenate([np.arange(at, at + SEGMENT, dtype=np.uint32), text]) for at in (0, 500, 0, 500)]
    layout = bench_layout(SEGMENT)
    patient = {"match_deadline_ms": "2000", "suspect_ms": "10000"}
    with (
        Cluster(2, "8MiB", "1MiB", **patient) as cluster,
        cluster.connect(0, layout) as first,
        cluster.connect(1, layout) as second,
    ):
        clients = [LiveClient(pool, seed=1) for pool in (first, second)]
        served = [clients[number % 2].serve(prompt) for number, prompt in enumerate(prompts)]
        assert [each.hits for each in served] == [0, 0, 5, 5]
        assert sum(each.wrong_bytes for each in served) == 0
        wrong = LiveClient(first, seed=2).serve(prompts[0])
    assert wrong.hits == wrong.wrong_segments == 5
    assert wrong.wrong_bytes > 0


@given(
    nodes=st.integers(1, 16),
    segments=st.integers(9, 100_000),
    segment_tokens=st.sampled_from([1, 16, 60, 64, 256, 512, 1000, 4096]),
    rest=st.integers(0, 1 << 20),
)
def test_memory_holds_as_many_segments_as_the_baselines(
    nodes: int, segments: int, segment_tokens: int, rest: int
) -> None:
    layout = bench_layout(segment_tokens)
    capacity = nodes * segments * segment_tokens
    size = pool_size(nodes, capacity + rest % (nodes * segment_tokens), layout)
    assert size.node_segments == segments
    assert size.capacity_tokens == capacity
    assert RegionShape(size.memory, layout.segment_bytes).slots == segments
    assert size.memory % 4096 == 0


def test_too_small_a_pool_is_refused_with_what_is_needed() -> None:
    layout = bench_layout(512)
    with pytest.raises(ConfigurationError, match=r"capacity_tokens.*at least 13824"):
        pool_size(3, 13_823, layout)
    assert pool_size(3, 13_824, layout).node_segments == 9


def test_without_a_terminal_progress_is_a_line_per_tenth() -> None:
    out = io.StringIO()
    with LiveProgress("replaying", 50, Console(file=out, width=80)) as progress:
        for done in range(1, 51):
            progress.update(done, "fine")
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "replaying: 5 of 50, fine"
    assert lines[-1] == "replaying: 50 of 50, fine"
