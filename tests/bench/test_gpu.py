"""The command that runs everything that needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from tokenlake_bench.gpu.base import CPU, Rig  # noqa: E402
from tokenlake_bench.gpu.command import CHECKS, GpuResult, main, measure  # noqa: E402
from tokenlake_bench.gpu.timeline import Timeline, covered, read  # noqa: E402
from tokenlake_client.engines.devices.base import DeviceFailed  # noqa: E402


def test_without_a_gpu_each_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    file = tmp_path / "gpu.json"
    assert main(["--json", str(file)]) == 2
    assert capsys.readouterr().out.splitlines() == [f"{name}: not run: no CUDA device" for name in CHECKS]
    result = msgspec.json.decode(file.read_bytes(), type=GpuResult)
    assert [(check.name, check.not_run) for check in result.checks] == [(name, "no CUDA device") for name in CHECKS]
    assert not result.device


@pytest.mark.parametrize("name", ["copies", "ipc"])
def test_the_checks_are_right_on_the_device_of_tests(name: str) -> None:
    (check,) = measure(Rig(CPU, small=True), [name], print).checks
    assert check.rows
    assert check.right


@pytest.mark.live
def test_blocks_go_through_a_daemon_and_back() -> None:
    lines: list[str] = []
    (check,) = measure(Rig(CPU, small=True), ["blocks"], lines.append).checks
    assert check.right, lines
    assert [row.name for row in check.rows] == ["FLASH_ATTN HND", "FLASH_ATTN NHD", "opaque, two groups"]


@pytest.mark.live
def test_the_transformers_engine_on_the_device_of_tests() -> None:
    lines: list[str] = []
    (check,) = measure(Rig(CPU, small=True), ["transformers"], lines.append).checks
    assert not check.failed, lines
    assert check.right, lines
    assert len(check.rows) == 1 + 2 * 4 + 2


def test_the_share_of_a_timeline_under_another() -> None:
    trace: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 10, "args": {"stream": 7}},
        {"cat": "kernel", "name": "gemm", "ts": 12, "dur": 8, "args": {"stream": 7}},
        {"cat": "kernel", "name": "scatter", "ts": 30, "dur": 2, "args": {"stream": 9}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 8, "dur": 8},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 0, "dur": 20},
        {"ph": "M", "name": "process_name"},
    ]
    timeline = read(trace)
    assert timeline == Timeline([(8, 16)], [(0, 10), (12, 20)], [(30, 32)])
    assert covered(timeline.copies, timeline.engine) == 6 / 8
    assert covered([(0, 4), (8, 10)], [(9, 20), (1, 3), (2, 3)]) == 0.5
    assert covered([], timeline.engine) == covered(timeline.others, timeline.copies) == 0.0


def test_a_check_that_fails_is_told_and_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(rig: Rig) -> None:
        raise DeviceFailed("lost")

    monkeypatch.setitem(CHECKS, "ipc", failing)
    assert main(["--device", "cpu", "--small", "--checks", "ipc,copies"]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "ipc: FAILED: DeviceFailed: lost"
    assert all(": right" in line for line in others)
