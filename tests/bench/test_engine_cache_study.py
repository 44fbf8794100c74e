"""The study of routers that know GPU caches, and of engines that offer the pool fewer segments."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.simulation.command import SimulateArguments
from tokenlake_bench.simulation.engine_cache_study import VARIANTS, Measured, main, rate_at_share, study
from tokenlake_bench.simulation.gpu_tiers import gpu_sizes
from tokenlake_bench.simulation.pooled import pool_options
from tokenlake_bench.simulation.pools import POOL_PLANNED_REAL, POOLS

# Memory that keeps few prompts, behind GPU caches that keep most of them.
ARGUMENTS = SimulateArguments(limit=80, nodes=3, capacity_tokens=3_000, engine_cache_tokens=20_000)


@given(st.floats(0.1, 100), st.floats(0.1, 10))
def test_the_rate_is_that_of_a_line_through_all_runs(rate: float, distance: float) -> None:
    fall = [(rate, 0.96), (rate, 0.94), (rate + distance, 0.84), (rate + distance, 0.86)]
    assert rate_at_share(fall) == pytest.approx(rate + distance / 2)
    rise = [(at, 1.8 - share) for at, share in fall]
    beside = [(at, share - 0.06) for at, share in fall]
    assert rate_at_share([]) is rate_at_share(fall[:2]) is rate_at_share(rise) is rate_at_share(beside) is None


def test_the_pool_as_built_is_that_of_the_comparison_and_routers_that_know_gpu_caches_use_these() -> None:
    measured = study([ARGUMENTS], [None], list(VARIANTS), Console(quiet=True))
    rows = {each.variant: each.row for each in measured}
    assert rows.keys() == VARIANTS.keys()
    capacity_tokens, segment_tokens = ARGUMENTS.size
    options = pool_options(
        ARGUMENTS.engine(), nodes=3, capacity_tokens=capacity_tokens, segment_tokens=segment_tokens, seed=0, rules={}
    )
    run, route = POOLS[POOL_PLANNED_REAL].prepare(options, ARGUMENTS.engine(), ARGUMENTS.engine_cache_tokens)
    run.run(ARGUMENTS.workload(lambda text: None)[1], route=route)
    assert rows[POOL_PLANNED_REAL] == run.row()
    for name in ("router-knows", "router-records", "gpu-added", "gpu-read", "gpu-exclusive"):
        assert rows[name].token_hit_rate > rows[POOL_PLANNED_REAL].token_hit_rate, name


def test_the_memory_of_the_gpus_is_added_or_given_to_the_pool() -> None:
    assert gpu_sizes(POOL_PLANNED_REAL, 8, 8_000_000, 400_000) == (8_000_000, 400_000)
    assert gpu_sizes("gpu-added", 8, 8_000_000, 400_000) == (11_200_000, 400_000)
    assert gpu_sizes("gpu-given-1/4", 8, 8_000_000, 400_000) == (8_800_000, 300_000)


def test_the_command_writes_every_run_and_prints_means(tmp_path: Path) -> None:
    lines = [
        f'{{"timestamp": {1000 * at}, "input_length": 600, "output_length": 2, "hash_ids": [0, {at}]}}'
        for at in range(9)
    ]
    trace, file = tmp_path / "trace.jsonl", tmp_path / "study.json"
    trace.write_text("\n".join(lines))
    variants = f"{POOL_PLANNED_REAL},cache-aware-real"
    done = CliRunner().invoke(
        main,
        [
            "--trace",
            str(trace),
            "--nodes",
            "2",
            "--rates",
            "1,2",
            "--seeds",
            "0,1",
            "--variants",
            variants,
            "--json",
            str(file),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "means over seeds [0, 1]" in done.output
    measured = msgspec.json.decode(file.read_bytes(), type=list[Measured])
    assert {(each.variant, each.rate, each.seed) for each in measured} == {
        (variant, rate, seed) for variant in variants.split(",") for rate in (1.0, 2.0) for seed in (0, 1)
    }


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"variants.*router-knows"):
        study([ARGUMENTS], [None], ["router-guesses"], Console(quiet=True))
