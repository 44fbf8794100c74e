"""The command that runs everything that needs a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from tokenlake_bench.gpu.base import CPU, Rig  # noqa: E402
from tokenlake_bench.gpu.command import CHECKS, GpuResult, main, measure  # noqa: E402
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


@pytest.mark.parametrize("name", ["copies", "ipc", "ship"])
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


@pytest.mark.rest
def test_the_kernel_is_right_in_the_interpreter() -> None:
    lines: list[str] = []
    (check,) = measure(Rig(CPU, small=True), ["kernel"], lines.append).checks
    assert check.right, lines
    if check.not_run:
        pytest.skip(check.not_run)
    assert [row.name for row in check.rows] == ["GQA, 512 tokens, 1 queries", "MLA, 256 tokens, 1 queries"]
