"""The command that runs everything that needs a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from tokenlake_bench.gpu import command  # noqa: E402
from tokenlake_bench.gpu.base import CPU, Rig, Row  # noqa: E402
from tokenlake_bench.gpu.command import CHECKS, GpuResult, Said, main, run_here  # noqa: E402


def test_without_a_gpu_each_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    file = tmp_path / "gpu.json"
    names = ["copies", "vllm"]
    assert main(["--checks", ",".join(names), "--json", str(file)]) == 2
    assert capsys.readouterr().out.splitlines() == [f"{name}: not run: no CUDA device" for name in names]
    result = msgspec.json.decode(file.read_bytes(), type=GpuResult)
    assert [(check.name, check.not_run) for check in result.checks] == [(name, "no CUDA device") for name in names]
    assert not result.device


def measured(name: str) -> list[Row]:
    """The rows of a check on the device of tests, in this process."""
    said = list[Said]()
    run_here(name, Rig(CPU, small=True), said.append)
    assert not [each for each in said if each.not_run or each.failed], said
    return [each.row for each in said if each.row is not None]


@pytest.mark.parametrize("name", ["copies", "ship"])
def test_the_checks_are_right_on_the_device_of_tests(name: str) -> None:
    rows = measured(name)
    assert rows
    assert all(row.right for row in rows)


@pytest.mark.live
def test_blocks_go_through_a_daemon_and_back() -> None:
    rows = measured("blocks")
    assert all(row.right for row in rows), rows
    assert [row.name for row in rows] == ["FLASH_ATTN HND", "FLASH_ATTN NHD", "opaque, two groups"]


@pytest.mark.live
def test_the_transformers_engine_on_the_device_of_tests() -> None:
    rows = measured("transformers")
    assert all(row.right for row in rows), rows
    assert len(rows) == 1 + 2 * 4


@pytest.mark.rest
def test_the_kernel_is_right_in_the_interpreter() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: make install-triton")
    rows = measured("kernel")
    assert all(row.right for row in rows), rows
    assert [row.name for row in rows] == ["GQA, 512 tokens, 1 queries", "MLA, 256 tokens, 1 queries"]


FAULTS = """
import os, sys, time
from tokenlake_bench.gpu import command
from tokenlake_bench.gpu.base import Row
from tokenlake_client.engines.devices.base import DeviceFailed

def failing(rig):
    yield Row("first", True)
    raise DeviceFailed("lost")

def hanging(rig):
    yield Row("first", True)
    time.sleep(3600)

def ending(rig):
    yield Row("first", True)
    sys.stdout.flush()
    os._exit(3)

def sound(rig):
    yield Row("first", True)

for name, rows in (("copies", failing), ("ship", hanging), ("kernel", ending), ("blocks", sound)):
    command.CHECKS[name] = command.Named("__main__", rows.__name__, 60.0)
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.rest
def test_a_check_that_fails_hangs_or_dies_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has measured before is in the file."""
    program, file = tmp_path / "faults.py", tmp_path / "gpu.json"
    program.write_text(FAULTS)
    monkeypatch.setattr(command, "PROGRAM", [str(program)])
    arguments = ["--device", "cpu", "--checks", "copies,ship,kernel,blocks", "--json", str(file)]
    monkeypatch.setitem(CHECKS, "ship", CHECKS["ship"]._replace(limit_s=20.0))
    assert main(arguments) == 1
    result = msgspec.json.decode(file.read_bytes(), type=GpuResult)
    assert [[row.name for row in check.rows] for check in result.checks] == [["first"]] * 4
    failed = [check.failed for check in result.checks]
    assert failed[0] == "DeviceFailed: lost"
    assert failed[1].startswith("it took more than ")
    assert failed[2:] == ["its process ended with status 3", ""]


def test_no_check_begins_without_time(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--small", "--minutes", "0", "--checks", "copies", "--json", str(file)]) == 2
    (check,) = msgspec.json.decode(file.read_bytes(), type=GpuResult).checks
    assert check.not_run == "no time was left"
