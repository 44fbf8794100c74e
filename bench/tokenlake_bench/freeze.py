"""`python -m tokenlake_bench.freeze`: what the rules achieve in the simulator, as a table that compares two trees.

Equal rules give equal tables, to the last byte and message."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.table import Table

from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.report import format_bytes, format_share, output
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cluster import Send, SimulatedCluster
from tokenlake_bench.simulation.engine import RequestOutcome
from tokenlake_bench.simulation.pooled import PooledRun
from tokenlake_bench.simulation.pools import POOL_PLANNED_REAL, POOLS

SEEDS: Final = (0, 1, 2)
TOKENS_PER_NODE: Final = 3_000_000 // 8
GPU_TOKENS: Final = 200_000
"""Length of the GPU cache of each instance in the cells with one."""
SKEWED_SHARE: Final = 0.8
"""Share of the requests that the router of the skewed cell sends to the first two nodes."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. `objective`: share of the requests within their objective, None where engines take no
    time. `messages`, `events`: of the whole run."""

    name: str
    seed: int
    hits: float
    objective: float | None
    moved_bytes: int
    messages: int
    events: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `shape`: named ways in which the run differs from a plain replay of the trace."""

    trace: Path
    seed: int
    nodes: int = 8
    limit: int = 2000
    shape: str = ""

    @property
    def name(self) -> str:
        """The name of the row, the same for all seeds."""
        return " ".join(filter(None, (_short(self.trace), str(self.nodes), self.shape)))

    def run(self) -> Cell:
        """Simulate the run."""
        return self._churn() if self.shape == "churn" else self._served()

    def _arguments(self) -> CacheHitArguments:
        more: dict[str, Any] = {
            "engine cache": {"engine_cache_tokens": GPU_TOKENS},
            "swarm": {"swarm": 16},
            "disk": {"disk_tokens": 4 * TOKENS_PER_NODE * self.nodes},
        }.get(self.shape, {})
        copies = self.nodes // 8
        return CacheHitArguments(
            trace=self.trace,
            nodes=self.nodes,
            capacity_tokens=TOKENS_PER_NODE * self.nodes,
            limit=self.limit // copies,
            copies=copies,
            seed=self.seed,
            **more,
        )

    def _served(self) -> Cell:
        arguments = self._arguments()
        run = arguments.run_of(POOLS[POOL_PLANNED_REAL])
        if self.shape == "skew":
            run.route = _skewed(run)
        run.run(arguments.arrivals()[1])
        row, cluster = run.row(), run.simulation.cluster
        return Cell(
            name=self.name,
            seed=self.seed,
            hits=row.token_hit_rate,
            objective=row.slo_attainment,
            moved_bytes=row.bytes_moved,
            messages=cluster.network.messages.total(),
            events=cluster.clock.scheduled,
        )

    def _churn(self) -> Cell:
        """Two nodes join, then two others drain, while engines that take no time serve the requests in turn."""
        arguments = self._arguments()
        options = arguments.options()
        tokens = hits = 0

        def finished(outcome: RequestOutcome) -> None:
            nonlocal tokens, hits
            tokens += outcome.arrival.tokens
            hits += outcome.hits

        cluster = SimulatedCluster(options, finished, joining=2)
        _, arrivals = arguments.arrivals()
        last_s = arrivals[-1].at_s
        changes: tuple[Callable[[], object], ...] = (
            cluster.add,
            cluster.add,
            partial(cluster.drain, 1),
            partial(cluster.drain, 2),
        )
        for number, change in enumerate(changes, 1):
            cluster.clock.at(cluster.clock.now + last_s * number / 5, lambda change=change: change())
        cluster.run(arrivals)
        return Cell(
            name=self.name,
            seed=self.seed,
            hits=hits * options.segment_tokens / tokens,
            objective=None,
            moved_bytes=cluster.network.nbytes,
            messages=cluster.network.messages.total(),
            events=cluster.clock.scheduled,
        )


def plans(traces: list[Path], limit: int) -> Iterator[Plan]:
    """All runs: every trace on 8 and 64 nodes, with and without GPU caches; the shapes on the first trace."""
    for seed in SEEDS:
        for trace in traces:
            for nodes in (8, 64):
                for shape in ("", "engine cache"):
                    yield Plan(trace=trace, seed=seed, nodes=nodes, limit=limit, shape=shape)
        for shape in ("swarm", "skew", "churn", "disk"):
            yield Plan(trace=traces[0], seed=seed, limit=limit, shape=shape)


def _skewed(run: PooledRun) -> Callable[[int, Arrival, Send], None]:
    def route(number: int, arrival: Arrival, send: Send) -> None:
        two = number % 10 < SKEWED_SHARE * 10
        send(number % 2 if two else 2 + number % (len(run.simulation.cluster.nodes) - 2))

    return route


def _short(trace: Path) -> str:
    return trace.name.split(".")[0][:24]


def _mean(cells: list[Cell], figure: str) -> float | None:
    values = [value for cell in cells if (value := getattr(cell, figure)) is not None]
    return statistics.fmean(values) if values else None


def table(cells: list[Cell], before: list[Cell]) -> Table:
    """A row for each kind of run with the means over its seeds, and those of `before` where it has the row."""
    shown = Table(title=f"means of {len(SEEDS)} seeds; before > now", title_justify="left")
    shown.add_column("run")
    for name in ("hits", "in objective", "moved", "messages"):
        shown.add_column(name, justify="right")
    for name in dict.fromkeys(cell.name for cell in cells):
        groups = [[cell for cell in each if cell.name == name] for each in (before, cells)]
        same = sorted(groups[0], key=lambda c: c.seed) == sorted(groups[1], key=lambda c: c.seed)

        def figure(of: str, show: Callable[[float], str], groups: list[list[Cell]] = groups) -> str:
            means = [mean for group in groups if (mean := _mean(group, of)) is not None]
            return " > ".join(dict.fromkeys(map(show, means))) or "-"

        shown.add_row(
            name + (" =" if same else ""),
            figure("hits", format_share),
            figure("objective", format_share),
            figure("moved_bytes", lambda value: format_bytes(int(value))),
            figure("messages", lambda value: f"{value / 1000:.0f}k"),
        )
    return shown


def _run(plan: Plan) -> Cell:
    return plan.run()


@click.command()
@click.option("--trace", "traces", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True)
@click.option("--limit", default=2000, show_default=True, help="Requests of each run.")
@click.option("--only", default="", help="Runs whose name has this text.")
@click.option("--processes", default=2, show_default=True)
@click.option("--before", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON of another tree.")
@click.option("--json", "json_file", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(traces: tuple[Path, ...], limit: int, only: str, processes: int, before: Path | None, json_file: Path) -> None:
    """Simulate all runs and print their table. A row that ends with = is the same to the last message."""
    chosen = [plan for plan in plans(list(traces), limit) if only in plan.name]
    earlier = [] if before is None else msgspec.json.decode(before.read_bytes(), type=list[Cell])
    with ProcessPoolExecutor(processes) as pool:
        cells = []
        for cell in pool.map(_run, chosen):
            cells.append(cell)
            json_file.write_text(json.dumps(msgspec.to_builtins(cells), indent=1) + "\n")
            click.echo(f"{len(cells)} of {len(chosen)}: {cell.name}, seed {cell.seed}", err=True)
    output().print(table(cells, earlier))


if __name__ == "__main__":
    main()
