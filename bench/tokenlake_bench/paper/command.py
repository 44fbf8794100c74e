"""`tokenlake bench paper`: goodput, throughput, hits and spread of load of each system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.paper.fleets import FLEETS, Run, runs_named
from tokenlake_bench.paper.workloads import WORKLOADS
from tokenlake_bench.report import format_bytes, format_duration, format_share, output, table, write_json
from tokenlake_bench.routing import FleetOptions, SystemRow, at_rate
from tokenlake_bench.simulation.goodput import SHARE, STEP, highest_rate


@dataclass(frozen=True, kw_only=True)
class PaperArguments:
    """Arguments of the command. `rate`: the only rate to simulate, None to search. Raises ConfigurationError for a
    value out of range."""

    workload: str = "loogle"
    fleet: str = "paper"
    systems: str = "all"
    requests: int = 1000
    capacity_tokens: int | None = None
    rate: float | None = None
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name, known in (("workload", list(WORKLOADS)), ("fleet", list(FLEETS))):
            if (value := getattr(self, name)) not in known:
                raise ConfigurationError(name, value, " or ".join(known))
        if self.requests < 2:
            raise ConfigurationError("requests", self.requests, "at least 2")


class PaperRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one system. `goodput`: requests per second; `throughput`: the highest rate at which the mean time to
    the first token is at most that of the first system at its own goodput; both 0 where there is no such rate. `same`:
    the row at the first system's goodput, or at the only rate."""

    goodput: float
    throughput: float
    same: SystemRow


class PaperResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench paper`. `rate`: that of `same` in the rows."""

    workload: str
    fleet: str
    requests: int
    seed: int
    capacity_tokens: int
    rate: float
    rows: dict[str, PaperRow]
    complete: bool


class Measured:
    """One system on one workload, simulated at the rates that a search asks for, each of them once."""

    def __init__(self, accesses: Accesses, run: Run, fleet: FleetOptions) -> None:
        self._accesses = accesses
        self._run = run
        self._fleet = fleet
        self._own_rate = len(accesses.prompts) / accesses.prompts[-1].at_s
        self._rows: dict[int, SystemRow] = {}

    def rate(self, step: int) -> float:
        """Requests per second of a step of the search."""
        return self._own_rate * STEP**step

    def row(self, step: int) -> SystemRow:
        """The row of the system at a step."""
        if step not in self._rows:
            self._rows[step] = self.at(self.rate(step))
        return self._rows[step]

    def at(self, rate: float) -> SystemRow:
        """The row of the system at a rate."""
        return self._run(at_rate(self._accesses, rate), self._fleet)

    def goodput(self, start: int) -> int | None:
        """Step of the highest rate at which enough requests meet their objective."""
        return highest_rate(lambda step: self.row(step).slo_attainment, start)

    def throughput(self, start: int, ttft_ms: float) -> int | None:
        """Step of the highest rate at which the mean time to the first token is at most `ttft_ms`."""
        return highest_rate(lambda step: float(self.row(step).ttft_mean_ms <= ttft_ms), start)


class Study:
    """The comparison, with the results that are finished so far."""

    def __init__(self, arguments: PaperArguments, console: Console) -> None:
        self._arguments = arguments
        self._console = console
        shape = FLEETS[arguments.fleet]
        self._runs = runs_named(arguments.systems, shape)
        self._fleet = shape.options(arguments.capacity_tokens, arguments.seed)
        self._accesses = WORKLOADS[arguments.workload](arguments.requests, arguments.seed)
        self._rate = arguments.rate or 0.0
        self._rows: dict[str, PaperRow] = {}

    def run(self) -> PaperResult:
        """Simulate every system in turn, write the JSON file after each and print the table. KeyboardInterrupt ends
        the comparison and keeps the finished results."""
        complete = False
        try:
            if self._arguments.rate is None:
                self._search()
            else:
                for name, run in self._runs.items():
                    self._done(name, PaperRow(goodput=0, throughput=0, same=self._measured(run).at(self._rate)))
            complete = True
        except KeyboardInterrupt:
            self._console.print("interrupted: the results so far follow", soft_wrap=True)
        result = self._write(complete)
        self._console.print(table_of(result))
        return result

    def _search(self) -> None:
        step, limit_ms, first = 0, 0.0, None
        for name, run in self._runs.items():
            measured = self._measured(run)
            good = measured.goodput(step)
            if first is None:
                if good is None:
                    raise ConfigurationError("systems", name, "a first system that meets the objective at some rate")
                first = step = good
                limit_ms, self._rate = measured.row(good).ttft_mean_ms, measured.rate(good)
            through = measured.throughput(step if good is None else good, limit_ms)
            rates = [0.0 if at is None else measured.rate(at) for at in (good, through)]
            self._done(name, PaperRow(goodput=rates[0], throughput=rates[1], same=measured.row(first)))

    def _measured(self, run: Run) -> Measured:
        return Measured(self._accesses, run, self._fleet)

    def _done(self, name: str, row: PaperRow) -> None:
        self._rows[name] = row
        self._console.print(f"{name}: goodput {row.goodput:.2f}/s, throughput {row.throughput:.2f}/s", highlight=False)
        self._write(False)

    def _write(self, complete: bool) -> PaperResult:
        arguments = self._arguments
        result = PaperResult(
            workload=arguments.workload,
            fleet=arguments.fleet,
            requests=len(self._accesses.prompts),
            seed=arguments.seed,
            capacity_tokens=self._fleet.capacity_tokens,
            rate=self._rate,
            rows=dict(self._rows),
            complete=complete,
        )
        write_json(result, arguments.json_file)
        return result


def table_of(result: PaperResult) -> Table:
    """The result as a table for a terminal."""
    head = ("system", "goodput/s", "equal TTFT/s", "hits", "in SLO", "TTFT", "busy", "load CV", "moved")
    rows = [
        (
            name,
            f"{row.goodput:.2f}",
            f"{row.throughput:.2f}",
            format_share(row.same.token_hit_rate),
            format_share(row.same.slo_attainment),
            format_duration(row.same.ttft_mean_ms / 1e3),
            format_share(row.same.busy_share),
            f"{row.same.busy_cv:.2f}",
            format_bytes(row.same.bytes_moved),
        )
        for name, row in result.rows.items()
    ]
    title = f"{result.workload}, fleet {result.fleet}: {result.requests:,} requests, {result.capacity_tokens:,} tokens"
    return table(title, head, rows, f"goodput: {SHARE:.0%} in SLO; from hits on: at {result.rate:.2f} requests/s")


def run_paper(arguments: PaperArguments) -> bool:
    """Run the command. Returns False where it was interrupted. Raises TokenLakeError."""
    return Study(arguments, output()).run().complete
