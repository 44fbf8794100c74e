"""The dispatcher of commands: it lists and finds them, passes their arguments on, and names the package that a missing
one needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NoReturn

import pytest

from tokenlake import command

COMMANDS = [
    *("serve", "config", "ca"),
    *("status", "top", "page", "explain", "doctor", "check", "members", "events"),
    *("drain", "remove", "evict", "warm", "pin", "unpin", "cold"),
    *("demo", "bench", "workload"),
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of `tokenlake ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["tokenlake", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def offer(monkeypatch: pytest.MonkeyPatch, name: str, target: str, *others: str) -> None:
    """Make `name` and `others` the only commands, implemented by `target` ("module:attribute")."""
    entries = [EntryPoint(name=each, value=target, group=command.GROUP) for each in (name, *others)]
    monkeypatch.setattr(command, "entry_points", lambda group: entries)


def accept(args: list[str], prog_name: str, standalone_mode: bool) -> None:
    print(args, prog_name, standalone_mode)


def leave(args: list[str], prog_name: str, standalone_mode: bool) -> NoReturn:
    sys.exit(7)


def lack_torch(args: list[str], prog_name: str, standalone_mode: bool) -> NoReturn:
    raise ModuleNotFoundError("No module named 'torch.cuda'", name="torch.cuda")


def lack_one_of_ours(args: list[str], prog_name: str, standalone_mode: bool) -> NoReturn:
    raise ModuleNotFoundError("No module named 'tokenlake.nothing'", name="tokenlake.nothing")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_alone_it_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    offer(monkeypatch, "workload", f"{__name__}:accept", *COMMANDS[:-1])
    assert run(monkeypatch, *arguments) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [words[0] for words in listed] == COMMANDS
    assert all(len(words) > 2 for words in listed)


def test_each_command_has_a_summary() -> None:
    assert list(command.SUMMARIES) == COMMANDS


def test_each_entry_point_is_a_command() -> None:
    click = pytest.importorskip("click")
    pytest.importorskip("grpc")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][command.GROUP]
    assert [*points, *command.BENCH_COMMANDS] == sorted(COMMANDS, key=[*points, *command.BENCH_COMMANDS].index)
    for name, value in points.items():
        assert isinstance(EntryPoint(name=name, value=value, group=command.GROUP).load(), click.Command)


def test_an_unknown_command_names_the_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "workload", f"{__name__}:accept", *COMMANDS[:-1])
    assert run(monkeypatch, "xyz") == 2
    assert capsys.readouterr().err == f"tokenlake: unknown command 'xyz'; known: {', '.join(COMMANDS)}\n"
    assert run(monkeypatch, "sevre") == 2
    assert "unknown command 'sevre'; did you mean 'serve'? known: " in capsys.readouterr().err


def test_the_rest_of_the_line_goes_to_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "serve", f"{__name__}:accept")
    assert run(monkeypatch, "serve", "--memory", "1GiB") == 0
    assert capsys.readouterr().out == "['--memory', '1GiB'] tokenlake serve True\n"


def test_the_exit_status_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "serve", f"{__name__}:leave")
    assert run(monkeypatch, "serve") == 7


@pytest.mark.parametrize("name", command.BENCH_COMMANDS)
def test_without_the_benchmarks_their_commands_name_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    offer(monkeypatch, "serve", f"{__name__}:accept")
    assert run(monkeypatch, name, "--help") == 2
    advice = capsys.readouterr().err
    assert "pip install tokenlake-bench" in advice
    assert "(in a clone of the repository: pip install . ./bench)" in advice
    assert run(monkeypatch) == 0
    assert "More commands (demo, bench, workload): pip install tokenlake-bench" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "missing", "requirement"),
    [
        ("tokenlake_server.cli:serve", "click", "'tokenlake[server]'"),
        ("tokenlake_server.cli:serve", "prometheus_client", "'tokenlake[server]'"),
        ("tokenlake_server.cli:serve", "torch", "'tokenlake[server,transformers]'"),
        ("tokenlake_server.cli:serve", "unheard_of", "'tokenlake[server]'"),
        ("tokenlake_operator.status:status", "grpc", "'tokenlake[server]'"),
        ("tokenlake_operator.status:status", "google", "'tokenlake[server]'"),
        ("tokenlake_operator.explain:explain", "rich", "'tokenlake[server]'"),
        ("tokenlake_bench.cli:demo", "click", "'tokenlake[server]'"),
        ("tokenlake_bench.cli:demo", "scipy", "'tokenlake[scheduler]'"),
        ("tokenlake_bench.cli:demo", "torch", "'tokenlake[transformers]'"),
        ("tokenlake_bench.cli:demo", "zstandard", "tokenlake-bench"),
    ],
)
def test_the_requirement_that_brings_a_module(target: str, missing: str, requirement: str) -> None:
    entry = EntryPoint(name="x", value=target, group=command.GROUP)
    assert command.requirement_of(entry, missing) == requirement


def test_an_extra_missed_while_running_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "demo", f"{__name__}:lack_torch")
    assert run(monkeypatch, "demo") == 2
    error = capsys.readouterr().err
    assert "needs the module 'torch'" in error
    assert "pip install 'tokenlake[transformers]'" in error
    assert "(in a clone of the repository: pip install '.[transformers]')" in error


def test_a_module_of_ours_that_is_missing_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "serve", f"{__name__}:lack_one_of_ours")
    monkeypatch.setattr(sys, "argv", ["tokenlake", "serve"])
    with pytest.raises(ModuleNotFoundError, match="tokenlake.nothing"):
        command.main()


def test_listing_imports_no_extra() -> None:
    program = (
        "import sys; sys.argv = ['tokenlake']\n"
        "from tokenlake.command import main\n"
        "heavy = {'click', 'rich', 'numpy', 'tokenlake_server'}\n"
        "try: main()\n"
        "except SystemExit: print(sorted(heavy & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
