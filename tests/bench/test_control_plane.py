"""`tokenlake bench control-plane` runs, and its figures are those that its rounds measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("grpc")

from tokenlake_bench.control_plane import ControlPlaneResult, run_control_plane

pytestmark = pytest.mark.live


def test_a_short_run(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = run_control_plane(calls=20, rounds=1, seconds=0.5, rate=20.0, json_file=file)
    assert msgspec.json.decode(file.read_bytes(), type=ControlPlaneResult) == result
    assert set(result.calls) == set(result.p50_over_echo)
    assert all(each.p99_ms >= each.p50_ms > 0 for each in (result.echo, *result.calls.values()))
    assert result.matches_quiet.p50_ms > 0
    assert result.calls_per_s > 0
