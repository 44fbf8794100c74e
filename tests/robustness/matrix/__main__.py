"""`python -m tests.robustness.matrix`: run scenarios, print their measurements, write the page."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

from tests.robustness.live import PATIENT_S
from tests.robustness.matrix.measure import MATCH_S, Outcome
from tests.robustness.matrix.table import CELLS, MEANINGLESS, Cell

COMMAND = "python -m tests.robustness.matrix"
PAGE = Path(__file__).parents[3] / "docs" / "results" / "faults.md"
"""Its table of defects is kept as it is."""


@click.command()
@click.option("--only", multiple=True, type=click.Choice([cell.name for cell in CELLS]), help="SUBJECT/FAULT; all.")
@click.option("--seed", type=int, help="Another seed than that of the table.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page.")
def main(only: tuple[str, ...], seed: int | None, out: Path | None) -> None:
    """Run scenarios of the fault matrix; exit 1 when a promise was not kept."""
    rows = []
    broken = 0
    for cell in [cell for cell in CELLS if not only or cell.name in only]:
        used = cell.seed if seed is None else seed
        outcome = cell.scenario(used)
        rows.append(_row(cell, used, outcome))
        click.echo(rows[-1])
        try:
            cell.check(outcome)
        except AssertionError as error:
            broken += 1
            click.echo(f"{cell.name}: not kept: {error}", err=True)
    if out is not None:
        out.write_text(_page(rows))
    sys.exit(bool(broken))


def _row(cell: Cell, seed: int, outcome: Outcome) -> str:
    waits = "; ".join(f"{name} {_time(seconds)}" for name, seconds in outcome.waited_s.items() if seconds) or "0"
    late = sum(outcome.timeouts.values())
    cells = [
        f"{cell.name}",
        cell.promise,
        _time(outcome.longest_s),
        waits,
        str(late),
        f"{outcome.lost} of {outcome.may_lose}" if outcome.may_lose else str(outcome.lost),
        f"{outcome.wrong} of {outcome.compared}",
        str(seed),
        f"`{COMMAND} --only {cell.name} --seed {seed}`",
    ]
    return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _page(rows: list[str]) -> str:
    load = os.getloadavg()[0]
    reasons = "\n".join(f"- `{name}`: {reason}." for name, reason in MEANINGLESS.items())
    found = PAGE.read_text().partition("## Defects that were found")
    table = "\n".join(rows)
    return f"""# Faults: promises and measurements

```
{COMMAND} --out docs/results/faults.md        # this page
python -m pytest tests/robustness/test_matrix.py            # the same scenarios, as tests
```

Measured on {os.cpu_count()} CPU cores that other work used at the same time (load average {load:.1f} at the end),
Python {platform.python_version()}, loopback. One run of each scenario. The times are measured in
this run; the tests assert everything else. A segment has 16 KiB.

- Subject: **daemon** is the daemon of the engine that calls; **peer** is another node; **engine** is another engine of
  the same node.
- Fault: **kill** is kill -9. **stop**: SIGSTOP, later SIGCONT. **slow**: a proxy passes a byte (daemon, engine) or 64
  bytes (peer) every 10 ms. **half**: five connections end in the middle of a frame's length (header) or of a frame or
  segment (payload). **full**: every slot is leased (daemon, peer), the address space is used up (engine). **flip**:
  bits flip in the arena, or in the bytes that pass a proxy (wire). **bulk**: a proxy forwards nothing on the
  connections that carry segments, in both directions (dead) or in one, or no byte of a segment (headers); the control
  connection goes on. **flood**: the longest requests, thousands of requests in one write, answers that are never read,
  connections without a Hello.
- *longest call*: the longest call of a `Pool` between the fault and the end of the scenario. *waits*: for each engine,
  the time of all requests that failed or found fewer segments than the pool had; engines that are not named had none.
  *time-outs*: calls that their daemon left unanswered for a whole deadline. *lost*: segments that engines found before
  the fault and no engine afterwards, of those that only the subject held or the fault destroyed. *wrong*: segments with
  wrong bytes, of all segments read.
- Deadlines: a match {MATCH_S:.0f} s, other calls {PATIENT_S:.0f} s (defaults 20 and 250 ms), since other processes ran.
- At the end of each scenario every engine stores and reads a new prompt, and the slots of every daemon add up.

| fault | promised | longest call | waits | time-outs | lost | wrong | seed | reproduce |
|---|---|---|---|---|---|---|---|---|
{table}

No scenario:

{reasons}

{found[1]}{found[2]}"""


if __name__ == "__main__":
    main()
