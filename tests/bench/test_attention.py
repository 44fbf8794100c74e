"""`bench attention`: rows from samples, turns, arguments, and one short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenlake.errors import ConfigurationError

base = pytest.importorskip("tokenlake_bench.attention.base")
command = pytest.importorskip("tokenlake_bench.attention.command")


class Told:
    """A case with given times."""

    name = "told"
    bytes_formula = 90

    def __init__(self, seconds: list[float], ceilings: list[float]) -> None:
        self.seconds, self.ceilings = seconds, ceilings
        self.order: list[str] = []

    def sample(self, turn: int) -> float:
        self.order.append("sample")
        return self.seconds[turn]

    def ceiling(self, turn: int) -> float:
        self.order.append("ceiling")
        return self.ceilings[turn]

    def bytes(self) -> int:
        return 100


def test_a_row_compares_what_was_measured_in_one_turn() -> None:
    """The ratio of a row compares times of the same turn, so that a turn in which everything is slow counts as any
    other."""
    row = base.row_of(Told([], []), [2e-6, 30e-6, 4e-6], [1e-6, 10e-6, 4e-6])
    assert (row.p50_us, row.ceiling_us, row.ratio, row.least_ratio) == pytest.approx((4, 4, 2, 2))
    assert (row.bytes, row.bytes_formula) == (100, 90)


def test_call_and_ceiling_alternate_after_a_warm_up() -> None:
    told = Told([99.0] + [2.0] * 5, [99.0] + [1.0] * 5)
    row = command.take_turns(told, seconds=0)
    assert (row.ratio, row.p99_us) == (2, 2e6)
    assert told.order[:4] == ["ceiling", "sample", "sample", "ceiling"]
    assert len(told.order) == 12


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtypes": "int8"}, "dtypes"),
        ({"tokens": "1000"}, "tokens"),
        ({"queries": "1,x"}, "queries"),
        ({"nodes": "3"}, "nodes"),
    ],
)
def test_arguments_are_refused_by_name(changed: dict[str, str], named: str) -> None:
    good = {"dtypes": "float32", "tokens": "256", "queries": "1"}
    with pytest.raises(ConfigurationError, match=f"setting '{named}'"):
        command.AttentionArguments(**{**good, **changed}, seconds=1, json_file=None)


@pytest.mark.rest
@pytest.mark.slow
def test_a_short_run_writes_a_row_per_combination(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    command.run_attention(
        command.AttentionArguments(
            dtypes="float32,bfloat16", tokens="256,512", queries="1,40", seconds=0, json_file=file
        )
    )
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        f"local_{dtype}_{tokens}_{case}"
        for dtype in ("float32", "bfloat16")
        for tokens in (256, 512)
        for case in ("q1", "q1_scattered", "q40")
    ]
    assert all(row["ceiling_us"] > 0 and row["ratio"] > 0 for row in rows)
    assert set(rows[0]) == {
        "name",
        "p50_us",
        "p99_us",
        "ceiling_us",
        "ratio",
        "least_ratio",
        "bytes",
        "bytes_formula",
    }


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.live
def test_remote_queries_move_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """The bytes are those of the formula and at most 5 % more, for frames; the benchmark compares the results with
    those of the kernel. Rows with busy nodes are left out: there a late query engine is replaced by another copy, so
    that fewer nodes answer or one more is asked."""
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    arguments = command.AttentionArguments(
        dtypes="float32", tokens="256", queries="1", nodes="1,4", seconds=0, json_file=file
    )
    command.run_attention(arguments)
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"] if row["name"].startswith("query_")}
    assert set(rows) == {
        f"query_{case}{busy}"
        for case in ("here_256_q1", "remote1_256_q1", "here_4096_q1", "remote1_4096_q1", "remote4_4096_q1")
        for busy in ("", "_busy")
    }
    for name, row in rows.items():
        assert (row["bytes_formula"] == 0) == ("here" in name)
        if not name.endswith("_busy"):
            assert row["bytes_formula"] <= row["bytes"] <= 1.05 * row["bytes_formula"]
