"""Simulates one of the compared systems."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRun
from tokenlake_bench.routing.offload import OffloadRun
from tokenlake_bench.routing.outcome import SystemRow
from tokenlake_bench.routing.split import SplitRun
from tokenlake_bench.routing.systems import System


def run_system(
    accesses: Accesses,
    system: System,
    options: FleetOptions,
    progress: Callable[[int], None] = lambda done: None,
) -> SystemRow:
    """Simulate `system` on all requests; equal arguments give equal rows. `progress` is called with the number of
    requests sent so far. Raises ConfigurationError."""
    if options.instances < 1:
        raise ConfigurationError("nodes", options.instances, "at least 1")
    if not accesses.prompts:
        raise ConfigurationError("requests", 0, "at least one")
    if system.split is not None and options.engine_cache_tokens is not None:
        raise ConfigurationError("engine_cache_tokens", options.engine_cache_tokens, f"absent with {system.name}")
    if system.split is not None:
        return SplitRun(accesses, system, options).run(progress)
    run = FleetRun if options.engine_cache_tokens is None else OffloadRun
    return run(accesses, system, options).run(progress)
