"""Units, tables and pictures of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.hits import disk_rows
from tokenlake_bench.pictures import bars, check_plot, drawn
from tokenlake_bench.report import format_bytes, format_duration, format_share, table, write_json
from tokenlake_bench.routing.outcome import DiskUse


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


def test_the_use_of_disks_in_units() -> None:
    disk = DiskUse(
        tokens=4096, written_bytes=2**20, written_bytes_per_day=3 * 2**30, writes_per_day=1.5, written_share=0.25
    )
    rows = dict(disk_rows(disk, 40_000_000, 3))
    assert list(rows.values()) == ["40,000,000 tokens", "4,096 tokens", "1.00 GiB", "1.5", "25.0 %"]
    assert disk_rows(None, None, 3) == []


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


def test_shares_in_percent() -> None:
    assert format_share(0.29761) == "29.8 %"


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with drawn(tmp_path / "a.png", (4, 3), 2) as (_, (left, _right)):
        bars(left, "share", {"pool": 0.5, "other, cache": 0.2}, "pool")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(None)
    with pytest.raises(ConfigurationError, match=r"\.png"):
        check_plot(Path("a.pdf"))
    monkeypatch.setattr("tokenlake_bench.pictures.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"tokenlake-bench\[plot\]"):
        check_plot(Path("a.png"))
