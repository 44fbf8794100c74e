"""The command `bench eviction`: checks its arguments, runs the study of eviction policies, and writes tables, JSON and
a picture."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, intern_segments
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.eviction.picture import plot_study
from tokenlake_bench.eviction.policies import STUDIED
from tokenlake_bench.eviction.results import Ceiling, Cell, StudyResult, result_of
from tokenlake_bench.eviction.show import show
from tokenlake_bench.eviction.stores import slots_per_node
from tokenlake_bench.eviction.study import Plan, ceiling_of, run_cells
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import write_json
from tokenlake_bench.sessions import SessionTrace
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

TRACE_SEGMENT_TOKENS = 512
BUILTIN_SEGMENT_TOKENS = 64
TRACE_CAPACITIES = (1_000_000, 3_000_000, 10_000_000)
SESSION_CAPACITIES = (500_000, 1_000_000, 3_000_000)
BUILTIN_CAPACITIES = (12_000, 24_000, 48_000)


@dataclass(frozen=True, kw_only=True)
class EvictionArguments:
    """Arguments of the command `bench eviction`. Raises ConfigurationError for a value out of range."""

    traces: tuple[Path, ...] = ()
    capacity_tokens: str | None = None
    policies: str | None = None
    nodes: str = "1"
    hint_accuracy: float | None = None
    limit: int | None = None
    seed: int = 0
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        self.plan()
        self.capacities(())
        if self.hint_accuracy is not None and not 0 <= self.hint_accuracy <= 1:
            raise ConfigurationError("hint_accuracy", self.hint_accuracy, "0 to 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError("limit", self.limit, "at least 1")

    def plan(self) -> Plan:
        """The combinations of policies, numbers of nodes and hints that are run on each trace."""
        policies = list(STUDIED) if self.policies is None else self.policies.split(",")
        if unknown := [name for name in policies if name not in STUDIED]:
            raise ConfigurationError("policy", unknown[0], f"names among {', '.join(STUDIED)}, separated by commas")
        nodes = _numbers("nodes", self.nodes)
        return Plan(policies=policies, nodes=nodes, hint_accuracy=self.hint_accuracy, seed=self.seed)

    def capacities(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """The pool capacities in tokens that the command line names, else `default`."""
        return default if self.capacity_tokens is None else _numbers("capacity_tokens", self.capacity_tokens)

    def sources(self) -> list[_Source]:
        """The traces of the command line with the capacities to study, or the built-in workload if no trace is
        named."""
        if not self.traces:
            settings = BuiltinSettings(requests=self.limit or BuiltinSettings.requests, seed=self.seed)
            asked = intern_segments(builtin_workload(settings), BUILTIN_SEGMENT_TOKENS)
            return [_Source("built-in", asked, self.capacities(BUILTIN_CAPACITIES))]
        return [self._source(path) for path in self.traces]

    def _source(self, path: Path) -> _Source:
        trace = read_trace(path, limit=self.limit, seed=self.seed)
        capacities = self.capacities(SESSION_CAPACITIES if isinstance(trace, SessionTrace) else TRACE_CAPACITIES)
        return _Source(trace.name, trace.accesses(TRACE_SEGMENT_TOKENS), capacities, len(trace.malformed))


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    accesses: Accesses
    capacities: tuple[int, ...]
    malformed: int = 0


def run_eviction(arguments: EvictionArguments) -> StudyResult:
    """Run the study, print it, and write the files that the command line names; the JSON is written after every run.
    KeyboardInterrupt ends the study early and keeps the finished runs. Raises TokenLakeError."""
    check_plot(arguments.plot_file)
    console = Console()
    sources = arguments.sources()
    for source in sources:
        for nodes, capacity in itertools.product(arguments.plan().nodes, source.capacities):
            slots_per_node(source.accesses, nodes, capacity)
        if source.malformed:
            console.print(f"{source.name}: {source.malformed} malformed lines skipped")
    study = _Study(arguments, sources)
    complete = True
    try:
        study.run(console)
    except KeyboardInterrupt:
        complete = False
        console.print("interrupted: the remaining runs of the study were left out")
    result = study.result(complete)
    study.write(result)
    show(console, result)
    if arguments.plot_file is not None and result.cells:
        plot_study(result, arguments.plot_file)
    return result


class _Study:
    def __init__(self, arguments: EvictionArguments, sources: list[_Source]) -> None:
        self._arguments = arguments
        self._sources = sources
        self._plan = arguments.plan()
        self._ceilings: list[Ceiling] = []
        self._cells: list[Cell] = []
        self._done = 0

    def run(self, console: Console) -> None:
        """Run each policy at each capacity and number of nodes on each trace; after an interruption the finished runs
        are kept."""
        total = sum(len(each.accesses.prompts) * self._plan.cells(each.capacities) for each in self._sources)
        with LiveProgress(console, "serving", total) as progress:
            for source in self._sources:
                bounds = bounds_of(source.accesses)
                self._ceilings += [ceiling_of(source.name, bounds, capacity) for capacity in source.capacities]
                advance = partial(self._advance, progress, source.name)
                for cell in run_cells(source.name, source.accesses, source.capacities, self._plan, advance):
                    self._cells.append(cell)
                    self.write(self.result(complete=False))

    def _advance(self, progress: LiveProgress, name: str, prompts: int) -> None:
        self._done += prompts
        latest = f", last {self._cells[-1].policy} {self._cells[-1].hit_rate:.1%}" if self._cells else ""
        progress.update(self._done, name.split(".")[0] + latest)

    def result(self, complete: bool) -> StudyResult:
        """The result of the study from the runs that are finished."""
        return result_of(
            self._ceilings,
            self._cells,
            segment_tokens=self._sources[0].accesses.segment_tokens,
            hint_accuracy=self._plan.hint_accuracy,
            seed=self._plan.seed,
            complete=complete,
        )

    def write(self, result: StudyResult) -> None:
        """Write the JSON file, if the command line names one."""
        path = self._arguments.json_file
        if path is not None:
            write_json(result, path)


def _numbers(field: str, text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if not all(numbers):
        raise ConfigurationError(field, text, "numbers above 0, separated by commas")
    return numbers
