"""The script that runs all checks on a machine with a GPU, from a folder of wheels: a dry run without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from tokenlake_bench.gpu import wheels
from tokenlake_bench.gpu.command import CHECKS, GpuResult

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
THERE = "3.12"
"""The version of Python of the machine that the script is for."""


def run(command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def interpreter(version: str) -> str | None:
    """An interpreter of this version; None where there is none."""
    places = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")]
    return next((str(place) for place in places if place and run([place, "-c", ""]).returncode == 0), None)


def folder_of(version: str, folder: Path) -> Path:
    if wheels.main([str(folder), "--python", version]):
        pytest.skip("no package index can be reached")
    assert sum(wheel.stat().st_size for wheel in folder.iterdir()) < 48 << 20, "they travel with the working tree"
    return folder


def dry_run(python: str, folder: Path, results: Path) -> None:
    results.mkdir()
    words: list[str | Path] = ["bash", ROOT / "bench" / "gpu.sh", folder, results, "--device", "cpu", "--small"]
    done = run(words, PYTHON=python)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = msgspec.json.decode((results / "gpu.json").read_bytes(), type=GpuResult).checks
    assert [check.name for check in checks] == list(CHECKS)
    assert [check.name for check in checks if not check.right] == []
    assert sum(bool(check.rows) for check in checks) >= 4


@pytest.mark.timeout(LIMIT_S)
def test_a_dry_run_with_this_python(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    dry_run(sys.executable, folder_of(version, tmp_path / "wheels"), tmp_path / "results")


@pytest.mark.timeout(LIMIT_S)
def test_a_dry_run_with_the_python_of_the_machine(tmp_path: Path) -> None:
    python = interpreter(THERE)
    if python is None or run([python, "-c", "import torch, transformers"]).returncode:
        pytest.skip(f"no Python {THERE} with torch and transformers")
    dry_run(python, folder_of(THERE, tmp_path / "wheels"), tmp_path / "results")


@pytest.mark.timeout(LIMIT_S)
def test_a_daemon_starts_from_the_wheels(tmp_path: Path) -> None:
    """With the Python of the machine, and numpy, which it has."""
    python = interpreter(THERE)
    if python is None:
        pytest.skip(f"no Python {THERE}")
    folder, site = folder_of(THERE, tmp_path / "wheels"), tmp_path / "site"
    command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--target", site]
    assert run([*command, "--no-index", "--no-deps", *folder.iterdir()]).returncode == 0
    assert run([*command, "--constraint", wheels.CONSTRAINTS, "numpy"]).returncode == 0
    path = os.pathsep.join(map(str, [site, ROOT, *(ROOT / each for each in ("server", "client", "proto", "bench"))]))
    program = (
        "from tests.robustness.live import Prompt, daemons, read, store, LAYOUT\n"
        "with daemons(2) as cluster, cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:\n"
        "    store(pool, Prompt(1, 4))\n"
        "    print(read(other, Prompt(1, 4)))\n"
    )
    done = run([python, "-c", program], PYTHONPATH=path)
    assert done.stdout.split() == ["4"], done.stderr
