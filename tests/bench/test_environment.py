"""A benchmark that needs another environment names it in one line, before it starts anything."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine.environment import check_interpreter, check_modules

TOKENLAKE = "from tokenlake.command import main; main()"
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {absent!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nothing installed."""
    directory_node = tmp_path_factory.mktemp("bare")
    venv.create(directory_node, with_pip=False)
    return directory_node / "bin" / "python"


def tokenlake(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", prelude + TOKENLAKE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_module_that_is_not_installed_is_named() -> None:
    check_modules("json", "tokenlake")
    with pytest.raises(ModuleNotFoundError) as caught:
        check_modules("json", "not_installed_anywhere")
    assert caught.value.name == "not_installed_anywhere"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_interpreter_without_the_engine_is_refused(
    bare_python: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigurationError, match=f"'python'.*interpreter with {engine} .*; it has no .*{engine}"):
        check_interpreter(bare_python, engine)


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'python'.*it does not run"):
        check_interpreter(tmp_path / "absent", "vllm")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_bench_engine_names_a_missing_engine(bare_python: Path, engine: str) -> None:
    ended = tokenlake("bench", "engine", "--engine", engine, "--python", str(bare_python))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"an interpreter with {engine}" in ended.stderr.strip().splitlines()[-1]


def test_the_demo_without_torch_names_what_to_install() -> None:
    ended = tokenlake("demo", prelude=WITHOUT.format(absent={"torch"}))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "pip install 'tokenlake[transformers]'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "starting" not in ended.stdout
