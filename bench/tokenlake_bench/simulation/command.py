"""`bench cache-hit` in the mode simulate: a workload through the pool and the systems that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.cache_hit import ROUND_ROBIN, CacheHitArguments
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import output, table, write_json
from tokenlake_bench.routing import SystemRow, run_system
from tokenlake_bench.simulation.arrivals import accesses_of
from tokenlake_bench.simulation.goodput import SHARE, search
from tokenlake_bench.simulation.results import SimulatedResult, figures_of, pool_table, systems_table
from tokenlake_bench.simulation.stopped import StopFigures, run_stopped, stop_table


@dataclass(eq=False)
class Study:
    """One run of the comparison, with the results that are finished so far."""

    arguments: CacheHitArguments
    console: Console
    rows: dict[str, SystemRow] = field(default_factory=dict)
    figures: dict[str, Any] | None = None
    """Those of the first form of the pool."""
    flash: tuple[float, int] | None = None
    stop: StopFigures | None = None
    complete: bool = False

    def run(self) -> SimulatedResult | None:
        """Simulate every system in turn, print the tables, and write the JSON file after every system.
        KeyboardInterrupt ends the comparison and keeps the finished results. Returns None where no request was
        finished. Raises TokenLakeError."""
        arguments = self.arguments
        engine, pools, systems = arguments.engine(), arguments.pool_systems(), arguments.systems()
        fleet = arguments.fleet(engine)
        fleet.capacity(arguments.size[1])
        name, arrivals = arguments.arrivals()
        stop_at = arguments.stop_at
        if stop_at is not None and not arrivals[0].at_s < stop_at <= arrivals[-1].at_s:
            raise ConfigurationError("stop_at", stop_at, f"a second of the workload, at most {arrivals[-1].at_s:.0f}")
        if arguments.trace is None:
            self.console.print("no --trace: simulating the built-in workload")
        try:
            for pool in pools:
                run = arguments.run_of(pool)
                if arguments.route == ROUND_ROBIN:
                    run.route = run.round_robin
                try:
                    with LiveProgress(pool.name, len(arrivals)) as bar:
                        run.run(arrivals, lambda done, bar=bar: bar.update(done, ""))  # type: ignore[misc]
                finally:
                    if run.answers:
                        if self.figures is None:
                            self.figures = figures_of(run)
                            if arguments.flash_at is not None:
                                self.flash = run.simulation.cluster.sent.busiest(arguments.flash_at)
                        self._done(pool.name, run.row())
            accesses = accesses_of(arrivals, arguments.size[1])
            for system in systems:
                with LiveProgress(system.name, len(arrivals)) as bar:
                    row = run_system(accesses, system, fleet, lambda done, bar=bar: bar.update(done, ""))  # type: ignore[misc]
                self._done(system.name, row)
            if arguments.stop_at is not None:
                self.stop = run_stopped(partial(arguments.run_of, pools[0]), arrivals, arguments.stop_at)
            self.complete = True
        except KeyboardInterrupt:
            self.console.print("interrupted: the results so far follow", soft_wrap=True)
        result = self._write()
        if result is not None:
            self.console.print(systems_table(result))
            self.console.print(pool_table(result, name))
            if result.stop is not None:
                self.console.print(stop_table(result.stop))
        return result

    def _done(self, name: str, row: SystemRow) -> None:
        self.rows[name] = row
        self._write()

    def _write(self) -> SimulatedResult | None:
        """The result of the systems that are finished, which is written; None before the first request of the pool is
        done."""
        if self.figures is None:
            return None
        result = SimulatedResult(
            **self.figures,
            systems=dict(self.rows),
            engine_cache_tokens=self.arguments.engine_cache_tokens,
            disk_tokens=self.arguments.disk_tokens,
            flash_busiest=self.flash,
            cold_tokens=self.arguments.cold_tokens,
            stop=self.stop,
            complete=self.complete,
        )
        write_json(result, self.arguments.json_file)
        return result


def run_simulate(arguments: CacheHitArguments) -> bool:
    """Run the comparison, or the search for the goodput. Returns False when the comparison was interrupted. Raises
    TokenLakeError."""
    console = output()
    if arguments.goodput:
        found = search(arguments, console.print)
        title = f"{found.requests:,} requests, {found.nodes} nodes: most requests/s with {SHARE:.0%} within objective"
        console.print(table(title, (), [(name, f"{rate:.2f}") for name, rate in found.rates.items()]))
        return True
    result = Study(arguments, console).run()
    return result is not None and result.complete
