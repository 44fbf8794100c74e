"""The command `bench cache-hit --mode simulate`: simulates a workload through the pool and the systems that it is
compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, intern_segments
from tokenlake_bench.engine_model import EngineModel, gpu_named, model_named
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import write_json
from tokenlake_bench.routing import FleetOptions, System, SystemRow, at_rate, run_system, systems_named
from tokenlake_bench.simulation.arrivals import Arrival, accesses_of, arrivals_of, flash_crowd, merged, with_swarms
from tokenlake_bench.simulation.pooled import POOL, POOL_REAL, pool_options
from tokenlake_bench.simulation.pools import POOLS, PoolSystem, pools_named
from tokenlake_bench.simulation.results import PoolView, SimulatedResult, plot, pool_table, result_of, systems_table
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import passed_over
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

MODEL, GPU = "llama-3-8b", "a100-80g"
BASELINES = "cache-aware-perfect"
JITTER_S: Final = 3.0
"""Largest rounding in seconds of the times of known traces; a random delay up to it spreads the requests again."""
BUILTIN_SEGMENT_TOKENS, BUILTIN_CAPACITY_TOKENS = 64, 24_000
TRACE_SEGMENT_TOKENS, TRACE_CAPACITY_TOKENS = 512, 3_000_000
NONE = "none"
LEAST_LOADED, ROUND_ROBIN = "least-loaded", "round-robin"


@dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """Arguments of the command line. `engine_cache_tokens`: length of the GPU cache of each instance, None where
    `capacity_tokens` is all memory for caches. `disk_tokens`: tokens that the disks of all nodes hold, None for none;
    `disk_writes_per_day`: their budget of writes in the setting's unit, None for its default. `rate`: requests per
    second of all copies together, None for the trace's own. `copies`: so many copies of the trace run side by side,
    shifted, with shared templates. `swarm`: number of requests in each added swarm of parallel agents. `open_loop`:
    every request arrives at its recorded time. `pools`: None for `pool`, and for `pool-real` where a compared system is
    real. Raises ConfigurationError for a value out of range."""

    trace: Path | None = None
    nodes: int = 3
    capacity_tokens: int | None = None
    disk_tokens: int | None = None
    disk_writes_per_day: float | None = None
    disk_directory: Path | None = None
    engine_cache_tokens: int | None = None
    segment_tokens: int | None = None
    limit: int | None = None
    speed: float = 0.0
    route: str | None = None
    seed: int = 0
    flash_at: float | None = None
    shipped_deadlines: bool = False
    baselines: str | None = None
    pools: str | None = None
    model: str | None = None
    gpu: str | None = None
    rate: float | None = None
    copies: int | None = None
    swarm: int | None = None
    open_loop: bool = False
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        if self.speed:
            raise ConfigurationError("speed", self.speed, "0: simulated time passes as fast as it is computed")
        if self.shipped_deadlines:
            raise ConfigurationError(
                "shipped_deadlines", True, "absent: simulated nodes always have the shipped deadlines"
            )
        if self.disk_directory is not None:
            raise ConfigurationError("disk_directory", self.disk_directory, "absent: simulated disks have no files")
        if self.route not in (None, LEAST_LOADED, ROUND_ROBIN):
            raise ConfigurationError("route", self.route, f"{LEAST_LOADED} or {ROUND_ROBIN} when simulated")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigurationError("rate", self.rate, "a finite number of requests per second above 0")
        if self.flash_at is not None and not 0 <= self.flash_at < math.inf:
            raise ConfigurationError("flash_at", self.flash_at, "seconds of trace time, at least 0")
        if self.disk_writes_per_day is not None and not 0 <= self.disk_writes_per_day < math.inf:
            raise ConfigurationError("disk_writes_per_day", self.disk_writes_per_day, "a finite number, at least 0")
        for name in ("nodes", "limit", "copies", "swarm", "disk_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(name, value, "at least 1")
        if self.engine_cache_tokens is not None:
            self.fleet(self.engine()).engine_cache_segments(self.size[1])
        check_plot(self.plot_file)

    @property
    def size(self) -> tuple[int, int]:
        """(capacity of the whole pool in tokens, length of a segment in tokens)."""
        capacity = BUILTIN_CAPACITY_TOKENS if self.trace is None else TRACE_CAPACITY_TOKENS
        segment = BUILTIN_SEGMENT_TOKENS if self.trace is None else TRACE_SEGMENT_TOKENS
        return (
            capacity if self.capacity_tokens is None else self.capacity_tokens,
            segment if self.segment_tokens is None else self.segment_tokens,
        )

    def engine(self) -> EngineModel:
        """The engine model that gives the times of one instance."""
        return EngineModel.fitting(model_named(self.model or MODEL), gpu_named(self.gpu or GPU))

    def fleet(self, engine: EngineModel) -> FleetOptions:
        """Options of the systems with which the pool is compared."""
        return FleetOptions(
            instances=self.nodes,
            capacity_tokens=self.size[0],
            engine=engine,
            engine_cache_tokens=self.engine_cache_tokens,
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

    def workload(self, tell: Callable[[str], object]) -> tuple[str, list[Arrival]]:
        """(name of the workload, its requests). `tell` is called with a text about malformed lines."""
        segment_tokens = self.size[1]
        if self.trace is None:
            plain = builtin_workload(BuiltinSettings(requests=self.limit or BuiltinSettings.requests, seed=self.seed))
            name, accesses = plain.name, intern_segments(plain, segment_tokens)
        else:
            trace = read_trace(self.trace, limit=self.limit, seed=self.seed, jitter_s=JITTER_S)
            if note := passed_over(trace.malformed):
                tell(note)
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
        if self.swarm is not None:
            arrivals = list(with_swarms(arrivals, self.swarm, segment_tokens, self.seed))
        if self.flash_at is not None:
            arrivals = list(flash_crowd(arrivals, self.flash_at, segment_tokens, self.seed))
        return name, arrivals


@dataclass(eq=False)
class _Study:
    """One run of the comparison, with the results that are finished so far."""

    arguments: SimulateArguments
    engine: EngineModel
    pools: list[PoolSystem]
    systems: list[System]
    name: str
    arrivals: list[Arrival]
    console: Console
    rows: dict[str, SystemRow] = field(default_factory=dict)
    view: PoolView | None = None
    complete: bool = False

    def run(self) -> None:
        """Simulate every system in turn. KeyboardInterrupt ends the comparison and keeps the finished results."""
        try:
            for pool in self.pools:
                self._run_pool(pool)
            accesses = accesses_of(self.arrivals, self.arguments.size[1])
            for system in self.systems:
                self._run_other(system, accesses)
            self.complete = True
        except KeyboardInterrupt:
            self.console.print("interrupted: the results so far follow", soft_wrap=True)

    def _run_pool(self, pool: PoolSystem) -> None:
        arguments = self.arguments
        capacity_tokens, segment_tokens = arguments.size
        options = pool_options(
            self.engine,
            nodes=arguments.nodes,
            capacity_tokens=capacity_tokens,
            segment_tokens=segment_tokens,
            seed=arguments.seed,
            rules={}
            if arguments.disk_writes_per_day is None
            else {"disk_writes_per_day": arguments.disk_writes_per_day},
            disk_tokens=arguments.disk_tokens or 0,
        )
        run, own_route = pool.prepare(options, self.engine, arguments.engine_cache_tokens)
        route = run.round_robin if arguments.route == ROUND_ROBIN else own_route
        try:
            with LiveProgress(self.console, pool.name, len(self.arrivals)) as bar:
                run.run(self.arrivals, lambda done: bar.update(done, ""), route)
        finally:
            if run.answers and self.view is None:
                self.view = PoolView.of(run)
            if run.answers:
                self._done(pool.name, run.row())

    def _run_other(self, system: System, accesses: Accesses) -> None:
        options = self.arguments.fleet(self.engine)
        with LiveProgress(self.console, system.name, len(accesses.prompts)) as bar:
            self._done(system.name, run_system(accesses, system, options, lambda done: bar.update(done, "")))

    def _done(self, name: str, row: SystemRow) -> None:
        self.rows[name] = row
        self.write()

    def result(self) -> SimulatedResult | None:
        """The result of the systems that are finished; None before the first request of the pool is done."""
        if self.view is None:
            return None
        return result_of(
            self.view,
            self.rows,
            self.engine,
            engine_cache_tokens=self.arguments.engine_cache_tokens,
            disk_tokens=self.arguments.disk_tokens,
            flash_at=self.arguments.flash_at,
            complete=self.complete,
        )

    def write(self) -> None:
        """Write the results so far to the JSON file, if the command line names one and there are any."""
        if (result := self.result()) is not None:
            write_json(result, self.arguments.json_file)


def simulate(arguments: SimulateArguments, console: Console) -> tuple[SimulatedResult | None, PoolView | None]:
    """Run the comparison, print it, and write the JSON file after every system. Returns the result, or None where no
    request was finished. Raises TokenLakeError."""
    engine, pools, systems = arguments.engine(), arguments.pool_systems(), arguments.systems()
    name, arrivals = arguments.workload(console.print)
    if arguments.trace is None:
        console.print("no --trace: simulating the built-in workload")
    arguments.fleet(engine).capacity(arguments.size[1])
    study = _Study(arguments, engine, pools, systems, name, arrivals, console)
    study.run()
    study.write()
    result = study.result()
    if result is not None and study.view is not None:
        console.print(pool_table(result, study.view, name))
        console.print(systems_table(result))
    return result, study.view


def run_simulate(arguments: SimulateArguments) -> bool:
    """Run, print and write the comparison as `simulate` does, and draw the picture if the command line names one.
    Returns False when the run was interrupted."""
    result, view = simulate(arguments, Console())
    if arguments.plot_file is not None and result is not None and view is not None:
        plot(result, view, arguments.plot_file)
    return result is not None and result.complete
