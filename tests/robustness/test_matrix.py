"""Every cell of the fault matrix keeps its promise; `python -m tests.robustness.matrix` writes the page."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from tests.robustness.matrix.__main__ import PAGE
from tests.robustness.matrix.table import CELLS, MEANINGLESS, Cell

SUBJECTS = ("daemon", "peer", "engine")
DAEMON_FAULTS = ("kill-kept-memory", "end-kept-memory")
PEER_FAULTS = ("bulk-dead", "bulk-headers", "bulk-one-way")
ENGINE_FAULTS = ("flood",)
FAULTS = ("kill", "stop", "slow", "half-header", "half-payload", "full", "flip-arena", "flip-wire")

QUICK = [f"{subject}/{fault}" for subject in SUBJECTS for fault in ("kill", "stop", "flip-arena")]
"""The cells that `make test` runs."""


def marked(cell: Cell) -> object:
    return pytest.param(cell, id=cell.name, marks=() if cell.name in QUICK else pytest.mark.rest)


@pytest.mark.live
@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_a_promise_is_kept(cell: Cell) -> None:
    print(f"seed {cell.seed}")
    outcome = cell.scenario(cell.seed)
    print(outcome)
    cell.check(outcome)


def test_each_subject_meets_each_fault() -> None:
    names = [cell.name for cell in CELLS] + list(MEANINGLESS)
    of_one = {"daemon": DAEMON_FAULTS, "peer": PEER_FAULTS, "engine": ENGINE_FAULTS}
    pairs = [*product(SUBJECTS, FAULTS), *((subject, fault) for subject, faults in of_one.items() for fault in faults)]
    assert sorted(names) == sorted(f"{subject}/{fault}" for subject, fault in pairs)


def test_the_page_has_a_row_for_each() -> None:
    page = PAGE.read_text()
    assert [cell.name for cell in CELLS if f"| {cell.name} | {cell.promise} |" not in page] == []
    assert [name for name in MEANINGLESS if f"`{name}`" not in page] == []


def test_what_was_found_has_its_test() -> None:
    found = re.findall(r"\| `(test_\w+)` \|", PAGE.read_text())
    there = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(found) > 20
    assert [test for test in found if f"def {test}(" not in there] == []
