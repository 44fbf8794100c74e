"""Shows the results of `bench transfer` as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tokenlake_bench.report import format_duration
from tokenlake_bench.transfer.results import Comparison, Row, bounds


def row_table(rows: Sequence[Row]) -> Table:
    """A table with one line per kind of call of each system."""
    table = Table(title="per call; ceiling: the machine's own rate in the same turns", title_justify="left")
    table.add_column("row", min_width=max(len(row.name) for row in rows))
    for title in ("p50", "p99", "GB/s", "ceiling", "ratio", "target"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            format_duration(row.p50_us / 1e6),
            format_duration(row.p99_us / 1e6),
            _number(row.gbps),
            _number(row.ceiling_gbps),
            _number(row.ratio),
            _bound(row),
        )
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A table of the pool's measurements beside those of its peers."""
    table = Table(title="the pool / the peer, medians of the same turns", title_justify="left")
    table.add_column("row", min_width=max(len(item.row) for item in comparisons))
    table.add_column("peer", min_width=max(len(item.peer) for item in comparisons))
    for title in ("rate", "time", "target"):
        table.add_column(title, justify="right")
    for item in comparisons:
        table.add_row(
            item.row,
            item.peer,
            f"{item.ratio:.2f}" if item.rate else "",
            "" if item.rate else f"{item.ratio:.2f}",
            _target(item),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _bound(row: Row) -> Text:
    p50, p99 = bounds().get(row.name, (math.inf, math.inf))
    words = [
        f"{name} <= {format_duration(most / 1e6)}" for name, most in (("p50", p50), ("p99", p99)) if most < math.inf
    ]
    return _judged(" ".join(words), row.p50_us <= p50 and row.p99_us <= p99)


def _target(item: Comparison) -> Text:
    if item.target is None:
        return Text()
    least, most = item.target.least, item.target.most
    return _judged(f">= {least}" if least is not None else f"<= {most}", bool(item.met))


def _judged(text: str, good: bool) -> Text:
    if not text:
        return Text()
    return Text(text if good else f"{text} missed", style="green" if good else "bold red")
