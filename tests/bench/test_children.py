"""A child process ends with the process that started it, for any reason, and not with the thread that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tokenlake_testing.children import end_with_parent, start_child

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
PARENT = """
import subprocess, sys
from tokenlake_testing.children import start_child
child = start_child(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
"""
MULTIPROCESSING_PARENT = """
import multiprocessing, os, sys, time
from tests.bench.test_children import wait_to_be_killed
if __name__ == "__main__":
    theirs, ours = multiprocessing.Pipe()
    child = multiprocessing.get_context(sys.argv[1]).Process(target=wait_to_be_killed, args=(ours,))
    child.start()
    theirs.recv()
    print(child.pid, flush=True)
    sys.stdin.read()
"""
BENCHES = [
    ["bench", "cache-hit", "--limit", "5000", "--nodes", "2"],
    ["bench", "soak", "--minutes", "60", "--nodes", "2"],
]


def wait_until(holds: Callable[[], bool], state: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, state
        time.sleep(0.01)


def ended(process: psutil.Process) -> bool:
    """A zombie counts as ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_to_be_killed(ready: Connection) -> None:
    end_with_parent()
    ready.send(True)
    signal.pause()


def test_the_process_is_the_command_s_own() -> None:
    child = start_child([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True)
    output, _ = child.communicate()
    assert (child.returncode, int(output)) == (0, child.pid)


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such program: '.*absent'"):
        start_child([str(tmp_path / "absent")])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait()
        wait_until(lambda: ended(child), "the child has ended")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_ends_with_its_parent(tmp_path: Path, method: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(MULTIPROCESSING_PARENT)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(script), method]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        wait_until(lambda: ended(child), "the child has ended")


def test_only_a_process_of_multiprocessing_has_such_a_parent() -> None:
    with pytest.raises(RuntimeError, match="multiprocessing"):
        end_with_parent()


def test_a_child_outlives_the_thread_that_started_it() -> None:
    """The child still runs after the thread that started it has ended."""
    started: list[subprocess.Popen[str]] = []
    thread = threading.Thread(
        target=lambda: started.append(start_child(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    )
    thread.start()
    thread.join()
    output, _ = started[0].communicate("still here")
    assert (started[0].returncode, output) == (0, "still here")


@pytest.mark.live
@pytest.mark.parametrize("arguments", BENCHES, ids=lambda arguments: arguments[1])
def test_a_killed_benchmark_leaves_no_process(arguments: list[str]) -> None:
    command = [sys.executable, "-c", "from tokenlake.command import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as bench:
        me = psutil.Process(bench.pid)
        daemons: list[psutil.Process] = []

        def serving() -> bool:
            # A daemon may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                daemons[:] = [child for child in me.children() if "tokenlake_server" in " ".join(child.cmdline())]
                return len(daemons) > 0 and all(len(daemon.net_connections("inet")) > 1 for daemon in daemons)
            return False

        try:
            wait_until(serving, "the benchmark's daemons listen")
            started = me.children(recursive=True)
        finally:
            bench.kill()
        bench.wait()
    wait_until(lambda: all(map(ended, started)), f"all of {started} have ended")
