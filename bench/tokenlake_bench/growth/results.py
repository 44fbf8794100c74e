"""Results of `bench growth`: the JSON, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from rich.table import Table
from rich.text import Text

from tokenlake.config import format_size
from tokenlake_bench.report import format_bytes, format_duration

GROWS: Final = 1.2
"""Ratio of two costs above which a cost counts as growing. Repeated measurements of the same cost differ by less."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the JSON: the cost of a kind of call. `p50_us` and `p99_us`: microseconds of one call. `us_per_key`:
    10th percentile of the calls' times, which other programs disturb least, divided by the keys of a call; with several
    clients the same of the wall time of each repetition, divided by the keys of all clients. `daemon_us_per_key`: the
    daemon's processor time per key. The ratios compare with the cheapest of the earlier rows of the same series: above
    1, the cost grows."""

    series: str
    name: str
    p50_us: float
    p99_us: float
    us_per_key: float
    daemon_us_per_key: float
    ratio: float
    daemon_ratio: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident bytes of a daemon's process beyond the arena, before and after segments were stored."""

    segments: int
    empty_bytes: float
    full_bytes: float
    allowed_bytes: float


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the start of a daemon's process until it serves an engine, for one arena size."""

    arena_bytes: int
    seconds: float


class GrowthResult(msgspec.Struct, frozen=True):
    """The JSON of `tokenlake bench growth`: the costs of keys, and the memory and start times of daemons."""

    rows: list[Row]
    memory: list[Memory]
    starts: list[Start]


def tables(result: GrowthResult) -> Iterator[Table]:
    """Tables of all measured costs, for a terminal."""
    table = _table("per call and per key; ratio to the cheapest earlier row", "row", "p50", "p99", *_PER_KEY)
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
