"""The growth benchmark: its rows, its refusals, and a small run against real daemons."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.growth.client import LAYOUT, Matching, held_keys
from tokenlake_bench.growth.command import GrowthArguments, run_growth
from tokenlake_bench.growth.daemons import GrowthDaemon
from tokenlake_bench.growth.rows import HELD, Kind, Taken, row_of


def arguments(**changed: object) -> GrowthArguments:
    """A small run."""
    plain = {"rounds": 1, "segments": "200,2000", "clients": "1,2", "arenas": "32MiB", "json_file": None}
    return GrowthArguments(**{**plain, **changed})  # type: ignore[arg-type]


def kind(name: str, keys: int, together: bool = False) -> Kind:
    """A row that is never run."""
    return Kind("series", name, keys, None, lambda: [], together)  # type: ignore[arg-type]


def test_a_ratio_is_to_the_cheapest_of_the_smaller_rows() -> None:
    cheapest: dict[str, tuple[float, float]] = {}
    one = row_of(kind("one", 1), Taken([2e-4], [9.0], [1e-4]), cheapest)
    many = row_of(kind("many", 100), Taken([1e-3] * 99 + [1.0], [9.0], [3e-6]), cheapest)
    more = row_of(kind("more", 1000), Taken([3e-2], [9.0], [3e-6]), cheapest)
    assert (one.us_per_key, one.daemon_us_per_key, one.ratio, one.daemon_ratio) == pytest.approx((200, 100, 1, 1))
    assert (many.us_per_key, many.ratio, many.daemon_ratio) == pytest.approx((10, 0.05, 0.03))
    assert (more.us_per_key, more.ratio, more.daemon_ratio) == pytest.approx((30, 3, 1)), (
        "the ratio is to the cheapest smaller row"
    )
    shared = row_of(kind("clients", 100, together=True), Taken([1e-2], [1e-5], [3e-6]), {})
    assert shared.us_per_key == pytest.approx(10), "of concurrent clients the elapsed time counts"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("segments", "1000,x"),
        ("segments", "100"),
        ("segments", ""),
        ("clients", "0"),
        ("arenas", "1GiB,big"),
    ],
)
def test_invalid_arguments_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{field}'"):
        arguments(**{field: value})


@pytest.mark.live
def test_a_daemon_has_room_for_what_it_holds() -> None:
    with closing(GrowthDaemon(1500)) as daemon:
        assert daemon.full_bytes > daemon.empty_bytes > 0
        before = daemon.processor_s()
        matching = Matching(daemon.pool, 1500, seed=1)
        assert len(matching.run(100, 20)) == 20
        assert 0 < daemon.processor_s() - before < 20
        with daemon.pool.match(held_keys(0, 1024)) as lease:
            assert lease.hits == 1024
            assert [int(array[0]) for array in lease.fetch(0, 3)] == [0, 1, 2]
        with pytest.raises(TokenLakeError, match="of 100 segments found"):
            Matching(daemon.pool, 1 << 20, seed=1).run(100, 20)


@pytest.mark.rest
@pytest.mark.live
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    result = run_growth(arguments(json_file=file))
    assert [row.name for row in result.rows] == [
        "match_1",
        "match_128",
        "match_1024",
        "match_128_by_1",
        "match_128_by_2",
        "match_128_of_200",
        "match_128_of_2000",
        "store_1",
        "store_128",
        "store_1024",
        "store_128_into_200",
        "store_128_into_2000",
    ]
    assert all(0 < row.p50_us <= row.p99_us and row.daemon_us_per_key > 0 for row in result.rows)
    assert [memory.segments for memory in result.memory] == [200, 2000, HELD]
    assert [start.arena_bytes for start in result.starts] == [32 << 20]
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == [row.name for row in result.rows]
    assert LAYOUT.segment_bytes == 4096
