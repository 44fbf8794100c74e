"""From measured seconds to the rows of the result: quantiles, rates, the machine's own rates, and ratios to other
stores; and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from rich.table import Table

from tokenlake_bench.report import format_duration, table
from tokenlake_bench.transfer.base import MATCH, SIZES, RowKind

Samples = Mapping[str, Sequence[float]]
"""Measured seconds of each call, by name of the kind of call."""
OTHER_ROWS: Final = {f"{MATCH}_remote": MATCH} | {f"copy_{size.many}_2_threads": f"copy_{size.many}" for size in SIZES}
"""By kind of call of the pool, the kind of a peer's call that is the same to an engine, where the names differ."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the JSON of `bench transfer`, for one kind of call of one system. `name`: for a peer it begins with
    the peer's name and a slash. `gbps`: rate at the median time, `ceiling_gbps`: the machine's own rate measured in the
    same repetitions, `ratio`: the first divided by the second. All three are None where a call moves no bytes."""

    name: str
    p50_us: float
    p99_us: float
    gbps: float | None = None
    ceiling_gbps: float | None = None
    ratio: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of the pool compared with one of a peer. `ratio`: the pool's rate divided by the peer's if
    `rate`, else the pool's time divided by the peer's."""

    row: str
    peer: str
    ratio: float
    rate: bool


def row_of(kind: RowKind, seconds: Sequence[float], ceilings: Samples, system: str | None = None) -> Row:
    """The row of one kind of call of one system. `ceilings`: seconds of the machine's own copies and transfers, from
    the same repetitions."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    name = kind.name if system is None else f"{system}/{kind.name}"
    if not kind.nbytes or kind.ceiling is None:
        return Row(name=name, p50_us=p50 * 1e6, p99_us=p99 * 1e6)
    rate = kind.nbytes / p50 / 1e9
    ceiling = SIZES[0].window_bytes / float(np.median(ceilings[kind.ceiling])) / 1e9
    return Row(name=name, p50_us=p50 * 1e6, p99_us=p99 * 1e6, gbps=rate, ceiling_gbps=ceiling, ratio=rate / ceiling)


def compare(kind: RowKind, ours: Samples, peer: str, theirs: Samples) -> list[Comparison]:
    """Compare the pool's measurement of the kind `kind` with that of `peer`; empty if the peer has none. The seconds of
    the pool (`ours`) and of the peer (`theirs`) must come from the same repetitions of the benchmark."""
    name = kind.name if kind.name in theirs else OTHER_ROWS.get(kind.name, kind.name)
    if name not in theirs:
        return []
    ratio, rate = float(np.median(ours[kind.name]) / np.median(theirs[name])), kind.nbytes > 0
    return [Comparison(row=kind.name, peer=peer, ratio=1 / ratio if rate else ratio, rate=rate)]


def row_table(rows: Sequence[Row]) -> Table:
    """A table with one line per kind of call of each system."""
    return table(
        "per call; ratio: to the machine's own rate in the same turns",
        ("", "p50", "p99", "GB/s", "ratio"),
        [
            (
                row.name,
                format_duration(row.p50_us / 1e6),
                format_duration(row.p99_us / 1e6),
                *("" if value is None else f"{value:.2f}" for value in (row.gbps, row.ratio)),
            )
            for row in rows
        ],
    )


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A table of the pool's measurements beside those of its peers."""
    rows = [
        (each.row, each.peer, *((f"{each.ratio:.2f}", "") if each.rate else ("", f"{each.ratio:.2f}")))
        for each in comparisons
    ]
    return table("the pool / the peer, medians of the same turns", ("", "peer", "rate", "time"), rows)
