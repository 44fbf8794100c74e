"""The command `bench cache-hit`: its arguments in both modes, and the workload that they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import intern_segments
from tokenlake_bench.engine_model import EngineModel, gpus_named, model_named
from tokenlake_bench.routing import FleetOptions, System, at_rate, systems_named
from tokenlake_bench.routing.base import SGLANG
from tokenlake_bench.routing.instance import BATCH, CHUNK_TOKENS
from tokenlake_bench.sessions import SessionTrace
from tokenlake_bench.simulation.acts import ACTS, with_acts
from tokenlake_bench.simulation.arrivals import Arrival, accesses_of, arrivals_of, merged, with_flash, with_swarms
from tokenlake_bench.simulation.cold import LATENCY_S, RATE, ColdContent
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.pooled import POOL, POOL_REAL, PooledRun, pool_options
from tokenlake_bench.simulation.pools import POOLS, PoolSystem, pools_named
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.traces import MooncakeTrace
from tokenlake_bench.workload import BuiltinWorkload, Workload

TRACE_SIZE: Final = 3_000_000, 512
"""(capacity of the pool, length of a segment) in tokens. Published traces name blocks of 512 tokens, so smaller
segments would find no more hits."""
BUILTIN_SIZE: Final = 24_000, 64
"""The same for the built-in workload, whose conversations need more capacity, so that segments are evicted."""
MODEL, GPU, BASELINES = "llama-3-8b", "a100-80g", "cache-aware-perfect"
NONE: Final = "none"
LEAST_LOADED, ROUND_ROBIN = "least-loaded", "round-robin"
LEAST: Final = {
    **dict.fromkeys(("nodes", "limit", "copies", "swarm", "disk_tokens", "cold_tokens", "tensor_parallel"), 1),
    "balance_threshold": 0,
    "chunk_tokens": BATCH,
}
"""The smallest value of each argument that is a count: a forward pass has a token of each request of a batch."""
JITTER_S: Final = 3.0
"""Largest rounding in seconds of the times of known traces; a random delay up to it spreads the requests again."""
SIMULATED: Final = (
    *("engine_cache_tokens", "disk_tokens", "disk_writes_per_day", "cold_tokens", "cold_latency", "cold_rate"),
    *("cold_per_day", "stop_at", "route", "pools", "baselines", "model", "gpu"),
    *("tensor_parallel", "chunk_tokens", "balance_threshold", "nvlink"),
    *("rate", "copies", "swarm", "flash_at", "restart_every", "open_loop", "goodput"),
    *("acts", "acts_right"),
)
"""Arguments that need simulated engines."""


@dataclass(frozen=True, kw_only=True)
class CacheHitArguments:
    """Arguments of the command, those in `SIMULATED` for simulated engines alone. Capacities are those of the whole
    pool; `engine_cache_tokens` is the GPU cache of each instance, None where `capacity_tokens` is all memory for
    caches; `disk_tokens`: what the disks of all nodes hold, None for none; `cold_tokens`: what
    the cold tier holds, with `cold_latency` milliseconds until a read's first byte, `cold_rate` GB/s between each node
    and the tier, and `cold_per_day` bytes that each node may write per day; `stop_at`: second at which all nodes stop
    and others start with the cold tier alone. `rate`: requests per second of all
    copies together, None for the trace's own. `tensor_parallel`: number of GPUs of an instance, None for the fewest
    that the model needs. `chunk_tokens`: number of tokens that a forward pass computes at most.
    `balance_threshold`: the cache-aware router sends a request to the shortest queue where the queues differ by
    more requests. `nvlink`: instances are connected by NVLink in place of their network adapters.
    `copies`: so many copies of the trace run side by side, shifted, with shared templates. `swarm`: number of
    requests in each added swarm of parallel agents. `flash_at`: second from which a share of the requests has a new
    common prefix. `restart_every`: seconds from one restart of an engine to that of
    the next one in turn. `acts`: name of the acts (`simulation.acts`) that the requests carry, None for none;
    `acts_right`: the share of them that is right. `open_loop`: every request arrives at its recorded time.
    `goodput`: search the highest rate within the objective, in place of the comparison. `pools`: None for `pool`,
    and for `pool-real` where a compared system is real. Raises ConfigurationError for a value out of range."""

    mode: Literal["live", "simulate"] = "simulate"
    trace: Path | None = None
    nodes: int = 3
    capacity_tokens: int | None = None
    segment_tokens: int | None = None
    limit: int | None = None
    seed: int = 0
    engine_cache_tokens: int | None = None
    disk_tokens: int | None = None
    disk_writes_per_day: float | None = None
    cold_tokens: int | None = None
    cold_latency: float | None = None
    cold_rate: float | None = None
    cold_per_day: float | None = None
    stop_at: float | None = None
    route: str | None = None
    baselines: str | None = None
    pools: str | None = None
    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    chunk_tokens: int | None = None
    balance_threshold: int | None = None
    nvlink: bool = False
    rate: float | None = None
    copies: int | None = None
    swarm: int | None = None
    restart_every: float | None = None
    flash_at: float | None = None
    acts: str | None = None
    acts_right: float | None = None
    open_loop: bool = False
    goodput: bool = False
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name in SIMULATED if self.mode == "live" else ():
            if (value := getattr(self, name)) not in (None, False):
                raise ConfigurationError(name, value, "absent, or used with '--mode simulate'")
        if self.route not in (None, LEAST_LOADED, ROUND_ROBIN):
            raise ConfigurationError("route", self.route, f"{LEAST_LOADED} or {ROUND_ROBIN}")
        for name, unit in (("rate", "requests per second"), ("restart_every", "seconds")):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigurationError(name, value, f"a finite number of {unit} above 0")
        if self.flash_at is not None and not 0 <= self.flash_at < math.inf:
            raise ConfigurationError("flash_at", self.flash_at, "seconds of the workload, at least 0")
        if self.acts not in (None, *ACTS):
            raise ConfigurationError("acts", self.acts, f"one of {', '.join(ACTS)}")
        if self.acts_right is not None and not (self.acts and 0 <= self.acts_right <= 1):
            raise ConfigurationError("acts_right", self.acts_right, "a share from 0 to 1, beside 'acts'")
        if self.disk_writes_per_day is not None and not 0 <= self.disk_writes_per_day < math.inf:
            raise ConfigurationError("disk_writes_per_day", self.disk_writes_per_day, "a finite number, at least 0")
        for name in ("cold_latency", "cold_rate", "cold_per_day", "stop_at"):
            if (value := getattr(self, name)) is None:
                continue
            if self.cold_tokens is None:
                raise ConfigurationError(name, value, "absent, or beside 'cold_tokens'")
            if not (0 < value < math.inf or (value == 0 and name in ("cold_latency", "cold_per_day"))):
                raise ConfigurationError(name, value, "a finite number above 0, or 0 for a latency or no budget")
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigurationError(name, value, f"at least {least}")
        if self.engine_cache_tokens is not None:
            self.fleet(self.engine()).engine_cache_segments(self.size[1])

    @property
    def size(self) -> tuple[int, int]:
        """(capacity of the whole pool in tokens, length of a segment in tokens)."""
        capacity, segment = BUILTIN_SIZE if self.trace is None else TRACE_SIZE
        return (
            capacity if self.capacity_tokens is None else self.capacity_tokens,
            segment if self.segment_tokens is None else self.segment_tokens,
        )

    def workload(self) -> Workload:
        """The trace, or the built-in workload if none is named. Raises TraceError."""
        if self.trace is not None:
            return self._trace(0.0)
        return BuiltinWorkload(self.limit, self.seed)

    def _trace(self, jitter_s: float) -> MooncakeTrace | SessionTrace:
        assert self.trace is not None
        return read_trace(self.trace, limit=self.limit, seed=self.seed, jitter_s=jitter_s)

    # -- simulated engines

    def engine(self) -> EngineModel:
        """The engine model that gives the times of one instance."""
        model, (gpu, named) = model_named(self.model or MODEL), gpus_named(self.gpu or GPU)
        gpus = self.tensor_parallel or named
        if named not in (None, gpus):
            raise ConfigurationError("tensor_parallel", gpus, f"absent, or the {named} GPUs of '--gpu'")
        return EngineModel.fitting(model, gpu) if gpus is None else EngineModel(model, gpu, gpus)

    def options(self) -> SimulationOptions:
        """Options of the simulated pool."""
        rules: dict[str, float] = {}
        if self.disk_writes_per_day is not None:
            rules["disk_writes_per_day"] = self.disk_writes_per_day
        if self.cold_per_day is not None:
            rules["cold_bytes_per_day"] = self.cold_per_day
        return pool_options(
            self.engine(),
            nodes=self.nodes,
            capacity_tokens=self.size[0],
            segment_tokens=self.size[1],
            seed=self.seed,
            rules=rules,
            disk_tokens=self.disk_tokens or 0,
            cold_tokens=self.cold_tokens or 0,
            cold_latency_s=LATENCY_S if self.cold_latency is None else self.cold_latency / 1e3,
            cold_rate=RATE if self.cold_rate is None else self.cold_rate * 1e9,
            nvlink=self.nvlink,
        )

    def run_of(self, pool: PoolSystem, cold: ColdContent | None = None) -> PooledRun:
        """A run of one form of the pool. `cold`: the content of the cold tier; None: an empty one."""
        chunk_tokens = self.chunk_tokens or CHUNK_TOKENS
        run = pool.prepare(self.options(), self.engine(), self.engine_cache_tokens, chunk_tokens, cold)
        run.restart_every_s = self.restart_every
        return run

    def fleet(self, engine: EngineModel) -> FleetOptions:
        """Options of the systems with which the pool is compared."""
        threshold = self.balance_threshold
        settings = SGLANG if threshold is None else replace(SGLANG, balance_abs_threshold=threshold)
        return FleetOptions(
            instances=self.nodes,
            capacity_tokens=self.size[0],
            engine=engine,
            engine_cache_tokens=self.engine_cache_tokens,
            chunk_tokens=self.chunk_tokens or CHUNK_TOKENS,
            cache_aware=settings,
            nvlink=self.nvlink,
            restart_every_s=self.restart_every,
            seed=self.seed,
        )

    def systems(self) -> list[System]:
        """The systems with which the pool is compared."""
        return [] if self.baselines == NONE else systems_named(BASELINES if self.baselines is None else self.baselines)

    def pool_systems(self) -> list[PoolSystem]:
        """The forms of the pool that are simulated."""
        if self.pools is None:
            real = any(not system.perfect for system in self.systems())
            return [POOLS[POOL], POOLS[POOL_REAL]] if real else [POOLS[POOL]]
        chosen = pools_named(self.pools)
        if self.route is not None and any(pool.planned for pool in chosen):
            raise ConfigurationError("route", self.route, "absent where a pool is planned")
        return chosen

    def arrivals(self) -> tuple[str, list[Arrival]]:
        """(name of the workload, its requests for simulated engines). Raises TraceError."""
        segment_tokens = self.size[1]
        if self.trace is None:
            plain = self.workload()
            name, accesses = plain.name, intern_segments(plain, segment_tokens)
        else:
            trace = self._trace(JITTER_S)
            name, accesses = trace.name, trace.accesses(segment_tokens)
        # All times are shifted so that the first request arrives at time 0.
        start_s = accesses.prompts[0].at_s
        arrivals = [each._replace(at_s=each.at_s - start_s) for each in arrivals_of(accesses)]
        if self.open_loop:
            arrivals = [each.arrived(each.at_s) for each in arrivals]
        if self.copies is not None and self.copies > 1:
            arrivals = list(merged(arrivals, self.copies))
        if self.rate is not None:
            arrivals = arrivals_of(at_rate(accesses_of(arrivals, segment_tokens), self.rate))
        if self.flash_at is not None:
            arrivals = list(with_flash(arrivals, self.flash_at, segment_tokens, self.seed))
        if self.swarm is not None:
            arrivals = list(with_swarms(arrivals, self.swarm, segment_tokens, self.seed))
        if self.acts is not None:
            right = 1.0 if self.acts_right is None else self.acts_right
            arrivals = list(with_acts(arrivals, self.acts, right, self.seed))
        return name, arrivals


def run_cache_hit(arguments: CacheHitArguments) -> bool:
    """Run the command. Returns False where a simulation was interrupted. Raises TokenLakeError."""
    run: Callable[[CacheHitArguments], bool]
    if arguments.mode == "live":
        from tokenlake_bench.live import run_live as run
    else:
        from tokenlake_bench.simulation.command import run_simulate as run
    return run(arguments)
