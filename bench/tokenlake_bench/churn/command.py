"""The command `bench churn`: for each kind of change, rounds of a run with the change and a control run without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.churn.fleet import Change, Fleet
from tokenlake_bench.churn.load import FIXED_PROMPTS, LAYOUT, Engine, Workload
from tokenlake_bench.churn.picture import draw
from tokenlake_bench.churn.results import ChurnResult, Phases, Run, findable, keys_moved_ratio, median_of, p99_ms, rate
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share
from tokenlake_testing.etcd import etcd_version

CHANGES: Final[tuple[Change, ...]] = get_args(Change)
BEFORE_S: Final = 6.0
AFTER_S: Final = 6.0
SHOWN: Final = 5
"""Limit of the errors of a round that are shown."""


@dataclass(frozen=True, kw_only=True)
class ChurnArguments:
    """Arguments of the command `bench churn`. Raises ConfigurationError for a value out of range."""

    nodes: int
    changes: tuple[Change, ...]
    rounds: int
    rate: float
    change_s: float
    """A change counts as under way for at least so many seconds; what nodes tell each other is told within 5 s."""
    encrypt: bool
    seed: int
    json_file: Path | None
    plot_file: Path | None

    def __post_init__(self) -> None:
        if not 3 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "3 to 16")
        if self.rounds < 1:
            raise ConfigurationError("rounds", self.rounds, "at least 1")
        for name in ("rate", "change_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(name.replace("_", "-"), getattr(self, name), "a finite number above 0")
        if self.plot_file is not None:
            check_plot(self.plot_file)


def run_churn(arguments: ChurnArguments, console: Console | None = None) -> list[ChurnResult]:
    """Run all changes and print the table. Raises TokenLakeError: `Unreachable` if etcd is not installed, or a daemon
    does not reach the state that it should."""
    console = console or Console()
    if etcd_version() is None:
        raise Unreachable("etcd is not installed: a ring that changes needs it (Debian: apt-get install etcd-server)")
    results: list[ChurnResult] = []
    runs: list[tuple[str, Run]] = []
    total = 2 * arguments.rounds * len(arguments.changes)
    with LiveProgress(console, "churn", total) as progress:
        done = 0
        for change in arguments.changes:
            rounds: list[ChurnResult] = []
            for number in range(arguments.rounds):
                seed = arguments.seed + number
                result, run, control = _round(arguments, change, seed)
                rounds.append(result)
                done += 2
                for error in [*run.errors, *control.errors][:SHOWN]:
                    progress.say(f"{change}, round {number}: {error}")
                progress.update(done, f"{change}: found {format_share(result.findable_during)} during the change")
                if number == 0:
                    runs += [(change, run), (f"{change}, control", control)]
            results.append(median_of(rounds))
    console.print(table(results))
    if arguments.json_file is not None:
        arguments.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if arguments.plot_file is not None:
        draw(runs, arguments.plot_file)
    return results


def _round(arguments: ChurnArguments, change: Change, seed: int) -> tuple[ChurnResult, Run, Run]:
    names = [f"node{number}" for number in range(arguments.nodes)]
    # The node that changes sorts first or last by turns: the node whose name sorts first dials.
    stays = change in ("join", "etcd-down")
    subject = f"node{arguments.nodes}" if stays else names[seed % arguments.nodes]
    run, evicted = _run(arguments, change, names, subject, seed)
    control, _ = _run(arguments, None, names, subject, seed, run.phases.settled_s - run.phases.change_s)
    during = p99_ms(run.during())
    after = {"join": [*names, subject], "drain": [name for name in names if name != subject]}.get(change, names)
    result = ChurnResult(
        change=change,
        nodes=arguments.nodes,
        encrypt=arguments.encrypt,
        rounds=1,
        seed=arguments.seed,
        token_hit_rate_before=rate(run.before(), fixed=False),
        token_hit_rate_during=rate(run.during(), fixed=False),
        token_hit_rate_after=rate(run.after(), fixed=False),
        findable_during=findable(run.before(), run.during()),
        findable_after=findable(run.before(), run.after()),
        held_share=0.0 if stays else _share_of(names.index(subject), len(names)),
        directory_keys_moved_ratio=keys_moved_ratio(names, after),
        match_p99_ratio=during / (p99_ms(control.during()) or 1.0),
        match_p99_ms=during,
        change_s=run.phases.settled_s - run.phases.change_s,
        wrong_bytes=sum(each.wrong for each in [*run.requests, *control.requests]) * LAYOUT.segment_bytes,
        errors=len(run.errors) + len(control.errors),
        evicted=int(evicted),
    )
    return result, run, control


def _share_of(place: int, nodes: int) -> float:
    return len(range(place, FIXED_PROMPTS, nodes)) / FIXED_PROMPTS


def _run(
    arguments: ChurnArguments,
    change: Change | None,
    names: Sequence[str],
    subject: str,
    seed: int,
    change_s: float = 0.0,
) -> tuple[Run, float]:
    """One run of the load. `change`: None for the control run, whose phase of the change lasts `change_s`. Returns the
    run and the number of segments that were evicted."""
    workload = Workload(seed)
    with Fleet(list(names), encrypt=arguments.encrypt) as fleet:
        began = time.monotonic()
        engines = {name: Engine(fleet.nodes[name].socket, workload, arguments.rate, began) for name in names}
        for place, engine in enumerate(engines.values()):
            engine.store_fixed(range(place, FIXED_PROMPTS, len(names)))
        if change == "return":
            # What the node held is lost before the run; its engine starts with it again.
            fleet.begin("kill", subject)
            fleet.wait_connected()
        # The engine of a machine that leaves ends before its daemon does, in the control run as well.
        running = {name: engine for name, engine in engines.items() if name != subject}
        began = time.monotonic()
        for engine in running.values():
            engine.began = began
            engine.start()
        time.sleep(BEFORE_S)
        begin_s = time.monotonic() - began
        if change is not None:
            fleet.begin(change, subject)
            fleet.wait_settled(change, subject)
            change_s = max(arguments.change_s, time.monotonic() - began - begin_s)
        time.sleep(max(0.0, begin_s + change_s - (time.monotonic() - began)))
        if change is not None:
            fleet.end(change)
        settled_s = time.monotonic() - began
        time.sleep(AFTER_S)
        for engine in running.values():
            engine.stop()
        evicted = fleet.total("tokenlake_evicted_segments_total")
    requests = [request for engine in running.values() for request in engine.requests]
    errors = [error for engine in running.values() for error in engine.errors]
    return Run(requests, errors, Phases(begin_s, settled_s)), evicted


def table(results: Sequence[ChurnResult]) -> Table:
    """The table that the command prints: a column per kind of change."""
    title = f"{results[0].nodes} nodes, medians of {results[0].rounds} rounds"
    made = Table("", *(each.change for each in results), title=title)
    rows: dict[str, Callable[[ChurnResult], str]] = {
        "hits before": lambda each: format_share(each.token_hit_rate_before),
        "hits during the change": lambda each: format_share(each.token_hit_rate_during),
        "hits after": lambda each: format_share(each.token_hit_rate_after),
        "found during the change": lambda each: format_share(each.findable_during),
        "found after": lambda each: format_share(each.findable_after),
        "stored by the node": lambda each: format_share(each.held_share),
        "directory keys moved, x ideal": lambda each: _moved(each.directory_keys_moved_ratio),
        "match p99, x control": lambda each: f"{each.match_p99_ratio:.2f} ({each.match_p99_ms:.1f} ms)",
        "duration": lambda each: f"{each.change_s:.1f} s",
        "wrong bytes": lambda each: str(each.wrong_bytes),
        "errors": lambda each: str(each.errors),
    }
    for name, text in rows.items():
        made.add_row(name, *map(text, results))
    return made


def _moved(ratio: float | None) -> str:
    return "none" if ratio is None else f"{ratio:.2f}"
