"""Programs that are forked are as those that an interpreter starts: status, signals, descriptors, environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tokenlake_testing.fork_server import ForkedProcess, ForkServer, fork

PROGRAM = """
import os, sys, time
print(os.getpid(), os.getppid(), sys.argv[1:], os.environ["WORD"], os.getsid(0) == os.getpid(), flush=True)
print("error", file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    time.sleep(3600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    made = ForkServer("json")
    yield made
    made.close()


def start(server: ForkServer, tmp_path: Path, argument: str) -> ForkedProcess:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        outputs = {1: out.fileno(), 2: err.fileno()}
        return fork(server.control, "program", [argument], outputs, {"WORD": "given"}, new_session=True)


def test_a_program_ends(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "3")
    assert process.wait(LIMIT_S) == process.poll() == process.returncode == 3
    pid, _, *rest = (tmp_path / "out").read_text().split(maxsplit=2)
    assert (int(pid), rest) == (process.pid, ["['3'] given True\n"])
    assert (tmp_path / "err").read_text() == "error\n"
    process.kill()


def test_a_program_is_killed(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "wait")
    wait_until(lambda: bool((tmp_path / "out").read_text()), "it runs")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_programs_end_with_their_server(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "wait")
    wait_until(lambda: bool((tmp_path / "out").read_text()), "it runs")
    parent = int((tmp_path / "out").read_text().split()[1])
    os.kill(parent, signal.SIGKILL)
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "the program has ended")


def test_a_module_that_cannot_be_imported_is_told(server: ForkServer) -> None:
    with (
        contextlib.closing(ForkServer("broken")) as broken,
        pytest.raises(RuntimeError, match="the fork server ended before it started program"),
    ):
        fork(broken.control, "program", [], {}, {})
