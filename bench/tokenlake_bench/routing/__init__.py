"""The other systems, with equal memory and engine model: routers, caches, instances (`docs/simulation.md`)."""

from tokenlake_bench.routing.fleet_run import FleetOptions, at_rate, run_system
from tokenlake_bench.routing.outcome import Answered, SystemRow, row_of
from tokenlake_bench.routing.systems import SYSTEMS, System, systems_named

__all__ = [
    "SYSTEMS",
    "Answered",
    "FleetOptions",
    "System",
    "SystemRow",
    "at_rate",
    "row_of",
    "run_system",
    "systems_named",
]
