"""Daemons and simulated nodes agree: the same rules, the same requests, one after the other."""

from __future__ import annotations

import pytest

from tokenlake_bench.baselines import intern_segments
from tokenlake_bench.live import PATIENT, LiveOptions, run_live
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.cluster import SimulationOptions
from tokenlake_bench.simulation.run import Simulation
from tokenlake_bench.sizing import bench_layout
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

pytestmark = pytest.mark.live


@pytest.mark.parametrize("nodes", [2, 3])
def test_hit_rate_within_a_point_and_bytes_moved_within_five_percent(nodes: int) -> None:
    workload, segment_tokens, capacity_tokens = builtin_workload(BuiltinSettings(requests=400)), 64, 24_000
    live = run_live(
        workload,
        LiveOptions(nodes=nodes, capacity_tokens=capacity_tokens, segment_tokens=segment_tokens),
        lambda log: None,
    )
    rules = {name.removesuffix("_ms") + "_s": int(value) / 1000 for name, value in PATIENT.items()}
    options = SimulationOptions(
        nodes=nodes,
        capacity_tokens=capacity_tokens,
        segment_tokens=segment_tokens,
        layout=bench_layout(segment_tokens),
        rules=rules,
    )
    simulation = Simulation(options)
    # What is evicted depends on ages: the requests come as fast as they came.
    gap_s = live.details.elapsed_s / len(workload)
    arrivals = arrivals_of(intern_segments(workload, segment_tokens))
    simulation.run(arrival._replace(at_s=number * gap_s) for number, arrival in enumerate(arrivals))
    measured, totals = simulation.measure(0.0, float("inf")), simulation.totals()
    print(live.result, measured, totals)
    assert measured.token_hit_rate == pytest.approx(live.result.token_hit_rate, abs=0.01)
    assert totals.bytes_moved == pytest.approx(live.result.bytes_moved, rel=0.05)
