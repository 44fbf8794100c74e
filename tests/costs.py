"""What the tests cost, by folder: `pytest -p tests.costs` prints the seconds, the processor seconds of the processes
that run the tests and of all that these started, and the starts of daemons.

The seconds of a folder are the sum over its tests, however many workers ran them. With the option `--costs-of=module`
each module has a line.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

import pytest

from tokenlake_testing.cluster import Node


@dataclass(slots=True)
class Cost:
    """A sum over tests."""

    tests: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    daemons: int = 0

    def add(self, other: Cost) -> None:
        """Add another sum to this one."""
        self.tests += other.tests
        self.seconds += other.seconds
        self.processor += other.processor
        self.daemons += other.daemons


_LAST = pytest.StashKey[tuple[float, int]]()
_starts = 0
_start = Node.start
_costs: dict[str, Cost] = defaultdict(Cost)


def _counted(node: Node, *arguments: Any, **settings: str) -> None:
    global _starts
    _starts += 1
    _start(node, *arguments, **settings)


def _processor() -> float:
    """Processor seconds of this process and of its descendants, ended ones included."""
    ticks = 0
    for pid in _family(os.getpid()):
        with contextlib.suppress(OSError):
            # Fields 14 to 17 of proc(5): of the process, and of its children that it waited for.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs-of", choices=("folder", "module"), default="folder", help="the rows of the costs")


def pytest_configure() -> None:
    Node.start = _counted  # type: ignore[assignment,method-assign]


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_LAST] = (_processor(), _starts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Give the report the costs since the last report of this process."""
    report = yield
    now = (_processor(), _starts)
    before = item.config.stash[_LAST]
    item.config.stash[_LAST] = now
    report.user_properties = [("costs", (now[0] - before[0], now[1] - before[1]))]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "costs":
            processor, daemons = cast(tuple[float, int], value)
            _costs[report.nodeid.partition("::")[0]].add(
                Cost(report.when == "call", report.duration, processor, daemons)
            )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows: dict[str, Cost] = defaultdict(Cost)
    for module, cost in _costs.items():
        folder = "/".join(PurePath(module).parts[:2])
        rows[module if config.getoption("costs_of") == "module" else folder].add(cost)
        rows["all"].add(cost)
    terminalreporter.write_sep("=", "costs")
    for name, cost in sorted(rows.items(), key=lambda row: row[1].processor):
        terminalreporter.write_line(
            f"{name:50} {cost.tests:5} tests {cost.seconds:7.1f} s {cost.processor:7.1f} s of processor "
            f"{cost.daemons:4} daemons"
        )
