"""The search for the highest rate within the objective."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.cli import bench
from tokenlake_bench.simulation.goodput import Goodput, highest_rate, search


@given(st.integers(-80, 80), st.integers(-80, 80))
def test_the_highest_good_step_is_found_from_any_start(last: int, start: int) -> None:
    asked: list[int] = []

    def share_at(step: int) -> float:
        asked.append(step)
        return 0.95 if step <= last else 0.85

    assert highest_rate(share_at, start) == last
    assert len(asked) == len(set(asked))
    assert len(asked) <= 20


@given(st.integers(-10, 10))
def test_where_no_rate_is_good_there_is_none(start: int) -> None:
    assert highest_rate(lambda step: 0.0, start) is None
    found = highest_rate(lambda step: 1.0, start)
    assert found is not None
    assert found > 10 >= start


def test_the_rate_is_the_last_with_nine_in_ten_in_time(tmp_path: Path) -> None:
    file = tmp_path / "goodput.json"
    arguments = ["cache-hit", "--mode", "simulate", "--goodput", "--pools", "pool-real", "--json", str(file)]
    arguments += ["--baselines", "cache-aware-real"]
    done = CliRunner().invoke(bench, [*arguments, "--limit", "150", "--nodes", "2", "--model", "llama-3-70b"])
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(file.read_bytes(), type=Goodput)
    assert list(result.rates) == ["pool-real", "cache-aware-real"]
    for system, rate in result.rates.items():
        assert f"{rate:.2f}" in done.output
        tried = dict(result.shares[system])
        assert tried[rate] >= 0.9
        assert tried[min(each for each in tried if each > rate)] < 0.9


def test_a_load_that_no_rate_raises_is_no_goodput(tmp_path: Path) -> None:
    """Two turns of one session: with the pause after the answer, no rate brings them closer together."""
    trace = tmp_path / "session.jsonl"
    turns = [{"t": at_s, "in": 1024, "out": 4, "hash_ids": "1-16", "api_time": 1.0} for at_s in (0.0, 60.0)]
    trace.write_bytes(msgspec.json.encode({"primary": True, "block_size": 64, "requests": turns}))
    lines: list[str] = []
    search(CacheHitArguments(trace=trace, baselines="round-robin-perfect"), lines.append)
    assert any("not a goodput" in line for line in lines)
