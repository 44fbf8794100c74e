"""The command `bench transfer`: measures the systems alternately, then writes tables and JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import output, write_json
from tokenlake_bench.transfer.base import SIZES, RowKind, Size, System
from tokenlake_bench.transfer.ceilings import Ceilings
from tokenlake_bench.transfer.peers import PEERS, PeerProcess
from tokenlake_bench.transfer.pool_rows import PoolRows
from tokenlake_bench.transfer.results import Comparison, Row, compare, comparison_table, row_of, row_table
from tokenlake_bench.transfer.windows import Windows

WARM_TURNS = 1
"""Number of repetitions at the beginning that warm up and are not counted."""
REST_S = 0.05
"""Seconds of pause before each measured call. This process has used processor time to compare bytes, and a peer's
process has waited: with few processors the scheduler would, without the pause, delay this process while the clock
runs."""

Taken = dict[str, dict[str, list[float]]]
"""Measured seconds of calls, by system and kind of call."""


@dataclass(frozen=True, kw_only=True)
class TransferArguments:
    """Arguments of the command. Raises ConfigurationError for a value out of range."""

    against: str = ""
    sizes: str = "1MiB,32MiB"
    rounds: int = 30
    peer_python: Path | None = None
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name in self.peers():
            if name not in PEERS:
                raise ConfigurationError("against", name, f"names among {', '.join(PEERS)}")
        for label in self.sizes.split(","):
            if label not in {size.label for size in SIZES}:
                raise ConfigurationError("sizes", label, f"sizes among {', '.join(size.label for size in SIZES)}")
        if self.rounds < 1:
            raise ConfigurationError("rounds", self.rounds, "at least 1")

    def peers(self) -> list[str]:
        """Names of the peers (other stores) to measure."""
        return [name for name in self.against.split(",") if name]


@dataclass
class TransferResult:
    """The rows are the JSON of `bench transfer`. `failures`: reasons why peers could not be measured, by peer and
    segment size."""

    rows: list[Row] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def run_transfer(arguments: TransferArguments) -> TransferResult:
    """Run the benchmark, print its tables, and write the file that the command line names. Raises TokenLakeError."""
    console = output()
    result = TransferResult()
    for size in SIZES:
        if size.label in arguments.sizes.split(","):
            _run_size(size, arguments, result)
    console.print(row_table(result.rows))
    if result.comparisons:
        console.print(comparison_table(result.comparisons))
    for name, reason in result.failures.items():
        console.print(f"{name} did not run: {reason}", soft_wrap=True, style="bold red", markup=False)
    write_json(result.rows, arguments.json_file)
    return result


def _run_size(size: Size, arguments: TransferArguments, result: TransferResult) -> None:
    """Measure the pool alternately with each peer, or alone if no peer runs."""
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: list[Row] = []
    ceilings: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        windows = Windows(size)
        machine = stack.enter_context(closing(Ceilings(windows)))
        pool = stack.enter_context(closing(PoolRows(size, windows)))

        def run(title: str, *others: System) -> Taken:
            with LiveProgress(f"{size.label}, {title}", arguments.rounds + WARM_TURNS) as progress:
                taken = take_turns(
                    size.rows(), machine, (pool, *others), arguments.rounds, lambda turn: progress.update(turn, "")
                )
            for sums, system in ((ceilings, machine), (ours, pool)):
                for row, seconds in taken[system.name].items():
                    sums[row] += seconds
            return taken

        for mode in [mode for name in arguments.peers() for mode in PEERS[name]]:
            try:
                with closing(PeerProcess(mode, size, arguments.peer_python)) as peer:
                    taken = run(f"with {mode}", peer)
            except Unreachable as error:
                result.failures[f"{mode}, {size.label}"] = str(error)
                continue
            for kind in size.rows():
                result.comparisons += compare(kind, taken[pool.name], mode, taken[mode])
                if kind.name in taken[mode]:
                    theirs.append(row_of(kind, taken[mode][kind.name], taken[machine.name], mode))
        if not ours:
            run("the pool alone")
    result.rows += [row_of(kind, ours[kind.name], ceilings) for kind in size.rows()]
    result.rows += theirs


def take_turns(
    kinds: Sequence[RowKind], machine: System, systems: Sequence[System], rounds: int, report: Callable[[int], None]
) -> Taken:
    """Measure each kind of call of each system once per repetition, and before each call whose rate has a bound the
    machine's own copy or transfer. The order of the systems alternates, so that no system always finds the processor's
    caches as the same other system left them. The first repetitions warm up and are not counted."""
    taken: Taken = {system.name: defaultdict(list) for system in (machine, *systems)}
    for turn in range(rounds + WARM_TURNS):
        order = systems if turn % 2 else systems[::-1]
        for kind in kinds:
            samples: list[tuple[System, str]] = [(machine, kind.ceiling)] if kind.ceiling is not None else []
            samples += [(system, kind.name) for system in order if kind.name in system.rows()]
            for system, row in samples:
                time.sleep(REST_S)
                seconds = system.sample(row, turn)
                if turn >= WARM_TURNS:
                    taken[system.name][row] += seconds
        report(turn + 1)
    return taken
