"""The tables of the commands on terminals of several widths."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console

from tokenlake_server.tables import PackedTables, print_rows

COLUMNS = ("node", "status", "memory", "engines", "segments", "address", "uptime", "membership", "problem")
ROW = ("node-with-a-name", "serves", "64.0GiB", "12", "1,234,567", "10.20.30.40:7463", "12.5h", "etcd", "none at all")


def printed(width: int, columns: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """The lines that a terminal of this width shows."""
    master, slave = os.openpty()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(slave, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "linux")
        print_rows(columns, rows, "the title of the table")
        terminal.flush()
        os.set_blocking(master, False)
        shown = ""
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(master, 1 << 16).decode()
    os.close(master)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\r\n")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_word_is_folded(width: int) -> None:
    lines = printed(width, COLUMNS, ROW)
    words = {word for line in lines for word in line.split()}
    assert {word for cell in (*COLUMNS, *ROW) for word in cell.split()} <= words


def test_a_terminal_that_is_too_narrow_gets_plain_lines() -> None:
    assert len(printed(40, COLUMNS, ROW)) == 4, "the title, the columns, one row, the end"


def test_long_texts_are_folded_between_words() -> None:
    text = "a text of several words that is longer than the terminal is wide"
    lines = printed(40, ("name", "text"), ("n1", text))
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[4:]).split()) == f"n1 {text}"


@pytest.mark.parametrize("width", [1, 20, 40, 79, 80, 200])
@pytest.mark.parametrize("height", [1, 10, 24, 60])
def test_packed_tables_fill_a_screen(width: int, height: int) -> None:
    out = io.StringIO()
    rows = [(*ROW[:-1], f"none {at}") for at in range(30)]
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        ("nodes", COLUMNS, rows),
        ("hot prefixes", ("prefix", "tokens"), [("a\x1b[31m", "1"), ("b", "23,456")]),
    ]
    Console(file=out, width=width, height=height).print(PackedTables(tables), end="")
    lines = out.getvalue().splitlines()
    assert len(lines) <= max(height, 5), "two titles, two lines of columns, a blank line, and rows"
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out.getvalue()
    if (width, height) == (80, 24):
        assert lines[0] == "nodes (14 more)"
        assert lines[2] == "node-with-a-name  serves  64.0GiB       12  1,234,567  10.20.30.40:7463   12.5h"
        assert lines[-3:] == ["prefix     tokens", "a\\x1b[31m       1", "b          23,456"]
