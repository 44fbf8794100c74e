"""Prints a result, alone or beside an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tokenlake_bench.report import WIDTH, format_duration, format_share, output, table
from tokenlake_bench.serve.results import (
    QUANTILES,
    Row,
    ServeResult,
    Settings,
    daemon_rows,
    differences,
    rows,
    time_rows,
    times,
    token_rows,
    warnings,
)

ENGINES: Final = "prompt tokens by source, as the engines count them"
DAEMONS: Final = "tokens that engines asked the daemons for"


def print_result(result: ServeResult, before: ServeResult | None) -> None:
    """Print the tables on standard output, and what a reader must know beside them."""
    console = output()
    if before is None:
        cells = [(name, _text(row)) for name, *row in rows(result)]
        console.print(table(_title(result.settings, result.duration_s), (), cells))
        spreads = [[name, *map(format_duration, msgspec.structs.astuple(each))] for name, each in times(result).items()]
        if spreads:
            console.print(table("times", ("", *QUANTILES), spreads))
        for title, found in ((ENGINES, token_rows(result)), (DAEMONS, daemon_rows(result))):
            if found:
                console.print(table(title, ("", "tokens", "share"), _with_shares(found)))
    else:
        title = _title(result.settings, result.duration_s)
        both = ((title, rows), ("times", time_rows), (ENGINES, token_rows), (DAEMONS, daemon_rows))
        for title, made in both:
            compared = list(_beside(made(before), made(result)))
            if compared:
                console.print(table(title, ("", "before", "now", "ratio"), compared))
    if len(result.servers) > 1:
        servers = [
            (each.url, f"{each.answered} of {each.requests}", format_duration(each.ttft.p50_s) if each.ttft else "-")
            for each in result.servers
        ]
        console.print(table("by server", ("", "answered", "first token, median"), servers))
    for line in _lines(result, before):
        # A terminal folds between words, a file keeps the line.
        console.print(line, soft_wrap=not console.is_terminal, highlight=False, markup=False)


def _lines(result: ServeResult, before: ServeResult | None) -> list[str]:
    late = "-" if result.late is None else format_duration(result.late.p99_s)
    repeats = format_share(result.repeated_tokens / max(1, result.planned_tokens))
    lines = [
        f"The workload repeats {repeats} of its prompt tokens.",
        f"This client sent late by {late} (p99), and took {format_share(result.busy)} of a core.",
    ]
    if before is not None and (different := differences(before.settings, result.settings)):
        lines.append(f"The runs differ in more than the servers: {'; '.join(different)}.")
    return [*lines, *warnings(result)]


def _title(settings: Settings, duration_s: float) -> str:
    """The run in lines that a terminal of 80 columns holds."""
    pace = "arrivals as recorded"
    if settings.rate is not None:
        pace = f"{settings.rate:g} requests/s"
    elif settings.concurrency is not None:
        pace = f"{settings.concurrency} at a time"
    servers = f"{settings.servers} {'server' if settings.servers == 1 else 'servers'}"
    lines = [""]
    for part in (settings.workload, f"seed {settings.seed}", pace, servers, format_duration(duration_s)):
        if lines[-1] and len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return "\n".join(lines)


def _with_shares(found: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The rows with their shares of the largest one, which is the sum."""
    whole = max((value or 0.0 for _, value, _ in found), default=0.0)
    return [
        (name, _text((value, write)), format_share(value / whole) if whole and value is not None else "-")
        for name, value, write in found
    ]


def _beside(before: Sequence[Row], now: Sequence[Row]) -> list[list[str]]:
    """The rows of both, in the order of those of now; a row that only one has is beside a dash."""
    earlier = {name: (value, write) for name, value, write in before}
    later = {name: (value, write) for name, value, write in now}
    cells: list[list[str]] = []
    for name in dict.fromkeys([*later, *earlier]):
        values = [each.get(name) for each in (earlier, later)]
        texts = ["-" if each is None else _text(each) for each in values]
        first, second = (None if each is None else each[0] for each in values)
        ratio = f"{second / first:.2f}" if first and second is not None else "-"
        cells.append([name, *texts, ratio])
    return cells


def _text(row: Sequence[object]) -> str:
    value, write = row
    assert callable(write)
    return "-" if value is None else str(write(value))
