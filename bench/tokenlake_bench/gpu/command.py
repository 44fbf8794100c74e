"""The command `python -m tokenlake_bench.gpu`: all checks on one device, each with its rows, as text and JSON.

Each check runs in a process of its own with a limit of its own, and prints a line of JSON per row: one that hangs, or
that ends the GPU's context, costs the others nothing, and what it has measured stays. The JSON file is written after
every check.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row
from tokenlake_bench.report import write_json
from tokenlake_testing.children import bound


class Named(NamedTuple):
    """A check: the module and the name of its function, and the seconds after which it is ended."""

    module: str
    function: str
    limit_s: float

    @property
    def rows(self) -> Callable[[Rig], Iterator[Row]]:
        """The function. Other checks run without the packages that it imports."""
        rows: Callable[[Rig], Iterator[Row]] = getattr(import_module(self.module), self.function)
        return rows


CHECKS: Final[dict[str, Named]] = {
    name: Named(f"tokenlake_bench.gpu.{module}", name, limit_s)
    for name, module, limit_s in (
        ("kernel", "kernel", 90.0),
        ("transformers", "transformers_rows", 180.0),
        ("copies", "copies", 40.0),
        ("ship", "ship", 60.0),
        ("blocks", "blocks", 60.0),
        ("vllm", "tokens", 300.0),
    )
}
"""In the order in which they run: what a cut may cost comes last."""
PROGRAM = ["-m", "tokenlake_bench.gpu"]
"""What runs one check in a process of its own."""
PACKAGES: Final = ("torch", "triton", "transformers", "vllm")
LEAST_S: Final = 5.0
"""A check is not begun with less time left."""


class Check(msgspec.Struct, frozen=True):
    """One check. `not_run`: the reason why it was not run. `failed`: the error that ended it."""

    name: str
    rows: list[Row]
    not_run: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """True where all rows were right, and no error ended the check."""
        return not self.failed and all(row.right for row in self.rows)


class GpuResult(msgspec.Struct, frozen=True):
    """The JSON of the command. `device`: the name of the GPU; empty without one. `versions`: of Python, CUDA, the
    driver's packages; without those that are not installed."""

    device: str
    versions: dict[str, str]
    load_average: float
    checks: list[Check]


class Said(msgspec.Struct):
    """A line of a check's process: a row, or its end."""

    row: Row | None = None
    not_run: str = ""
    failed: str = ""


def run_here(name: str, rig: Rig, say: Callable[[Said], object]) -> None:
    """Run one check in this process; `say` is called with each row as soon as it is measured, and with the reason of an
    end before the last row."""
    try:
        for row in CHECKS[name].rows(rig):
            say(Said(row))
    except NotRun as reason:
        say(Said(not_run=str(reason)))
    except Exception as error:
        say(Said(failed=f"{type(error).__name__}: {error}"))


def _measure(name: str, arguments: Sequence[str], until: float) -> Check:
    """Run one check in a process of its own."""
    began = time.monotonic()
    if until - began < LEAST_S:
        return Check(name, [], not_run="no time was left")
    limit_s = min(CHECKS[name].limit_s, until - began)
    command = bound([sys.executable, *PROGRAM, "--only", name, *arguments])
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit_s, check=False)
        output, failed = ended.stdout, f"its process ended with status {ended.returncode}" if ended.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, failed = error.stdout or b"", f"it took more than {limit_s:.0f} s"
    # A library may print, too.
    lines = [line for line in output.split(b"\n")[:-1] if line.startswith(b"{")]
    said = [msgspec.json.decode(line, type=Said) for line in lines]
    return Check(
        name,
        [each.row for each in said if each.row is not None],
        "".join(each.not_run for each in said),
        failed or "".join(each.failed for each in said),
        time.monotonic() - began,
    )


def _result(checks: list[Check], device: str) -> GpuResult:
    import torch

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    on_gpu = device != CPU and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    return GpuResult(name, {key: value for key, value in versions.items() if value}, os.getloadavg()[0], checks)


def main(arguments: list[str] | None = None) -> int:
    """The main function. Returns the exit status: 0 where the checks that ran were right, 1 where one was wrong or
    failed, 2 where none ran."""
    parser = argparse.ArgumentParser(prog="python -m tokenlake_bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu: the device of tests, for copies alone")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, separated by commas")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of all checks together")
    parser.add_argument("--model", type=Path, help="the folder of a model for vLLM")
    parser.add_argument("--small", action="store_true", help="sizes that test the checks themselves")
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--only", choices=tuple(CHECKS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.only is not None:
        rig = Rig(given.device, given.small, given.model)
        run_here(given.only, rig, lambda said: print(msgspec.json.encode(said).decode(), flush=True))
        return 0
    names = given.checks.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        parser.error(f"unknown checks {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    passed = ["--device", given.device, *(["--small"] if given.small else [])]
    passed += ["--model", str(given.model)] if given.model is not None else []
    until, checks = time.monotonic() + 60 * given.minutes, list[Check]()
    for name in names:
        check = _measure(name, passed, until)
        checks.append(check)
        for row in check.rows:
            figures = "  ".join(f"{figure} {value:.4g}" for figure, value in row.figures.items())
            print(f"{name}: {row.name}: {'right' if row.right else 'WRONG'}  {figures}", flush=True)
        if check.not_run or check.failed:
            print(f"{name}: {'not run: ' + check.not_run if check.not_run else 'FAILED: ' + check.failed}", flush=True)
        write_json(_result(checks, given.device), given.json_file)
    if all(check.not_run for check in checks):
        return 2
    return 0 if all(check.right for check in checks) else 1
