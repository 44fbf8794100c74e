"""The command `python -m tokenlake_bench.gpu`: all checks on one device, each with its rows, as text and JSON.

Each check runs in a process of its own with a limit of its own: one that hangs, or that ends the GPU's context, costs
the others nothing. The JSON is written after every row, so that a machine that is taken away costs what was left.
"""

from __future__ import annotations

import argparse
import os
import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row
from tokenlake_bench.gpu.blocks import blocks
from tokenlake_bench.gpu.copies import copies
from tokenlake_bench.gpu.kernel import kernel
from tokenlake_bench.gpu.locks import locks
from tokenlake_bench.gpu.shared import shared
from tokenlake_bench.gpu.ship import ship
from tokenlake_bench.gpu.tokens import tokens
from tokenlake_bench.gpu.transformers_check import transformers
from tokenlake_bench.report import write_json
from tokenlake_testing.children import start_child


class Named(NamedTuple):
    """A check: its rows, and the seconds after which it is ended."""

    rows: Callable[[Rig], Iterator[Row]]
    limit_s: float


CHECKS: Final[dict[str, Named]] = {
    "kernel": Named(kernel, 90.0),
    "transformers": Named(transformers, 180.0),
    "copies": Named(copies, 40.0),
    "locks": Named(locks, 40.0),
    "ipc": Named(shared, 40.0),
    "ship": Named(ship, 60.0),
    "blocks": Named(blocks, 60.0),
    "vllm": Named(tokens, 300.0),
}
"""In the order in which they run: what a cut may cost comes last."""
PROGRAM = ["-m", "tokenlake_bench.gpu"]
"""What runs one check in a process of its own."""
PACKAGES: Final = ("torch", "triton", "transformers", "vllm")
END_S: Final = 20.0
"""Within which a process ends after its last row."""
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


class _Process:
    """A check in a process of its own."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self._process = start_child([sys.executable, *PROGRAM, "--only", name, *arguments], stdout=subprocess.PIPE)

    def said(self, until: float) -> Iterator[Said]:
        """What the check says, until it ends. Ends the process. Raises TimeoutError where it goes on after `until`."""
        pipe = self._process.stdout
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        kept = b""
        with selectors.DefaultSelector() as selector, self._process:
            selector.register(pipe, selectors.EVENT_READ)
            try:
                while True:
                    left = until - time.monotonic()
                    if left <= 0 or not selector.select(left):
                        raise TimeoutError
                    data = pipe.read()
                    if not data:
                        break
                    *lines, kept = (kept + data).split(b"\n")
                    # A library may print, too.
                    yield from (msgspec.json.decode(line, type=Said) for line in lines if line.startswith(b"{"))
                if status := self._process.wait(END_S):
                    yield Said(failed=f"its process ended with status {status}")
            finally:
                self._process.kill()


def _measure(name: str, arguments: Sequence[str], until: float, tell: Callable[[Check], object]) -> Check:
    """Run one check in a process of its own; `tell` is called with the check so far, after each row."""
    limit_s, began = CHECKS[name].limit_s, time.monotonic()
    check = Check(name, [])
    if until - began < LEAST_S:
        return Check(name, [], not_run="no time was left")
    try:
        for said in _Process(name, arguments).said(min(until, began + limit_s)):
            rows = [*check.rows, said.row] if said.row is not None else check.rows
            check = Check(name, rows, said.not_run, said.failed, time.monotonic() - began)
            tell(check)
    except TimeoutError:
        check = Check(name, check.rows, failed=f"it took more than {time.monotonic() - began:.0f} s")
    return msgspec.structs.replace(check, seconds=time.monotonic() - began)


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
        run_here(given.only, Rig(given.device, given.small, given.model), _print_line)
        return 0
    names = given.checks.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        parser.error(f"unknown checks {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    passed = ["--device", given.device, *(["--small"] if given.small else [])]
    passed += ["--model", str(given.model)] if given.model is not None else []
    until, checks = time.monotonic() + 60 * given.minutes, list[Check]()

    def write(check: Check) -> None:
        if given.json_file is not None:
            write_json(_result([*checks, check], given.device), given.json_file)

    for name in names:
        told = 0

        def tell(check: Check) -> None:
            nonlocal told
            for row in check.rows[told:]:
                print(line_of(check.name, row), flush=True)
            told = len(check.rows)
            write(check)

        check = _measure(name, passed, until, tell)
        if check.not_run or check.failed:
            print(f"{name}: {'not run: ' + check.not_run if check.not_run else 'FAILED: ' + check.failed}", flush=True)
        write(check)
        checks.append(check)
    if all(check.not_run for check in checks):
        return 2
    return 0 if all(check.right for check in checks) else 1


def line_of(name: str, row: Row) -> str:
    """A row as a line of text."""
    figures = "  ".join(f"{figure} {value:.4g}" for figure, value in row.figures.items())
    return f"{name}: {row.name}: {'right' if row.right else 'WRONG'}  {figures}"


def _print_line(said: Any) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)
