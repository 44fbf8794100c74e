"""The fleets and the systems of the comparison. Every system has the same GPUs, and as much memory for caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.paper.in_place import InPlaceRun
from tokenlake_bench.routing import SYSTEMS, FleetOptions, SystemRow, run_system
from tokenlake_bench.routing.base import SGLANG
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.pooled import pool_options
from tokenlake_bench.simulation.pools import POOLS

EAGER: Final = 2
"""A balance threshold of the cache-aware router at which it leaves a cache for a shorter queue early."""


@dataclass(frozen=True, slots=True)
class FleetOfGpus:
    """Instances of a model on `gpus` GPUs each. `nvlink`: one NVLink domain connects all of them."""

    model: str
    gpu: str
    instances: int
    gpus: int
    nvlink: bool

    def options(self, capacity_tokens: int | None, seed: int) -> FleetOptions:
        """Options of the instances; `capacity_tokens`: None for what fits beside the weights of all of them."""
        engine = EngineModel(MODELS[self.model], GPUS[self.gpu], self.gpus)
        capacity = self.instances * engine.cache_tokens if capacity_tokens is None else capacity_tokens
        return FleetOptions(
            instances=self.instances,
            capacity_tokens=capacity,
            engine=engine,
            nvlink=self.nvlink,
            reference=engine,
            seed=seed,
        )


FLEETS: Final = {
    "paper": FleetOfGpus("llama-2-7b", "a100-80g", 4, 2, nvlink=True),
    "today": FleetOfGpus("llama-3-70b", "h100", 4, 4, nvlink=False),
}
Run = Callable[[Accesses, FleetOptions], SystemRow]
"""Function that simulates a system on a workload."""


def _compared(name: str, **settings: int) -> Run:
    changed = replace(SGLANG, **settings)
    return lambda accesses, fleet: run_system(accesses, SYSTEMS[name], replace(fleet, cache_aware=changed))


def _one_instance(accesses: Accesses, fleet: FleetOptions) -> SystemRow:
    engine = EngineModel(fleet.engine.model, fleet.engine.gpu, fleet.instances * fleet.engine.gpus)
    batch = fleet.instances * fleet.batch
    return run_system(accesses, SYSTEMS["round-robin-real"], replace(fleet, instances=1, engine=engine, batch=batch))


def _in_place(accesses: Accesses, fleet: FleetOptions) -> SystemRow:
    return InPlaceRun(accesses, fleet).run(lambda done: None)


def _pool(name: str) -> Run:
    def run(accesses: Accesses, fleet: FleetOptions) -> SystemRow:
        options = pool_options(
            fleet.engine,
            nodes=fleet.instances,
            capacity_tokens=fleet.capacity_tokens,
            segment_tokens=accesses.segment_tokens,
            seed=fleet.seed,
            nvlink=fleet.nvlink,
        )
        pool = POOLS[name].prepare(options, fleet.engine)
        pool.run(arrivals_of(accesses))
        return pool.row()

    return run


ONE_INSTANCE: Final = "one-instance"
RUNS: Final[dict[str, Run]] = {
    "cache-aware": _compared("cache-aware-real"),
    f"cache-aware-{EAGER}": _compared("cache-aware-real", balance_abs_threshold=EAGER),
    "pd-1p3d": _compared("pd-1p3d-real"),
    "pd-3p1d": _compared("pd-3p1d-real"),
    ONE_INSTANCE: _one_instance,
    "in-place": _in_place,
    "pool-planned": _pool("pool-planned-real"),
    "pool": _pool("pool-real"),
}
"""The systems by name, all of which count the memory of requests under way. `one-instance` is one instance of tensor
parallelism over all GPUs, which have to be one NVLink domain, with as large a batch as all instances together; `in-
place` is the model of the paper's system."""


def runs_named(names: str, fleet: FleetOfGpus) -> dict[str, Run]:
    """The systems of the comma-separated `names`, or all that the fleet can be, for `all`. Raises ConfigurationError
    for another name."""
    possible = [name for name in RUNS if name != ONE_INSTANCE or fleet.nvlink]
    chosen = possible if names == "all" else names.split(",")
    for name in chosen:
        if name not in possible:
            raise ConfigurationError("systems", name, "all, or names among " + ", ".join(possible))
    return {name: RUNS[name] for name in chosen}
