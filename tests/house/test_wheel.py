"""The built wheels, installed outside the checkout: TokenLake's with its base dependencies only, as in an engine's
environment, and both together, as for benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.version import stated, written
from tokenlake.command import BENCH_COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tokenlake",
    "tokenlake_client",
    "tokenlake_proto",
    "tokenlake_query",
    "tokenlake_server",
    "tokenlake_operator",
}
BENCH_PACKAGES = {"tokenlake_bench", "tokenlake_testing"}


def project(directory: Path) -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return table


def test_all_files_state_one_version() -> None:
    """If this fails, run `python -m tests.house.version`."""
    assert {version for _, version in written()} == {stated()}


def test_the_command_knows_the_names_of_the_benchmarks() -> None:
    points = project(ROOT / "bench")["entry-points"]
    assert list(points["tokenlake.commands"]) == list(BENCH_COMMANDS)  # type: ignore[index]


def test_the_licences_are_the_same() -> None:
    """Each distribution has its own copy of the licence, because a source distribution takes no file from outside its
    directory."""
    assert (ROOT / "bench" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # The wheels must run without the checkout's path and without variables of its environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def succeed(*command: str | Path, cwd: Path) -> str:
    result = call(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(directory: Path, out: Path) -> Path:
    """Build a wheel from the source distribution: a file that is missing there is missing in the wheel."""
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, directory, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def install(home: Path, *wheels: Path) -> Path:
    """Install wheels into a new environment. Returns its directory of commands."""
    venv.create(home)
    constraints = ROOT / "constraints.txt"
    pip(home / "bin", "install", "--no-compile", "--constraint", constraints, *wheels)
    return home / "bin"


def pip(binaries: Path, *command: str | Path) -> str:
    """Run pip for an environment, which needs none of its own."""
    return succeed(sys.executable, "-m", "pip", "--python", binaries / "python", *command, cwd=binaries)


def packages(wheel: Path) -> set[str]:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return {top for top in tops if not top.endswith(".dist-info")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bench_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "bench", tmp_path_factory.mktemp("bench-wheel"))


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of commands of an environment with TokenLake's wheel and its base dependencies."""
    return install(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture(scope="module")
def bench_binaries(wheel: Path, bench_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of commands of an environment with both wheels."""
    return install(tmp_path_factory.mktemp("bench-environment"), wheel, bench_wheel)


@pytest.mark.nightly
@pytest.mark.timeout(600)
class TestWheels:
    def test_the_wheel_holds_no_benchmark(self, wheel: Path) -> None:
        assert packages(wheel) == PACKAGES
        assert {f"{package}/py.typed" for package in PACKAGES} <= set(zipfile.ZipFile(wheel).namelist())

    def test_the_wheel_holds_the_files_of_the_page(self, wheel: Path) -> None:
        files = ROOT / "server" / "tokenlake_server" / "page" / "static"
        packed = zipfile.ZipFile(wheel)
        for path in files.iterdir():
            assert packed.read(f"tokenlake_server/page/static/{path.name}") == path.read_bytes()

    def test_the_wheel_of_the_benchmarks_holds_nothing_else(self, bench_wheel: Path) -> None:
        names = zipfile.ZipFile(bench_wheel).namelist()
        assert packages(bench_wheel) == BENCH_PACKAGES
        assert {f"{package}/py.typed" for package in BENCH_PACKAGES} <= set(names)
        assert any(name.endswith("licenses/LICENSE") for name in names)

    def test_rules_and_client_import_without_extras(self, binaries: Path, tmp_path: Path) -> None:
        program = "import tokenlake, tokenlake_client; print(tokenlake.__file__, tokenlake_client.__file__)"
        for path in succeed(binaries / "python", "-c", program, cwd=tmp_path).split():
            assert Path(path).is_relative_to(binaries.parent)

    def test_the_base_is_four_packages(self, binaries: Path) -> None:
        listed = pip(binaries, "list", "--format", "freeze")
        installed = {line.partition("==")[0] for line in listed.splitlines()}
        assert installed == {"tokenlake", "numpy", "msgspec", "sortedcontainers", "xxhash"}

    def test_one_extra_has_daemon_and_control_plane(self, wheel: Path, tmp_path: Path) -> None:
        binaries = install(tmp_path / "node", Path(f"{wheel}[server]"))
        program = "import tokenlake_server.cli, tokenlake_server.control.server, tokenlake_operator.status"
        succeed(binaries / "python", "-c", program, cwd=tmp_path)

    @pytest.mark.parametrize(("name", "package"), [("serve", "'tokenlake[server]'"), ("demo", "tokenlake-bench")])
    def test_without_an_extra_it_prints_what_to_install(
        self, binaries: Path, tmp_path: Path, name: str, package: str
    ) -> None:
        result = call(binaries / "tokenlake", name, cwd=tmp_path)
        assert result.returncode == 2, result.stdout + result.stderr
        assert f"pip install {package}" in result.stderr
        assert "Traceback" not in result.stderr

    def test_with_both_the_commands_of_the_benchmarks_appear(self, bench_binaries: Path, tmp_path: Path) -> None:
        listed = succeed(bench_binaries / "tokenlake", cwd=tmp_path)
        assert all(f"  {name} " in listed for name in ("serve", *BENCH_COMMANDS))
        for name in BENCH_COMMANDS:
            assert f"Usage: tokenlake {name}" in succeed(bench_binaries / "tokenlake", name, "--help", cwd=tmp_path)

    def test_a_benchmark_runs_from_the_wheels(self, bench_binaries: Path, tmp_path: Path) -> None:
        """The benchmark runs against daemons of TokenLake's wheel."""
        line = ["bench", "cache-hit", "--nodes", "2", "--limit", "20", "--json", "result.json"]
        succeed(bench_binaries / "tokenlake", *line, cwd=tmp_path)
        assert '"wrong_bytes":0' in (tmp_path / "result.json").read_text().replace(" ", "")
