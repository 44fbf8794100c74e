"""Balance with the hot set off and on, in steady traffic and in a flash crowd.

python -m tokenlake_bench.simulation.hot --trace TRACE --nodes 64 --hot off,on --json FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.balance import WINDOW_S
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import write_json
from tokenlake_bench.simulation.arrivals import Arrival, arrivals_of, flash_crowd, merged
from tokenlake_bench.simulation.meter import WindowLoad
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.run import Measured, Simulation, Totals
from tokenlake_bench.traces import read_mooncake

__all__ = ["HotArguments", "HotResult", "HotRow", "main", "run_hot"]

MODES = ("off", "observe", "on")
SEGMENT_TOKENS = 512
TRACE_NODES = 8
"""The trace is the load of this many nodes."""
JITTER_S = 3.0
"""Traces round their times to multiples of this many seconds; an even delay up to it spreads the requests again."""
PREFILL_TOKENS_PER_S = 20_000.0
"""Prefill speed of an engine, so that a segment that many engines request at once is in flight for some time."""


@dataclass(frozen=True, kw_only=True)
class HotArguments:
    """Arguments of the command line; seconds are those of the workload. `rate`: requests per node, as a multiple of the
    trace's on `TRACE_NODES`. Raises ConfigurationError for a value out of range."""

    trace: Path
    nodes: int = 64
    node_tokens: int = 375_000
    rate: float = 1.0
    hot: tuple[str, ...] = ("off", "on")
    warm_s: float = 120.0
    steady_s: float = 180.0
    crowd_s: float = 60.0
    load_delay_s: float = 1.0
    gossip_s: float = 1.0
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for field in ("warm_s", "steady_s", "crowd_s"):
            value = getattr(self, field)
            if value < 0 or value % WINDOW_S:
                raise ConfigurationError(field, value, f"a multiple of {WINDOW_S:g} seconds, at least 0")
        if not self.steady_s:
            raise ConfigurationError("steady_s", self.steady_s, f"at least {WINDOW_S:g} seconds")
        for mode in self.hot:
            if mode not in MODES:
                raise ConfigurationError("hot", mode, f"names among {', '.join(MODES)}")
        if not 0 < self.rate < 1000:
            raise ConfigurationError("rate", self.rate, "above 0 and below 1000")
        if self.nodes < 1:
            raise ConfigurationError("nodes", self.nodes, "at least 1")

    @property
    def crowd_from_s(self) -> float:
        """When the flash crowd begins."""
        return self.warm_s + self.steady_s

    @property
    def ends_s(self) -> float:
        """When the run ends."""
        return self.crowd_from_s + self.crowd_s


class HotRow(msgspec.Struct, frozen=True, kw_only=True):
    """The run with one mode of the hot set. `crowd`: the windows of the flash crowd, in order."""

    hot: str
    steady: Measured
    crowd: list[Measured]
    windows: list[WindowLoad]
    totals: Totals


class HotResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of this command."""

    trace: str
    nodes: int
    node_tokens: int
    rate: float
    load_delay_s: float
    gossip_s: float
    seed: int
    rows: list[HotRow]


def workload(arguments: HotArguments, arrivals: list[Arrival]) -> Iterator[Arrival]:
    """As many copies of the trace as give each node the trace's load on `TRACE_NODES`; then the flash crowd."""
    many = merged(arrivals, max(1, round(arguments.rate * arguments.nodes / TRACE_NODES)))
    stream = flash_crowd(many, arguments.crowd_from_s, SEGMENT_TOKENS, arguments.seed)
    return takewhile(lambda arrival: arrival.at_s < arguments.ends_s, stream)


def run_hot(arguments: HotArguments, console: Console) -> HotResult:
    """Simulate each mode in turn. Raises TokenLakeError."""
    trace = read_mooncake(arguments.trace, seed=arguments.seed, jitter_s=JITTER_S)
    arrivals = arrivals_of(trace.accesses(SEGMENT_TOKENS))
    total = sum(1 for _ in workload(arguments, arrivals))
    rows: list[HotRow] = []
    for mode in arguments.hot:
        options = SimulationOptions(
            nodes=arguments.nodes,
            capacity_tokens=arguments.nodes * arguments.node_tokens,
            segment_tokens=SEGMENT_TOKENS,
            seed=arguments.seed,
            load_delay_s=arguments.load_delay_s,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            rules={"hot": mode, "gossip_s": arguments.gossip_s},
        )
        simulation = Simulation(options)
        with LiveProgress(console, f"hot {mode}", total) as bar:
            simulation.run(workload(arguments, arrivals), lambda done, bar=bar: bar.update(done, ""))  # type: ignore[misc]
        rows.append(_row(arguments, mode, simulation))
    return HotResult(
        trace=arguments.trace.name,
        nodes=arguments.nodes,
        node_tokens=arguments.node_tokens,
        rate=arguments.rate,
        load_delay_s=arguments.load_delay_s,
        gossip_s=arguments.gossip_s,
        seed=arguments.seed,
        rows=rows,
    )


