"""Simulations of the systems that the pool is compared with, which have the same memory and engine model as the pool:
routers, caches, instances (`docs/simulation.md`)."""

from tokenlake_bench.routing.fleet_run import FleetOptions, at_rate
from tokenlake_bench.routing.outcome import Answered, SystemRow, row_of
from tokenlake_bench.routing.run import run_system
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
