"""Daemons and simulated nodes agree: the same rules, the same requests, one after the other."""

from __future__ import annotations

import pytest

from tokenlake_bench.baselines import intern_segments
from tokenlake_bench.cache_hit import CacheHitArguments, run_live
from tokenlake_bench.daemons import PATIENT
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.run import Simulation
from tokenlake_bench.sizing import bench_layout
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

pytestmark = pytest.mark.live

SPEED = 10.0
"""The eviction policy learns from the time between accesses, so that both must see the workload's own times."""


@pytest.mark.rest
def test_daemons_and_simulated_nodes_agree() -> None:
    """On this small pool the order of concurrent events, which a busy machine changes, decides some evictions: the hit
    rates may differ by 0.02, the bytes moved by 10 % and the coefficient of variation of the load by 0.05.
    docs/results/placement.md compares traces on larger pools."""
    workload, segment_tokens, capacity_tokens = builtin_workload(BuiltinSettings(requests=400)), 64, 24_000
    nodes = 2
    live = run_live(
        workload,
        CacheHitArguments(nodes=nodes, capacity_tokens=capacity_tokens, segment_tokens=segment_tokens, speed=SPEED),
        lambda log: None,
    )
    patience = {name.removesuffix("_ms") + "_s": int(value) / 1000 for name, value in PATIENT.items()}
    options = SimulationOptions(
        nodes=nodes,
        capacity_tokens=capacity_tokens,
        segment_tokens=segment_tokens,
        layout=bench_layout(segment_tokens),
        rules=patience,
    )
    simulation = Simulation(options)
    simulation.run(arrivals_of(intern_segments(workload, segment_tokens)))
    measured, totals = simulation.measure(), simulation.totals()
    print(live.result, measured, totals)
    assert measured.token_hit_rate == pytest.approx(live.result.token_hit_rate, abs=0.02)
    assert totals.bytes_moved == pytest.approx(live.result.bytes_moved, rel=0.1)
    assert measured.load.cv == pytest.approx(live.result.load_cv, abs=0.05)
