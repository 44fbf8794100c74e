"""The command `bench growth`: what a key costs with more keys in a call, more clients, more segments held."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenlake.config import format_size, parse_size
from tokenlake.errors import ConfigurationError
from tokenlake.identity import SegmentKey
from tokenlake_bench.growth_client import Matching
from tokenlake_bench.growth_daemons import GrowthDaemon, start_seconds, store
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration
from tokenlake_bench.transfer.windows import keys_of
from tokenlake_bench.transfer.worker import Worker

__all__ = ["GrowthArguments", "GrowthResult", "run_growth"]

KEYS: Final = (1, 128, 1024)
CLIENTS: Final = (1, 8, 64)
MIDDLE: Final = 128
"""Keys per call of the rows about something else."""
HELD: Final = 10_000
"""Segments of the daemon that the rows about something else ask."""
KEYS_PER_TURN: Final = 4096
"""Of each row in each turn."""
FEWEST_CALLS: Final = 4
CLIENT_CALLS: Final = 256
"""In a turn of the rows with several clients."""
GROWS: Final = 1.2
"""A ratio above it is more than what equal rows differ by here."""
MOST_CALLS: Final = 200
WARM_TURNS: Final = 1
FIXED_BYTES: Final = 200 << 20
PER_SEGMENT_BYTES: Final = 2 << 10
"""The design's bound of a daemon's memory beyond the arena."""


@dataclass(frozen=True, kw_only=True)
class GrowthArguments:
    """As on the command line."""

    rounds: int
    segments: str
    clients: str
    arenas: str
    json_file: Path | None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigurationError("rounds", self.rounds, "at least 1")
        for name in ("segments", "clients"):
            if not all(word.isdigit() and int(word) for word in getattr(self, name).split(",")):
                raise ConfigurationError(name, getattr(self, name), "numbers above 0, separated by commas")
        for word in self.arenas.split(",") if self.arenas else []:
            try:
                parse_size(word)
            except ValueError as error:
                raise ConfigurationError("arenas", word, str(error)) from None

    def numbers(self, name: str) -> list[int]:
        """Of `segments` or `clients`."""
        return [int(word) for word in getattr(self, name).split(",")]

    def sizes(self) -> list[int]:
        """Of the arenas, in bytes."""
        return [parse_size(word) for word in self.arenas.split(",") if word]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`p50_us` and `p99_us`: of one call. `us_per_key`: time that passed per key, all clients together;
    `daemon_us_per_key`: processor time of the daemon. The ratios are to the first row of the series."""

    series: str
    name: str
    p50_us: float
    p99_us: float
    us_per_key: float
    daemon_us_per_key: float
    ratio: float
    daemon_ratio: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident bytes of a daemon beyond the arena."""

    segments: int
    empty_bytes: float
    full_bytes: float
    allowed_bytes: float


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """From the start of the process until it serves."""

    arena_bytes: int
    seconds: float


class GrowthResult(msgspec.Struct, frozen=True):
    """The JSON of `tokenlake bench growth`."""

    rows: list[Row]
    memory: list[Memory]
    starts: list[Start]


@dataclass
class _Taken:
    """Of one row, over all counted turns: seconds of each call; per turn, seconds per key."""

    calls: list[float] = field(default_factory=list)
    per_key: list[float] = field(default_factory=list)
    daemon_per_key: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Kind:
    """A row. `run` makes the calls of a turn and returns the seconds of each; `keys` in each of them."""

    series: str
    name: str
    keys: int
    daemon: GrowthDaemon
    run: Callable[[], list[float]]


def run_growth(arguments: GrowthArguments) -> GrowthResult:
    """Runs, prints, writes the file that was asked for. Raises TokenLakeError."""
    console = Console()
    # Before anything else takes memory.
    starts = [Start(arena_bytes=size, seconds=start_seconds(size)) for size in arguments.sizes()]
    with ExitStack() as stack:
        numbers = sorted({*arguments.numbers("segments"), HELD})
        daemons = {number: stack.enter_context(closing(GrowthDaemon(number))) for number in numbers}
        rows = _measure(list(_matches(arguments, daemons, stack)), arguments.rounds, "matches", console)
        rows += _measure(list(_stores(arguments, daemons)), arguments.rounds, "stores", console)
        memory = [
            Memory(
                segments=number,
                empty_bytes=daemon.empty_bytes,
                full_bytes=daemon.full_bytes,
                allowed_bytes=FIXED_BYTES + PER_SEGMENT_BYTES * number,
            )
            for number, daemon in daemons.items()
        ]
    result = GrowthResult(rows, memory, starts)
    for table in _tables(result):
        console.print(table)
    if arguments.json_file is not None:
        arguments.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


def _matches(arguments: GrowthArguments, daemons: dict[int, GrowthDaemon], stack: ExitStack) -> Iterator[_Kind]:
    def matching(daemon: GrowthDaemon, keys: int) -> Callable[[], list[float]]:
        client = Matching(daemon.pool, daemon.segments, seed=1)
        return lambda: client.run(keys, _calls(keys))

    middle = daemons[HELD]
    for keys in KEYS:
        yield _Kind("match, keys per call", f"match_{keys}", keys, middle, matching(middle, keys))
    threads = ThreadPoolExecutor(max(arguments.numbers("clients")))
    stack.callback(threads.shutdown)
    workers: list[Worker] = []
    for clients in arguments.numbers("clients"):
        while len(workers) < clients:
            worker = Worker("tokenlake_bench.growth_client", str(middle.socket), str(HELD), str(len(workers)))
            workers.append(stack.enter_context(closing(worker)))
        run = partial(_together, threads, tuple(workers))
        yield _Kind("match, client processes", f"match_{MIDDLE}_by_{clients}", MIDDLE, middle, run)
    for number in arguments.numbers("segments"):
        daemon = daemons[number]
        yield _Kind("match, segments held", f"match_{MIDDLE}_of_{number}", MIDDLE, daemon, matching(daemon, MIDDLE))


def _stores(arguments: GrowthArguments, daemons: dict[int, GrowthDaemon]) -> Iterator[_Kind]:
    """Each call stores keys of its own and displaces as many: the daemons are full."""
    fresh = itertools.count()

    def storing(daemon: GrowthDaemon, keys: int) -> Callable[[], list[float]]:
        return lambda: [_store(daemon, keys_of("fresh", next(fresh), keys)) for _ in range(_calls(keys))]

    middle = daemons[HELD]
    for keys in KEYS:
        yield _Kind("store, keys per call", f"store_{keys}", keys, middle, storing(middle, keys))
    for number in arguments.numbers("segments"):
        yield _Kind(
            "store, segments held",
            f"store_{MIDDLE}_into_{number}",
            MIDDLE,
            daemons[number],
            storing(daemons[number], MIDDLE),
        )


def _calls(keys: int) -> int:
    return max(FEWEST_CALLS, min(MOST_CALLS, KEYS_PER_TURN // keys))


def _store(daemon: GrowthDaemon, keys: Sequence[SegmentKey]) -> float:
    began = time.perf_counter()
    store(daemon.pool, keys)
    return time.perf_counter() - began


def _together(threads: ThreadPoolExecutor, workers: Sequence[Worker]) -> list[float]:
    """As many calls in all, whatever the number of clients, but at least a few of each."""
    calls = max(FEWEST_CALLS, CLIENT_CALLS // len(workers))
    parts = threads.map(lambda worker: worker.call("run", keys=MIDDLE, calls=calls), workers)
    return [took for part in parts for took in part]


def _measure(kinds: Sequence[_Kind], rounds: int, title: str, console: Console) -> list[Row]:
    """All rows in turn, `rounds` times, so that what else this machine does meets all of them."""
    taken: dict[str, _Taken] = defaultdict(_Taken)
    with LiveProgress(console, title, rounds + WARM_TURNS) as progress:
        for turn in range(rounds + WARM_TURNS):
            for kind in kinds:
                used = kind.daemon.processor_s()
                began = time.perf_counter()
                calls = kind.run()
                passed, used = time.perf_counter() - began, kind.daemon.processor_s() - used
                if turn >= WARM_TURNS:
                    keys = kind.keys * len(calls)
                    taken[kind.name].calls += calls
                    taken[kind.name].per_key.append(passed / keys)
                    taken[kind.name].daemon_per_key.append(used / keys)
            progress.update(turn + 1, "")
    first: dict[str, tuple[float, float]] = {}
    return [_row(kind, taken[kind.name], first) for kind in kinds]


def _row(kind: _Kind, taken: _Taken, first: dict[str, tuple[float, float]]) -> Row:
    p50, p99 = np.quantile(taken.calls, (0.5, 0.99)).tolist()
    per_key, daemon_per_key = median(taken.per_key), median(taken.daemon_per_key)
    base, daemon_base = first.setdefault(kind.series, (per_key, daemon_per_key))
    return Row(
        series=kind.series,
        name=kind.name,
        p50_us=p50 * 1e6,
        p99_us=p99 * 1e6,
        us_per_key=per_key * 1e6,
        daemon_us_per_key=daemon_per_key * 1e6,
        ratio=per_key / base,
        daemon_ratio=daemon_per_key / daemon_base,
    )


def _tables(result: GrowthResult) -> Iterator[Table]:
    table = _table("per call and per key; ratios to the first row of the series", "row", "p50", "p99", *_PER_KEY)
    series = ""
    for row in result.rows:
        if row.series != series:
            table.add_section()
        series = row.series
        ratios = [_ratio(row.ratio), _ratio(row.daemon_ratio)]
        table.add_row(
            row.name,
            format_duration(row.p50_us / 1e6),
            format_duration(row.p99_us / 1e6),
            f"{row.us_per_key:.2f}",
            ratios[0],
            f"{row.daemon_us_per_key:.2f}",
            ratios[1],
        )
    yield table
    table = _table("memory of the daemon beyond the arena", "segments", "empty", "full", "per segment", "allowed")
    for memory in result.memory:
        table.add_row(
            f"{memory.segments:,}",
            format_bytes(memory.empty_bytes),
            format_bytes(memory.full_bytes),
            format_bytes((memory.full_bytes - memory.empty_bytes) / memory.segments),
            Text(format_bytes(memory.allowed_bytes), style=_style(memory.full_bytes <= memory.allowed_bytes)),
        )
    yield table
    if result.starts:
        table = _table("from the start of the process until it serves", "arena", "time", "per GiB")
        for start in result.starts:
            per_gib = start.seconds / start.arena_bytes * (1 << 30)
            table.add_row(format_size(start.arena_bytes), format_duration(start.seconds), format_duration(per_gib))
        yield table


_PER_KEY = ("us/key", "ratio", "daemon us/key", "ratio")


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _ratio(value: float) -> Text:
    return Text(f"{value:.2f}", style=_style(value <= GROWS))


def _style(good: bool) -> str:
    return "green" if good else "bold red"
