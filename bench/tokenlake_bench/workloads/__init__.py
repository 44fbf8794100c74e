"""Synthetic workloads: generators of traces whose lengths, sharing of prefixes and skew are parameters
(`docs/simulation.md`)."""

from tokenlake_bench.workloads.arrivals import bursts, poisson, read_azure
from tokenlake_bench.workloads.base import TraceLine
from tokenlake_bench.workloads.registry import GENERATORS, generate, generator_named, settings_of
from tokenlake_bench.workloads.statistics import TraceStatistics, statistics_of

__all__ = [
    "GENERATORS",
    "TraceLine",
    "TraceStatistics",
    "bursts",
    "generate",
    "generator_named",
    "poisson",
    "read_azure",
    "settings_of",
    "statistics_of",
]
