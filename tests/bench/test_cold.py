"""The cold tier in the simulator and in `bench cold`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.test_pooled import ENGINE, TOKENS
from tests.bench.test_simulation import conversations
from tokenlake.core.cold import WRITTEN
from tokenlake.core.cold_reads import READ
from tokenlake.errors import ConfigurationError
from tokenlake.metrics import Metric
from tokenlake_bench import cold
from tokenlake_bench.baselines import infinite_cache
from tokenlake_bench.cold import ColdArguments, run_cold
from tokenlake_bench.simulation.arrivals import Arrival, arrivals_of
from tokenlake_bench.simulation.cold import ColdContent
from tokenlake_bench.simulation.pooled import PooledRun, pool_options
from tokenlake_bench.simulation.stopped import run_stopped

NODES, NODE_SEGMENTS = 2, 40


def arrivals() -> list[Arrival]:
    return arrivals_of(conversations(requests=300, seed=3))


def made(
    content: ColdContent | None = None, *, cold_tokens: int = 1 << 20, rate: float = 20e9, **rules: float
) -> PooledRun:
    """A run that has not begun, of nodes with little memory."""
    options = pool_options(
        ENGINE,
        nodes=NODES,
        capacity_tokens=NODES * NODE_SEGMENTS * TOKENS,
        segment_tokens=TOKENS,
        seed=1,
        cold_tokens=cold_tokens,
        cold_rate=rate,
        rules=rules,
    )
    return PooledRun(options, ENGINE, counts_memory=False, cold=content)


def total(run: PooledRun, metric: Metric) -> int:
    return sum(node.core.counters[metric] for node in run.simulation.cluster.nodes)


def rate(run: PooledRun) -> float:
    return run.row().token_hit_rate


def test_a_cold_tier_keeps_what_memory_evicts() -> None:
    without, run = made(cold_tokens=0), made()
    for each in (without, run):
        each.run(arrivals())
        each.simulation.cluster.check_integrity()
        assert each.simulation.cluster.idle()
    assert rate(run) > rate(without) + 0.05
    assert rate(run) <= infinite_cache(conversations(requests=300, seed=3)).rate + 1e-9
    row, use = run.row(), run.simulation.cold_use(100.0)
    assert use is not None
    assert row.cold_share > 0.1
    assert use.tokens == total(run, READ) * TOKENS
    content = run.simulation.cluster.cold
    assert content is not None
    assert use.written_bytes == content.written_bytes
    assert without.row().cold_written_share is None


def test_its_size_and_the_budget_bound_what_it_gets() -> None:
    small = made(cold_tokens=50 * TOKENS)
    small.run(arrivals())
    content = small.simulation.cluster.cold
    assert content is not None
    assert content.used <= content.capacity
    assert content.written_bytes > content.capacity
    slot = small.simulation.options.layout.segment_bytes
    frugal = made(cold_bytes_per_day=24.0 * 10 * slot)
    frugal.run(arrivals())
    # That of an hour may be written at once.
    hours = 1 + max(answer.at_s for answer in frugal.answers) / 3600
    assert 0 < total(frugal, WRITTEN) <= NODES * (10 * hours + 1)


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    slow = made(rate=0.5e9)
    slow.run(arrivals())
    assert total(slow, READ) == 0
    # The engines tell how long they compute once they have read something.
    assert total(slow, WRITTEN) < NODES * NODE_SEGMENTS


def test_a_new_cluster_finds_what_the_old_one_left() -> None:
    requests = arrivals()
    figures = run_stopped(made, requests, requests[150].at_s)
    assert figures.requests == 150
    assert figures.all_empty < figures.all_with_cold
    assert figures.all_with_cold == pytest.approx(figures.all_going_on, abs=0.03)


@pytest.mark.parametrize(("field", "value"), [("nodes", 0), ("requests", 0), ("late_ms", -1.0)])
def test_arguments_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field):
        ColdArguments(**{field: value})  # type: ignore[arg-type]


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(300)
def test_daemons_find_what_others_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cold, "WARM", 40)
    arguments = ColdArguments(requests=20, late_ms=5.0, directory=tmp_path, json_file=tmp_path / "cold.json")
    result = run_cold(arguments, Console(quiet=True))
    by_end = {run.end: run for run in result.runs}
    assert list(by_end) == list(cold.ENDS)
    assert result.wrong_bytes == 0
    assert by_end["stopped"].cold_segments > by_end["empty"].cold_segments
    assert by_end["stopped"].hit_rate_after > by_end["empty"].hit_rate_after
    for run in result.runs:
        assert run.written_bytes > 0
        assert run.hit_rate_after <= run.ideal_after
