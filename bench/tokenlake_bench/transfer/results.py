"""From measured seconds to the rows of the result: quantiles, rates, bounds, and ratios to other stores; and their
tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from tokenlake_bench.report import format_duration, table, verdict
from tokenlake_bench.transfer.base import HASH_MANY, MATCH, SIZES, RowKind

PLAIN = "tokenlake"
"""Name of the pool as the peer with which the encrypted pool is compared."""
Samples = Mapping[str, Sequence[float]]
"""Measured seconds of each call, by name of the kind of call."""


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


@dataclass(frozen=True, slots=True)
class Target:
    """A required bound on the ratio of the pool's measurement `row` to `peer_row` of `peer`. If the names of several
    peers begin with `peer`, each of them is compared and the fastest counts. `least` bounds the ratio of rates from
    below, `most` the ratio of times from above."""

    row: str
    peer: str
    peer_row: str
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measurement of the pool compared with one of a peer. `ratio`: the pool's rate divided by the peer's if
    `rate`, else the pool's time divided by the peer's."""

    row: str
    peer: str
    peer_row: str
    ratio: float
    rate: bool
    target: Target | None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within the required bound; None if none is required."""
        if self.target is None:
            return None
        return self.ratio >= (self.target.least or 0.0) and self.ratio <= (self.target.most or math.inf)


def _targets() -> list[Target]:
    """The required bounds on the ratios of the pool's times and rates to those of other stores."""
    targets = [
        Target(MATCH, "mooncake", MATCH, most=0.6),
        Target(f"{MATCH}_remote", "mooncake", MATCH, most=1.2),
    ]
    for size in SIZES:
        targets += [
            Target(f"copy_{size.many}_2_threads", "mooncake-shm", f"copy_{size.many}", least=1.1),
            Target(f"store_{size.many}", "mooncake-shm", f"store_{size.many}", least=0.8),
            Target(f"fetch_tcp_{size.many}", "mooncake-tcp", f"fetch_tcp_{size.many}", least=1.5),
        ]
    # One connection carries a segment of 32 MiB, two carry many segments.
    one, many = f"fetch_{SIZES[1].one}", [f"fetch_tcp_{size.many}" for size in SIZES]
    targets.append(Target(f"{MATCH}_remote", PLAIN, f"{MATCH}_remote", most=1.1))
    targets += [Target(row, PLAIN, row, least=0.75 if row == one else 0.6) for row in (one, *many)]
    return targets


TARGETS = _targets()


def bounds() -> dict[str, tuple[float, float]]:
    """Upper bounds on the pool's own times in microseconds, by kind of call: (p50, p99)."""
    return {
        HASH_MANY: (600.0, math.inf),
        f"{MATCH}_under_load": (math.inf, 3000.0),
        f"lease_{SIZES[0].many}": (150.0, math.inf),
    }


def row_of(kind: RowKind, seconds: Sequence[float], ceilings: Samples, system: str | None = None) -> Row:
    """The row of one kind of call of one system. `ceilings`: seconds of the machine's own copies and transfers, from
    the same repetitions."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    name = kind.name if system is None else f"{system}/{kind.name}"
    if not kind.nbytes or kind.ceiling is None:
        return Row(name=name, p50_us=p50 * 1e6, p99_us=p99 * 1e6)
    rate = kind.nbytes / p50 / 1e9
    ceiling = _window_bytes() / float(np.median(ceilings[kind.ceiling])) / 1e9
    return Row(name=name, p50_us=p50 * 1e6, p99_us=p99 * 1e6, gbps=rate, ceiling_gbps=ceiling, ratio=rate / ceiling)


def compare(kind: RowKind, ours: Samples, peer: str, theirs: Samples) -> list[Comparison]:
    """Compare the pool's measurements of the kind `kind` with those of `peer` that the required bounds name or, if they
    name none, with the peer's measurement of the same name. Empty if the peer has no such measurement. The seconds of
    the pool (`ours`) and of the peer (`theirs`) must come from the same repetitions of the benchmark."""
    named = [t for t in TARGETS if t.row == kind.name and peer.startswith(t.peer) and t.peer_row in theirs]
    if not named and kind.name in theirs:
        return [_comparison(kind, ours, peer, theirs, kind.name, None)]
    return [_comparison(kind, ours, peer, theirs, target.peer_row, target) for target in named]


def _comparison(
    kind: RowKind, ours: Samples, peer: str, theirs: Samples, peer_row: str, target: Target | None
) -> Comparison:
    ratio = float(np.median(ours[kind.name]) / np.median(theirs[peer_row]))
    rate = kind.nbytes > 0
    return Comparison(kind.name, peer, peer_row, 1 / ratio if rate else ratio, rate, target)


def _window_bytes() -> int:
    (nbytes,) = {size.window_bytes for size in SIZES}
    return nbytes


def row_table(rows: Sequence[Row]) -> Table:
    """A table with one line per kind of call of each system."""
    return table(
        "per call; ratio: to the machine's own rate in the same turns",
        ("", "p50", "p99", "GB/s", "ratio", "at most"),
        [
            (
                row.name,
                format_duration(row.p50_us / 1e6),
                format_duration(row.p99_us / 1e6),
                *("" if value is None else f"{value:.2f}" for value in (row.gbps, row.ratio)),
                _bound(row),
            )
            for row in rows
        ],
    )


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A table of the pool's measurements beside those of its peers."""
    rows = []
    for each in comparisons:
        target, ratio = Text(), f"{each.ratio:.2f}"
        if each.target is not None:
            least, most = each.target.least, each.target.most
            target = _judged(f">= {least}" if least is not None else f"<= {most}", good=bool(each.met))
        rows.append((each.row, each.peer, *((ratio, "") if each.rate else ("", ratio)), target))
    return table("the pool / the peer, medians of the same turns", ("", "peer", "rate", "time", "target"), rows)


def _bound(row: Row) -> Text:
    p50, p99 = bounds().get(row.name, (math.inf, math.inf))
    limits = {"": p50, "p99 ": p99}
    words = [f"{name}{format_duration(most / 1e6)}" for name, most in limits.items() if most < math.inf]
    return _judged(" ".join(words), good=row.p50_us <= p50 and row.p99_us <= p99)


def _judged(text: str, *, good: bool) -> Text:
    return verdict(text if good or not text else f"{text} missed", good=good)
