"""The forms of the pool that can be simulated and compared, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.routing.instance import CHUNK_TOKENS
from tokenlake_bench.simulation.cached import CachedEngine
from tokenlake_bench.simulation.cold import ColdContent
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.planned import PlannedRoute
from tokenlake_bench.simulation.pooled import POOL, POOL_REAL, PooledEngine, PooledRun

POOL_PLANNED, POOL_PLANNED_REAL = "pool-planned", "pool-planned-real"


@dataclass(frozen=True, slots=True)
class PoolSystem:
    """One form of the pool. `counts_memory`: requests under way take memory from the pool, or from GPU caches.
    `planned`: the router sends a request where the planner expects it to start soonest; otherwise to the least loaded
    node."""

    name: str
    counts_memory: bool
    planned: bool

    def prepare(
        self,
        options: SimulationOptions,
        engine: EngineModel,
        engine_cache_tokens: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        cold: ColdContent | None = None,
    ) -> PooledRun:
        """A run of this form of the pool. `engine_cache_tokens`: each instance has a GPU cache of so many tokens, of
        which requests under way take memory in place of the pool. `cold`: as of `SimulatedCluster`."""
        instance = (
            PooledEngine
            if engine_cache_tokens is None
            else partial(CachedEngine, engine_cache_tokens=engine_cache_tokens)
        )
        run = PooledRun(
            options,
            engine,
            counts_memory=self.counts_memory,
            instance=instance,
            chunk_tokens=chunk_tokens,
            cold=cold,
        )
        if self.planned:
            run.route = PlannedRoute(run)
        return run


POOLS: Final[dict[str, PoolSystem]] = {
    system.name: system
    for system in (
        PoolSystem(POOL, counts_memory=False, planned=False),
        PoolSystem(POOL_REAL, counts_memory=True, planned=False),
        PoolSystem(POOL_PLANNED, counts_memory=False, planned=True),
        PoolSystem(POOL_PLANNED_REAL, counts_memory=True, planned=True),
    )
}


def pools_named(names: str) -> list[PoolSystem]:
    """The forms of the pool of the comma-separated `names`, or all forms for `all`. Raises ConfigurationError for a
    name that is not in `POOLS`."""
    chosen = list(POOLS) if names == "all" else names.split(",")
    for name in chosen:
        if name not in POOLS:
            raise ConfigurationError("pools", name, "all, or names among " + ", ".join(POOLS))
    return [POOLS[name] for name in chosen]
