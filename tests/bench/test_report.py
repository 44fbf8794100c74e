"""The JSON has the keys that scripts read; tables and plots show the same numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from tokenlake.errors import ConfigurationError
from tokenlake_bench.plot import plot_cache_hit
from tokenlake_bench.report import (
    CacheHitDetails,
    CacheHitResult,
    DemoDetails,
    DemoResult,
    Quantiles,
    RestartPart,
    ShipResult,
    UntilKill,
    cache_hit_table,
    demo_table,
    format_bytes,
    format_duration,
    format_share,
    write_json,
)
from tokenlake_bench.routing.outcome import DiskUse

CACHE_HIT_KEYS = [
    "token_hit_rate",
    "ideal_token_hit_rate",
    "private_token_hit_rate",
    "private_routed_token_hit_rate",
    "remote_share",
    "duplication",
    "load_cv",
    "load_cv_floor",
    "load_max_over_mean",
    "flash_max_over_mean",
    "flash_floor",
    "bytes_moved",
    "wrong_bytes",
    "requests",
    "nodes",
    "seed",
    "disk",
]
DEMO_KEYS = [
    "token_hit_rate",
    "private_token_hit_rate",
    "private_routed_token_hit_rate",
    "ideal_token_hit_rate",
    "ttft_pool_ms",
    "ttft_cold_ms",
    "tokens_equal",
    "control_changed_tokens",
    "longest_call_ms",
    "errors",
    "ship",
    "restart",
]
CACHE_HIT = CacheHitResult(
    token_hit_rate=0.298,
    ideal_token_hit_rate=0.374,
    private_token_hit_rate=0.088,
    private_routed_token_hit_rate=0.295,
    remote_share=0.66,
    duplication=1.01,
    load_cv=0.31,
    load_cv_floor=None,
    load_max_over_mean=1.4,
    flash_max_over_mean=(1.3, 1.15),
    flash_floor=(),
    bytes_moved=3 * 2**30,
    wrong_bytes=0,
    requests=12_031,
    nodes=3,
    seed=0,
    disk=None,
)
CACHE_HIT_DETAILS = CacheHitDetails(
    workload="trace.jsonl.zst",
    segment_tokens=512,
    capacity_tokens=10_000_000,
    disk_tokens=None,
    match=Quantiles(0.3, 2.1),
    fetch=Quantiles(4.0, 31.2),
    sent_bytes={"n0": 2**30, "n1": 2**31, "n2": 2**30},
    elapsed_s=185.0,
)
DEMO = DemoResult(
    token_hit_rate=0.7,
    private_token_hit_rate=0.5,
    private_routed_token_hit_rate=0.68,
    ideal_token_hit_rate=0.75,
    ttft_pool_ms=50.0,
    ttft_cold_ms=150.0,
    tokens_equal=True,
    control_changed_tokens=7,
    longest_call_ms=400.0,
    errors=0,
    ship=ShipResult(
        requests=6,
        cached_tokens=12_288,
        fetch_bytes=9 << 20,
        fetch_formula_bytes=9 << 20,
        ship_bytes=3 << 20,
        ship_formula_bytes=3 << 20,
        fetch_ttft_ms=170.0,
        ship_ttft_ms=300.0,
        tokens_equal=True,
    ),
    restart=RestartPart(
        requests=60,
        hit_rate_before=0.8,
        hit_rate_after=0.79,
        ideal_before=0.82,
        ideal_after=0.82,
        restart_s=2.5,
        tokens_equal=True,
    ),
)
DEMO_DETAILS = DemoDetails(
    workload="built-in",
    requests=240,
    compared=240,
    equal=240,
    controls=8,
    remote_share=0.4,
    duplication=1.02,
    bytes_moved=10**9,
    evictions=100,
    sent_bytes={"n0": 10**8, "n1": 10**8},
    until_kill=UntilKill(
        requests=119, token_hit_rate=0.72, private_routed_token_hit_rate=0.73, ideal_token_hit_rate=0.74
    ),
    killed_node="n1",
    served_again_s=2.2,
    elapsed_s=80.0,
    random_model=True,
)


def shown(table: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_json_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    write_json(CACHE_HIT, tmp_path / "a.json")
    write_json(DEMO, tmp_path / "b.json")
    assert list(json.loads((tmp_path / "a.json").read_text())) == CACHE_HIT_KEYS
    assert list(json.loads((tmp_path / "b.json").read_text())) == DEMO_KEYS


def test_the_cache_hit_table_shows_the_result() -> None:
    text = shown(cache_hit_table(CACHE_HIT, CACHE_HIT_DETAILS))
    for part in ("12,031 requests", "29.8 %", "37.4 %", "8.8 %", "29.5 %", "3.00 GiB", "300 us / 2.10 ms", "3 min 5 s"):
        assert part in text
    for part in ("0.310", "not known", "1.300", "1.150", "sent by n1", "2.00 GiB"):
        assert part in text


def test_the_table_of_a_run_with_disks_has_their_use() -> None:
    disk = DiskUse(
        tokens=4096, written_bytes=2**20, written_bytes_per_day=3 * 2**30, writes_per_day=1.5, written_share=0.25
    )
    text = shown(cache_hit_table(replace(CACHE_HIT, disk=disk), replace(CACHE_HIT_DETAILS, disk_tokens=40_000_000)))
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if "│" in line}
    assert rows["capacity of the disks"] == "40,000,000 tokens"
    assert rows["hits from the node's own disk"] == "4,096 tokens"
    assert rows["written to disk per day, per node"] == "1.00 GiB"
    assert rows["the same in sizes of the disk"] == "1.5"
    assert rows["written, of what memory evicted"] == "25.0 %"


def test_a_run_without_sent_bytes_has_no_load() -> None:
    text = shown(cache_hit_table(replace(CACHE_HIT, load_cv=None, load_max_over_mean=None), CACHE_HIT_DETAILS))
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if "│" in line}
    assert rows["load CV, 10 s windows"] == rows["load max / mean"] == "-"


def test_the_demo_ends_with_the_lines_that_convince() -> None:
    lines = shown(demo_table(DEMO, DEMO_DETAILS)).splitlines()[-5:]
    assert [each.strip() for each in lines] == [
        "token hit rate of the 119 requests before the kill: pool 72.0 %, prefix-aware routing 73.0 %, "
        "infinite cache 74.0 %",
        "tokens equal 240 of 240",
        "control with flipped bytes: 7 of 8 differ, as required",
        "node n1 killed at 50 %: longest call 400 ms, errors 0, served again after 2.20 s",
        "The model is tiny and random: the hit rates carry over, the milliseconds do not.",
    ]


def test_the_demo_says_what_failed() -> None:
    bad = replace(DEMO, control_changed_tokens=0, tokens_equal=False)
    text = shown(demo_table(bad, replace(DEMO_DETAILS, equal=239, served_again_s=None, random_model=False)))
    assert "tokens equal 239 of 240" in text
    assert "0 of 8 differ; at least one must" in text
    assert "did not serve again" in text
    assert "random" not in text


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


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    for nodes in (0, 3, 40):
        path = tmp_path / f"{nodes}.png"
        plot_cache_hit(CACHE_HIT, {f"n{number}": number << 30 for number in range(nodes)}, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"\.png"):
        plot_cache_hit(CACHE_HIT, {}, tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="matplotlib"):
        plot_cache_hit(CACHE_HIT, {}, tmp_path / "a.png")
