"""The command `bench attention`: measures attention calls over segments of the pool, each alternately with the
machine's fastest other way for the same work (ceiling), and writes a table and JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError
from tokenlake_bench.attention.base import Case, Row, row_of
from tokenlake_bench.report import format_duration, write_json

LEAST_TURNS = 5
MOST_TURNS = 200
WARM_TURNS = 1
"""Number of first repetitions of each measurement whose times are discarded, because they warm up caches and
threads."""
DTYPES = ("float32", "bfloat16")
OWNERS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """Arguments of the command `bench attention`. Raises ConfigurationError for a value out of range."""

    dtypes: str
    tokens: str
    queries: str
    seconds: float
    json_file: Path | None
    nodes: str = ""
    """Numbers of other nodes to whose query engines one attention call sends queries, such as "1,2,4"; one measurement
    per number. Empty: only attention in this process is measured, and no daemons are started."""
    processor_time: bool = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes.split(","):
            if dtype not in DTYPES:
                raise ConfigurationError("dtypes", dtype, f"names among {', '.join(DTYPES)}")
        if any(count % 256 for count in _numbers("tokens", self.tokens)):
            raise ConfigurationError("tokens", self.tokens, "multiples of 256, the tokens of a segment")
        _numbers("queries", self.queries)
        if not set(self._nodes()) <= set(OWNERS):
            raise ConfigurationError("nodes", self.nodes, f"numbers among {', '.join(map(str, OWNERS))}, or nothing")

    def cases(self) -> Iterator[Case]:
        """Yield the measurements in the order in which they run. A measurement must not be used after the next one was
        taken."""
        from tokenlake_bench.attention.local import local_cases

        yield from local_cases(
            self.dtypes.split(","),
            _numbers("tokens", self.tokens),
            _numbers("queries", self.queries),
            time.process_time if self.processor_time else time.perf_counter,
        )
        # `process_time` covers this process alone, so attention over segments of other nodes, which other processes
        # compute, is only measured in wall time.
        if self.nodes and not self.processor_time:
            from tokenlake_bench.attention.remote import remote_cases

            yield from remote_cases(
                self._nodes(), [count for count in _numbers("queries", self.queries) if count <= 16]
            )

    def _nodes(self) -> Sequence[int]:
        return _numbers("nodes", self.nodes) if self.nodes else ()


def run_attention(arguments: AttentionArguments) -> list[Row]:
    """Run the benchmark, print its table, write the JSON file if the command line names one, and return the rows.
    Raises TokenLakeError."""
    console = Console()
    rows = []
    for case in arguments.cases():
        row = take_turns(case, arguments.seconds)
        rows.append(row)
        console.print(f"{row.name}: {format_duration(row.p50_us / 1e6)}, {row.ratio:.2f} x the ceiling", markup=False)
    console.print(_table(rows))
    if arguments.json_file is not None:
        write_json({"rows": rows}, arguments.json_file)
    return rows


def take_turns(case: Case, seconds: float) -> Row:
    """Measure one case for about `seconds` and return its row. Each repetition times the attention call once and its
    ceiling once; the order of the two alternates."""
    taken: list[float] = []
    ceilings: list[float] = []
    until = time.monotonic() + seconds
    for turn in range(WARM_TURNS + MOST_TURNS):
        if turn % 2:
            mine, best = case.sample(turn), case.ceiling(turn)
        else:
            best, mine = case.ceiling(turn), case.sample(turn)
        if turn >= WARM_TURNS:
            taken.append(mine)
            ceilings.append(best)
        if len(taken) >= LEAST_TURNS and time.monotonic() > until:
            break
    return row_of(case, taken, ceilings)


def _numbers(field: str, text: str) -> Sequence[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(numbers):
        raise ConfigurationError(field, text, "numbers above 0, separated by commas")
    return numbers


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="per call and layer; ceiling: the fastest other way, in the same turns", title_justify="left")
    table.add_column("row", min_width=max(len(row.name) for row in rows))
    for title in ("p50", "p99", "ceiling", "ratio", "least", "bytes", "formula"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            format_duration(row.p50_us / 1e6),
            format_duration(row.p99_us / 1e6),
            format_duration(row.ceiling_us / 1e6),
            f"{row.ratio:.2f}",
            f"{row.least_ratio:.2f}",
            str(row.bytes),
            str(row.bytes_formula),
        )
    return table
