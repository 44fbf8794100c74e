"""Results of a soak: claims that hold or fail, their figures, and the tables of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from rich.console import Group

from tokenlake_bench.report import format_bytes, format_duration, table, verdict
from tokenlake_bench.soak.gauges import Recorder, Tolerance, flatness

_MEMORY: Final = Tolerance(2 * (1 << 20), 0.02)
"""Tolerance of a process's resident memory: the median may grow by 2 MiB plus 2 % of the earlier median. The allocator
keeps freed memory for each thread. Without a leak the median therefore moves by about 1 MiB after a read of the metrics
page or several restarts of other processes."""
DAEMON: Final = {
    "memory": _MEMORY,
    "descriptors": Tolerance(16),
    "threads": Tolerance(8),
    "entries": Tolerance(100, 0.1),
}
"""Tolerances of a daemon's gauges. A daemon keeps up to four bulk connections open per peer and direction, the incoming
ones with a thread each, from the time when the load first needs so many. The entries of its maps include the directory,
which has one per segment in the memory."""
ENGINE: Final = {"memory": _MEMORY, "descriptors": Tolerance(16), "threads": Tolerance(2)}
"""Tolerances of an engine's gauges. An engine opens each of the eight regions at its first read and at its first write
there, and again after each restart of its daemon."""
NAMES: Final = {
    "memory": "resident memory beside the arena",
    "descriptors": "open descriptors",
    "threads": "threads",
    "entries": "entries of the daemon's maps",
}


class Claim(msgspec.Struct, frozen=True):
    """One claim about a soak. `holds`: None where the run was too short to decide; the soak has then not passed."""

    text: str
    found: str
    holds: bool | None


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one gauge of one process that lived as long as the run: medians of the earlier and the later
    half after warm-up, the allowed difference, and the smallest growth per hour that the comparison detects."""

    process: str
    gauge: str
    earlier: float
    later: float
    allowed: float
    least_per_hour: float
    flat: bool


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench soak`. `logs`: the end of each daemon's log, where a claim fails."""

    seconds: float
    seed: int
    nodes: int
    interrupted: bool
    claims: list[Claim]
    gauges: list[Gauge]
    faults: dict[str, int]
    done: dict[str, int]
    lives: dict[str, int]
    logs: dict[str, str]

    @property
    def passed(self) -> bool:
        """True if every claim about the soak holds."""
        return all(claim.holds for claim in self.claims)


def gauges_of(recorder: Recorder, survivors: Iterable[str]) -> tuple[list[Gauge], list[str]]:
    """(comparisons of the gauges of the processes that lived as long as the run, names of gauges with too few
    samples)."""
    gauges: list[Gauge] = []
    unknown: list[str] = []
    for name in survivors:
        lives = recorder.lives.get(name, [])
        for gauge, tolerance in (DAEMON if name.startswith("node") else ENGINE).items():
            found = flatness(lives[-1].samples.get(gauge, []), tolerance) if len(lives) == 1 else None
            if found is None:
                unknown.append(f"{gauge} of {name}")
                continue
            gauges.append(
                Gauge(
                    process=name,
                    gauge=gauge,
                    earlier=found.earlier,
                    later=found.later,
                    allowed=found.allowed,
                    least_per_hour=found.least_rate * 3600,
                    flat=found.flat,
                )
            )
    return gauges, unknown


def flat_claims(gauges: list[Gauge], unknown: list[str]) -> list[Claim]:
    """One claim per gauge: that it does not grow in any process that lived as long as the run."""
    claims = []
    for name in DAEMON:
        of_kind = [gauge for gauge in gauges if gauge.gauge == name]
        missing = any(words.startswith(f"{name} of") for words in unknown)
        worst = max(of_kind, key=lambda gauge: (gauge.later - gauge.earlier) / gauge.allowed, default=None)
        if missing or worst is None:
            claims.append(Claim(f"{NAMES[name]} flat", "too few samples", None))
            continue
        earlier, later, allowed = (_value(name, value) for value in (worst.earlier, worst.later, worst.allowed))
        found = f"most in {worst.process}: {earlier} -> {later}, {allowed} more allowed"
        claims.append(Claim(f"{NAMES[name]} flat", found, all(gauge.flat for gauge in of_kind)))
    return claims


def _value(gauge: str, value: float) -> str:
    return format_bytes(value) if gauge == "memory" else f"{value:,.0f}"


def tables(result: SoakResult) -> Group:
    """A line for each claim, what was done, and a line per gauge of each process that lived as long as the run."""
    words = {True: "holds", False: "FAILS", None: "UNDECIDED"}
    cut = ", interrupted" if result.interrupted else ""
    return Group(
        table(
            f"soak of {format_duration(result.seconds)}{cut}: {'passed' if result.passed else 'FAILED'}",
            ("claim", "verdict", "found"),
            [(each.text, verdict(words[each.holds], good=bool(each.holds)), each.found) for each in result.claims],
        ),
        table("done", (), [(name, f"{count:,}") for name, count in {**result.faults, **result.done}.items()]),
        table(
            "medians after warm-up; detects: growth per hour",
            ("process", "gauge", "earlier", "later", "allowed", "detects"),
            [
                (each.process, each.gauge, *(_value(each.gauge, value) for value in _figures(each)))
                for each in result.gauges
            ],
        ),
    )


def _figures(gauge: Gauge) -> tuple[float, ...]:
    return gauge.earlier, gauge.later, gauge.allowed, gauge.least_per_hour
