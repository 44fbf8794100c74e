"""The command `python -m tokenlake_bench.gpu`: all checks on one device, each with its rows, as text and JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row
from tokenlake_bench.gpu.blocks import blocks
from tokenlake_bench.gpu.copies import copies
from tokenlake_bench.gpu.kernel import kernel
from tokenlake_bench.gpu.shared import shared
from tokenlake_bench.gpu.ship import ship
from tokenlake_bench.gpu.tokens import tokens
from tokenlake_bench.report import write_json

__all__ = ["CHECKS", "GpuResult", "main", "measure"]

CHECKS: Final[dict[str, Callable[[Rig], Iterator[Row]]]] = {
    "copies": copies,
    "ipc": shared,
    "blocks": blocks,
    "kernel": kernel,
    "ship": ship,
    "vllm": tokens,
}


class Check(msgspec.Struct, frozen=True):
    """One check. `not_run`: the reason why it was not run. `failed`: the error that ended it."""

    name: str
    rows: list[Row]
    not_run: str = ""
    failed: str = ""

    @property
    def right(self) -> bool:
        """True where all rows were right, and no error ended the check."""
        return not self.failed and all(row.right for row in self.rows)


class GpuResult(msgspec.Struct, frozen=True):
    """The JSON of the command. `device`: the name of the GPU; empty without one."""

    device: str
    torch: str
    cuda: str
    load_average: float
    checks: list[Check]


def measure(rig: Rig, names: list[str], tell: Callable[[str], object]) -> GpuResult:
    """Run the checks `names`; `tell` is called with a line for each row, and for each check that is not run."""
    checks = [_check(name, rig, tell) for name in names]
    on_gpu = rig.device != CPU and torch.cuda.is_available()
    return GpuResult(
        device=torch.cuda.get_device_name(rig.device) if on_gpu else "",
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        load_average=os.getloadavg()[0],
        checks=checks,
    )


def _check(name: str, rig: Rig, tell: Callable[[str], object]) -> Check:
    rows: list[Row] = []
    try:
        for row in CHECKS[name](rig):
            rows.append(row)
            figures = "  ".join(f"{figure} {value:.4g}" for figure, value in row.figures.items())
            tell(f"{name}: {row.name}: {'right' if row.right else 'WRONG'}  {figures}")
    except NotRun as reason:
        tell(f"{name}: not run: {reason}")
        return Check(name, rows, not_run=str(reason))
    except Exception as error:
        tell(f"{name}: FAILED: {type(error).__name__}: {error}")
        return Check(name, rows, failed=f"{type(error).__name__}: {error}")
    return Check(name, rows)


def main(arguments: list[str] | None = None) -> int:
    """The main function. Returns the exit status: 0 where the checks that ran were right, 1 where one was wrong or
    failed, 2 where none ran."""
    parser = argparse.ArgumentParser(prog="python -m tokenlake_bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu: the device of tests, for copies alone")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, separated by commas")
    parser.add_argument("--model", type=Path, help="the folder of a model for vLLM")
    parser.add_argument("--small", action="store_true", help="sizes that test the checks themselves")
    parser.add_argument("--json", type=Path, dest="json_file")
    given = parser.parse_args(arguments)
    names = given.checks.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        parser.error(f"unknown checks {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    result = measure(Rig(given.device, given.small, given.model), names, print)
    if given.json_file is not None:
        write_json(result, given.json_file)
    if all(check.not_run for check in result.checks):
        return 2
    return 0 if all(check.right for check in result.checks) else 1
