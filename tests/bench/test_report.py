"""Units and tables of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tokenlake_bench.report import format_bytes, format_duration, table, write_json


def test_a_table_fits_a_terminal() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table("title", ("", "a", "b"), [("row", "1", "2"), ("another " * 20, "1", "2")], "caption"))
    lines = capture.get().splitlines()
    assert lines[0].strip() == "title"
    assert max(map(len, lines)) <= 80


def test_a_result_without_a_file_is_not_written(tmp_path: Path) -> None:
    write_json({"a": 1}, None)
    write_json({"a": 1}, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"a": 1}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (150 * 2**20, "150 MiB"),
        (12.5 * 2**30, "12.5 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_in_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.00025, "250 us"),
        (0.0015, "1.50 ms"),
        (0.15, "150 ms"),
        (0.9999, "1.00 s"),
        (59.96, "1 min 0 s"),
        (185.2, "3 min 5 s"),
    ],
)
def test_durations_in_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
