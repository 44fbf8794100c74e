"""The command `bench growth`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from tokenlake.config import format_size, parse_size
from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.growth.daemons import GrowthDaemon, start_seconds
from tokenlake_bench.growth.results import GrowthResult, Memory, Start, tables
from tokenlake_bench.growth.rows import HELD, matches, measure, stores
from tokenlake_bench.report import write_json

FEWEST_SEGMENTS: Final = 200
"""Least number of segments that a daemon has room for. With fewer slots it would refuse a store of 128 keys, because of
`dirty_share`."""
FIXED_BYTES: Final = 200 << 20
PER_SEGMENT_BYTES: Final = 2 << 10
"""Bytes of memory that a daemon may need per segment in addition to the arena."""


@dataclass(frozen=True, kw_only=True)
class GrowthArguments:
    """Arguments of the command `bench growth`. Raises ConfigurationError for a value out of range."""

    rounds: int
    segments: str
    clients: str
    arenas: str
    json_file: Path | None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigurationError("rounds", self.rounds, "at least 1")
        for name, least in (("segments", FEWEST_SEGMENTS), ("clients", 1)):
            if not all(word.isdigit() and int(word) >= least for word in getattr(self, name).split(",")):
                raise ConfigurationError(name, getattr(self, name), f"numbers, at least {least}, separated by commas")
        for word in self.arenas.split(",") if self.arenas else []:
            try:
                parse_size(word)
            except ValueError as error:
                raise ConfigurationError("arenas", word, str(error)) from None

    def numbers(self, name: str) -> list[int]:
        """The numbers that the option `segments` or `clients` lists."""
        return [int(word) for word in getattr(self, name).split(",")]

    def sizes(self) -> list[int]:
        """Sizes in bytes of the arenas with which the start of a daemon is timed."""
        return [parse_size(word) for word in self.arenas.split(",") if word]


def run_growth(arguments: GrowthArguments) -> GrowthResult:
    """Run the benchmark, print its tables, and write the JSON file if the command line names one. Raises
    TokenLakeError."""
    console = Console()
    # The start of daemons is timed first, before the other daemons take memory.
    starts = _starts(arguments.sizes(), console)
    with ExitStack() as stack:
        numbers = sorted({*arguments.numbers("segments"), HELD})
        daemons = {number: stack.enter_context(closing(GrowthDaemon(number))) for number in numbers}
        segments, clients = arguments.numbers("segments"), arguments.numbers("clients")
        rows = measure(list(matches(daemons, segments, clients, stack)), arguments.rounds, "matches", console)
        rows += measure(list(stores(daemons, segments)), arguments.rounds, "stores", console)
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
    for table in tables(result):
        console.print(table)
    if arguments.json_file is not None:
        write_json(result, arguments.json_file)
    return result


def _starts(sizes: Sequence[int], console: Console) -> list[Start]:
    """Time the start of a daemon with each arena size for which this machine has free memory now. Returns a row per
    size."""
    starts = []
    for size in sizes:
        try:
            starts.append(Start(arena_bytes=size, seconds=start_seconds(size)))
        except Unreachable as error:
            console.print(f"{format_size(size)}: {error}", soft_wrap=True, markup=False)
    return starts
