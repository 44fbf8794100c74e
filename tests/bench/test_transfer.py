"""The transfer benchmark: rows, ratios, turns, and that processes end."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.report import write_json
from tokenlake_bench.transfer.base import MATCH, SIZES, WINDOWS, RowKind, Size
from tokenlake_bench.transfer.command import TransferArguments, take_turns
from tokenlake_bench.transfer.peers import PeerProcess
from tokenlake_bench.transfer.pool_rows import PoolRows, layout_of
from tokenlake_bench.transfer.results import compare, row_of
from tokenlake_bench.transfer.windows import Windows
from tokenlake_bench.worker import Worker

KEYS = ["name", "p50_us", "p99_us", "gbps", "ceiling_gbps", "ratio"]
STORE = next(kind for kind in SIZES[0].rows() if kind.name == "store_128x1MiB")


def arguments(**changed: object) -> TransferArguments:
    """The arguments of an empty command line."""
    return TransferArguments(**{"sizes": "1MiB", "rounds": 1, **changed})  # type: ignore[arg-type]


def test_rows_have_the_names_that_scripts_read() -> None:
    names = [kind.name for size in SIZES for kind in size.rows()]
    assert len(set(names)) == len(names)
    assert {
        "hash_32k_tokens",
        "match_128",
        "match_128_remote",
        "lease_128x1MiB",
        "copy_128x1MiB",
        "copy_128x1MiB_2_threads",
        "store_128x1MiB",
        "fetch_tcp_128x1MiB",
        "fetch_1x1MiB",
        "store_1x1MiB",
        "fetch_tcp_4x32MiB",
        "fetch_1x32MiB",
        "store_1x32MiB",
    } <= set(names)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.label)
def test_layouts_have_the_size_they_are_named_for(size: Size) -> None:
    layout = layout_of(size)
    layout.check()
    assert layout.segment_bytes == size.segment_bytes
    assert size.window_bytes * WINDOWS > 1 << 30


def test_a_row_is_quantiles_and_rates_beside_the_ceiling(tmp_path: Path) -> None:
    ceiling = STORE.ceiling
    assert ceiling is not None
    row = row_of(STORE, [0.02] * 98 + [0.1] * 2, {ceiling: [0.01]})
    assert row.p50_us == pytest.approx(20_000)
    assert row.p99_us == pytest.approx(100_000)
    assert row.gbps == pytest.approx(128 * 2**20 / 0.02 / 1e9)
    assert row.ratio == pytest.approx(0.5)
    timed = row_of(RowKind(MATCH), [1e-4], {}, "redis")
    assert (timed.name, timed.gbps, timed.ceiling_gbps, timed.ratio) == ("redis/match_128", None, None, None)
    write_json([row, timed], tmp_path / "rows.json")
    assert [list(item) for item in json.loads((tmp_path / "rows.json").read_text())] == [KEYS, KEYS]


def test_ratios_of_rates_and_times_have_opposite_signs() -> None:
    (rate,) = compare(STORE, {STORE.name: [0.01]}, "mooncake-shm", {STORE.name: [0.02]})
    assert (rate.ratio, rate.rate) == (2.0, True)
    remote = RowKind(f"{MATCH}_remote")
    (timed,) = compare(remote, {remote.name: [0.002]}, "mooncake-tcp", {MATCH: [0.001]})
    assert (timed.row, timed.ratio, timed.rate) == (remote.name, 2.0, False)
    assert compare(STORE, {STORE.name: [0.01]}, "redis", {}) == []


class _Recorded:
    """A system that records its calls."""

    def __init__(self, name: str, rows: Sequence[str], calls: list[tuple[str, str, int]]) -> None:
        self.name = name
        self._rows = rows
        self._calls = calls

    def rows(self) -> Sequence[str]:
        return self._rows

    def sample(self, row: str, turn: int) -> list[float]:
        self._calls.append((self.name, row, turn))
        return [float(turn)]

    def close(self) -> None: ...


@pytest.mark.live
def test_each_call_between_daemons_moves_the_right_bytes() -> None:
    size = Size("1MiB", 1 << 20, 16)
    with closing(PoolRows(size, Windows(size))) as pool:
        assert set(pool.rows()) == {kind.name for kind in size.transfer_rows()}
        for row in pool.rows():
            assert min(pool.sample(row, 0)) > 0, row


def test_systems_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[tuple[str, str, int]] = []
    machine = _Recorded("machine", ["bare"], calls)
    systems = (_Recorded("a", ["x", "y"], calls), _Recorded("b", ["x"], calls))
    taken = take_turns([RowKind("x", 1, "bare"), RowKind("y")], machine, systems, 2, lambda _: None)
    assert taken == {"machine": {"bare": [1.0, 2.0]}, "a": {"x": [1.0, 2.0], "y": [1.0, 2.0]}, "b": {"x": [1.0, 2.0]}}
    assert [row for _, row, turn in calls if turn == 1] == ["bare", "x", "x", "y"]
    assert [name for name, row, _ in calls if row == "x"] == ["b", "a", "a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("against", "mooncake,other"), ("sizes", "2MiB"), ("rounds", 0)],
)
def test_invalid_arguments_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"'{field}'"):
        arguments(**{field: value})


@pytest.mark.skipif(importlib.util.find_spec("redis") is not None, reason="redis is installed")
def test_a_peer_that_is_not_installed_says_what_is_missing() -> None:
    with pytest.raises(Unreachable, match="No module named"):
        PeerProcess("redis", SIZES[0], None)


def test_a_worker_ends_with_all_that_it_started(tmp_path: Path) -> None:
    module = tmp_path / "starts_another.py"
    module.write_text(
        "import subprocess\n"
        "from tokenlake_bench.worker import serve\n"
        "def start():\n"
        "    print('noise')\n"
        "    return subprocess.Popen(['sleep', '600']).pid\n"
        "def fail():\n"
        "    raise ValueError('on purpose')\n"
        "serve({'start': start, 'fail': fail})\n"
    )
    worker = Worker("starts_another", environment={"PYTHONPATH": str(tmp_path)})
    try:
        child = worker.call("start")
        assert Path(f"/proc/{child}").exists()
        with pytest.raises(Unreachable, match="ValueError: on purpose"):
            worker.call("fail")
    finally:
        worker.close()
    until = time.monotonic() + 10
    while _alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _alive(child)
    worker.close()


def _alive(pid: int) -> bool:
    """A zombie that its new parent has not reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_cannot_start_says_why() -> None:
    worker = Worker("tokenlake_bench.no_such_module", environment=dict(os.environ))
    try:
        with pytest.raises(Unreachable, match="no_such_module"):
            worker.call("start")
    finally:
        worker.close()
