"""Shows the result of a soak on a terminal, and as a page of the documentation."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tokenlake_bench.report import format_duration
from tokenlake_bench.soak.results import Claim, Gauge, SoakResult, format_value

_WORDS = {True: "holds", False: "FAILS", None: "UNDECIDED"}


def claim_table(result: SoakResult) -> Table:
    """A table with one line per claim; the title says whether the soak passed."""
    verdict = "passed" if result.passed else "FAILED"
    cut = ", interrupted" if result.interrupted else ""
    table = Table(title=f"soak of {format_duration(result.seconds)}{cut}: {verdict}", title_justify="left")
    for title in ("claim", "verdict", "found"):
        table.add_column(title)
    for claim in result.claims:
        table.add_row(claim.text, Text(_WORDS[claim.holds], style="green" if claim.holds else "bold red"), claim.found)
    return table


def gauge_table(gauges: Sequence[Gauge]) -> Table:
    """A table with one line per gauge of each process that lived as long as the run."""
    table = Table(title="medians after warm-up", title_justify="left")
    table.add_column("process")
    for title in _GAUGE_COLUMNS[1:]:
        table.add_column(title, justify="right")
    for gauge in gauges:
        table.add_row(*_gauge_row(gauge))
    return table


_GAUGE_COLUMNS = ("process", "gauge", "earlier half", "later half", "allowed", "detects")


def _gauge_row(gauge: Gauge) -> tuple[str, ...]:
    values = (format_value(gauge.gauge, value) for value in (gauge.earlier, gauge.later, gauge.allowed))
    return gauge.process, gauge.gauge, *values, f"{format_value(gauge.gauge, gauge.least_per_hour)} per hour on"


def page(result: SoakResult, command: str) -> str:
    """The result of a soak as a Markdown page: the tables with explanations."""
    verdict = "every claim holds" if result.passed else "a claim fails"
    lines = [
        _HEAD.format(command=command),
        f"{format_duration(result.seconds)} of load on {os.cpu_count()} processor cores, beside other processes of the "
        f"machine: **{verdict}**.",
        "",
        *_table(("claim", "", "found"), (_claim_row(claim) for claim in result.claims)),
        "",
        "## What was done",
        "",
        *_table(("faults", "count"), ((name, f"{number:,}") for name, number in result.faults.items())),
        "",
        *_table(("engines, all lives", "count"), ((name, f"{number:,}") for name, number in result.done.items())),
        "",
        f"Most slots in quarantine at a node at a time: {result.peaks['quarantined']:.0f}; most leases and other "
        f"holds: {result.peaks['holds']:.0f}.",
        "",
        "## What stays flat",
        "",
        _METHOD,
        *_table(_GAUGE_COLUMNS, (_gauge_row(gauge) for gauge in result.gauges)),
        "",
    ]
    return "\n".join(lines)


def _claim_row(claim: Claim) -> tuple[str, str, str]:
    return claim.text, _WORDS[claim.holds], claim.found


def _table(head: Sequence[str], rows: object) -> list[str]:
    words = [head, ["---"] * len(head), *rows]  # type: ignore[misc]
    return [f"| {' | '.join(cells)} |" for cells in words]


_HEAD = """# Soak: load with kills and stops

```
{command} --page docs/results/soak.md
```

Three engine processes at each node store, match, fetch, copy, hold views, release late, abort, commit too late; two
tenants and two layouts share a memory of 8 MiB per node, a tenth of the requested segments. Engines and daemons are
killed (`kill -9`) and started again, stopped (SIGSTOP) and continued, at moments drawn from the seed. Every byte read
is compared with its expected value; a view that was held is compared again before its release. The first daemon and the
first engine of each node are stopped but never killed, so that a leak in them shows.
"""

_METHOD = """The first third of the run is warm-up. The rest is cut in two halves; a gauge is flat if the median of the
later half exceeds that of the earlier by at most the allowed amount: 2 MiB and 2 % of memory; of a daemon 16
descriptors and 8 threads (four bulk connections per peer and direction are kept once the load needed them), 100 and 10
% of map entries; of an engine 16 descriptors (two per region it has mapped since its daemon started) and 2 threads.
Medians, because a restart or a page of metrics moves few samples and a leak all that follow. `detects`: a growth of
that size would have failed. Memory is resident memory less shared memory (the arena).
"""
