"""Completion in a shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from tests.operator.scene import run
from tokenlake import command
from tokenlake_operator import completion as module
from tokenlake_operator.completion import completion

ENTRIES = {
    "status": "tokenlake_operator.status:status",
    "serve": "tokenlake_server.cli:serve",
    "completion": "tokenlake_operator.completion:completion",
    "absent": "not_installed_anywhere:absent",
}


class Entries(list[EntryPoint]):
    @property
    def names(self) -> set[str]:
        return {each.name for each in self}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Entries(EntryPoint(name=name, value=value, group=command.GROUP) for name, value in ENTRIES.items())
    monkeypatch.setattr(module, "entry_points", lambda group: made)
    monkeypatch.setattr(command, "entry_points", lambda group: made)


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """The words that bash offers behind a command line."""
    words = line.split(" ")
    monkeypatch.setenv(command.COMPLETE_VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setattr(sys, "argv", ["tokenlake"])
    with pytest.raises(SystemExit):
        command.main()
    return [each.partition(",")[2] for each in capsys.readouterr().out.splitlines()]


def test_commands_and_options(
    entries: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(monkeypatch, capsys, "tokenlake s") == ["serve", "status"]
    assert "--json" in completed(monkeypatch, capsys, "tokenlake status --")
    assert completed(monkeypatch, capsys, "tokenlake serve --match-d") == ["--match-deadline-ms"]
    assert completed(monkeypatch, capsys, "tokenlake absent --") == ["--help"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_the_variable(entries: None, shell: str) -> None:
    script = run(completion, shell).stdout
    assert f"{command.COMPLETE_VARIABLE}={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True)


def test_without_a_shell_the_shells_are_named() -> None:
    result = run(completion)
    assert (result.exit_code, "bash, zsh, fish" in result.stderr) == (2, True)
