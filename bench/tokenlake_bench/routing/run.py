"""Simulates one of the compared systems."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRun
from tokenlake_bench.routing.named_source import NamedSourceOffloadRun, NamedSourceRun
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
    return prepared(accesses, system, options).run(progress)


def prepared(accesses: Accesses, system: System, options: FleetOptions) -> FleetRun:
    """A run of `system` that has not begun. Raises ConfigurationError."""
    offload = options.engine_cache_tokens is not None
    if system.split is not None and offload:
        raise ConfigurationError("engine_cache_tokens", options.engine_cache_tokens, f"absent with {system.name}")
    if system.split is not None:
        return SplitRun(accesses, system, options)
    if system.view_age_s is not None:
        return (NamedSourceOffloadRun if offload else NamedSourceRun)(accesses, system, options)
    return (OffloadRun if offload else FleetRun)(accesses, system, options)