def _row(arguments: HotArguments, mode: str, simulation: Simulation) -> HotRow:
    windows = int(arguments.crowd_s / WINDOW_S)
    starts = [arguments.crowd_from_s + WINDOW_S * number for number in range(windows)]
    return HotRow(
        hot=mode,
        steady=simulation.measure(arguments.warm_s, arguments.crowd_from_s),
        crowd=[simulation.measure(start, start + WINDOW_S) for start in starts],
        windows=simulation.windows(),
        totals=simulation.totals(),
    )


def table(result: HotResult) -> Table:
    """A table for a terminal."""
    title = f"{result.trace}: {result.nodes} nodes, rate {result.rate:g}, loads {result.load_delay_s:g} s late"
    caption = "at best: reads from the own node unchanged, all other reads as even as possible"
    shown = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    shown.add_column("")
    for row in result.rows:
        shown.add_column(f"hot {row.hot}", justify="right")
    for name, values in _lines(result.rows):
        shown.add_row(name, *values)
    return shown


def _lines(rows: list[HotRow]) -> Iterator[tuple[str, list[str]]]:
    steady = [row.steady for row in rows]
    yield "requests", [f"{row.totals.requests:,}" for row in rows]
    yield "token hit rate, steady", [f"{each.token_hit_rate:.1%}" for each in steady]
    yield "hits from another node", [f"{each.remote_share:.1%}" for each in steady]
    yield "load CV, steady (at best)", [f"{each.load_cv:.3f} ({each.load_cv_at_best:.3f})" for each in steady]
    yield "- by reading node", [f"{each.readers_cv:.3f}" for each in steady]
    yield "- floor", [f"{each.load_cv_floor:.3f}" for each in steady]
    yield "max / mean, steady (at best)", [_most(each) for each in steady]
    yield (
        "copies per node, steady (most)",
        [f"{each.replicas_per_node:.1f} ({each.most_replicas_on_a_node})" for each in steady],
    )
    yield "copies made per node and minute", [f"{each.replicas_made_per_node_minute:.2f}" for each in steady]
    for number in range(max((len(row.crowd) for row in rows), default=0)):
        window = [row.crowd[number] for row in rows]
        yield f"max / mean, crowd window {number + 1}", [_most(each) for each in window]
        yield "copies per node", [f"{each.replicas_per_node:.1f}" for each in window]
    yield "copies per segment at the end", [f"{row.totals.duplication:.3f}" for row in rows]
    yield "messages per request", [f"{row.totals.messages_per_request:.0f}" for row in rows]
    yield "processor time, s", [f"{row.totals.processor_s:.0f}" for row in rows]


def _most(each: Measured) -> str:
    return f"{each.load_max_over_mean:.2f} ({each.load_max_over_mean_at_best:.2f})"


@click.command()
@click.option(
    "--trace", required=True, type=click.Path(dir_okay=False, path_type=Path), help="A trace in Mooncake's format."
)
@click.option("--nodes", default=HotArguments.nodes, show_default=True)
@click.option("--node-tokens", default=HotArguments.node_tokens, show_default=True, help="Capacity of one node.")
@click.option(
    "--rate",
    default=HotArguments.rate,
    show_default=True,
    help="Load per node, as a multiple of the trace's on 8 nodes.",
)
@click.option("--hot", default=",".join(HotArguments.hot), show_default=True, help="Modes of the hot set, in turn.")
@click.option("--warm-s", default=HotArguments.warm_s, show_default=True, help="Warm-up, not measured.")
@click.option(
    "--steady-s", default=HotArguments.steady_s, show_default=True, help="Measured time before the flash crowd."
)
@click.option("--crowd-s", default=HotArguments.crowd_s, show_default=True, help="Length of the flash crowd.")
@click.option(
    "--load-delay-s", default=HotArguments.load_delay_s, show_default=True, help="Age of the loads that nodes report."
)
@click.option(
    "--gossip-s", default=HotArguments.gossip_s, show_default=True, help="Interval of the reports to each peer."
)
@click.option("--seed", default=HotArguments.seed, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here.")
def main(hot: str, **options: object) -> None:
    """Balance of a simulated pool under copies of a trace, then under a prefix that suddenly occurs in 30 % of the
    requests."""
    console = Console()
    try:
        arguments = HotArguments(hot=tuple(hot.split(",")), **options)  # type: ignore[arg-type]
        result = run_hot(arguments, console)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    console.print(table(result))
    if arguments.json_file is not None:
        write_json(result, arguments.json_file)


if __name__ == "__main__":
    sys.exit(main())
