"""The built wheel, installed with its base dependencies only, far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenlake", "tokenlake_bench", "tokenlake_client", "tokenlake_query", "tokenlake_server")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Nothing of the checkout may help: neither its path nor its environment's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def succeed(*command: str | Path, cwd: Path) -> str:
    result = call(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    succeed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that holds the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    constraints = ROOT / "constraints.txt"
    succeed(home / "bin/python", "-m", "pip", "install", "--constraint", constraints, wheel, cwd=home)
    return home / "bin"


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_rules_and_client_import_without_extras(binaries: Path, tmp_path: Path) -> None:
    program = "import tokenlake, tokenlake_client; print(tokenlake.__file__, tokenlake_client.__file__)"
    for path in succeed(binaries / "python", "-c", program, cwd=tmp_path).split():
        assert Path(path).is_relative_to(binaries.parent)


def test_the_base_is_numpy_msgspec_and_xxhash(binaries: Path, tmp_path: Path) -> None:
    listed = succeed(binaries / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path)
    installed = {line.partition("==")[0] for line in listed.splitlines()}
    assert installed - {"pip", "setuptools"} == {"tokenlake", "numpy", "msgspec", "xxhash"}


def test_the_command_lists_its_commands(binaries: Path, tmp_path: Path) -> None:
    listed = succeed(binaries / "tokenlake", cwd=tmp_path)
    assert all(f"  {name} " in listed for name in ("serve", "replay", "config", "demo", "bench"))


@pytest.mark.parametrize(("name", "extra"), [("serve", "server"), ("config", "server"), ("demo", "bench")])
def test_without_the_extra_it_prints_what_to_install(binaries: Path, tmp_path: Path, name: str, extra: str) -> None:
    result = call(binaries / "tokenlake", name, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"pip install 'tokenlake[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr
