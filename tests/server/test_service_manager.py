"""systemd is told that the daemon serves, that its loop runs, and that it ends: a stand-in reads the messages."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.robustness.live import LIMIT_S
from tests.server.test_cli import SERVE, words
from tokenlake_server.start.service_manager import ServiceManager


def listening(address: str) -> socket.socket:
    """Where systemd reads."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(address)
    sock.settimeout(LIMIT_S)
    return sock


def heard(manager: socket.socket, line: str) -> list[str]:
    """The messages up to the one that has this line."""
    messages = [manager.recv(4096).decode()]
    while line not in messages[-1].split("\n"):
        messages.append(manager.recv(4096).decode())
    return messages


def unread(manager: socket.socket) -> int:
    """Take the messages that are there; returns their number."""
    manager.setblocking(False)
    for number in itertools.count():
        try:
            manager.recv(4096)
        except BlockingIOError:
            manager.settimeout(LIMIT_S)
            return number
    raise AssertionError


@pytest.mark.live
@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_a_daemon_tells_its_manager(abstract: bool, tmp_path: Path) -> None:
    name = f"tokenlake-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with listening(f"\0{name}" if abstract else name) as manager:
        environment = {"NOTIFY_SOCKET": f"@{name}" if abstract else name, "WATCHDOG_USEC": "200000"}
        with subprocess.Popen([*SERVE, *words(tmp_path)], env=os.environ | environment) as daemon:
            first = heard(manager, "READY=1")
            assert len(first) == 1, "the daemon says first that it serves"
            assert f"STATUS=serves at {tmp_path}/x.sock; memory is being prepared" in first[0].split("\n")
            heard(manager, f"STATUS=serves at {tmp_path}/x.sock")
            for _ in range(3):
                heard(manager, "WATCHDOG=1")
            daemon.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
            unread(manager)
            daemon.send_signal(signal.SIGCONT)
            heard(manager, "WATCHDOG=1")
            daemon.terminate()
            heard(manager, "STOPPING=1")
        assert daemon.returncode == 0


async def test_a_manager_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, address = asyncio.get_running_loop(), str(tmp_path / "notify")
    of_another = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    with listening(address) as manager:
        for environment in ({}, of_another, of_another | {"WATCHDOG_PID": str(os.getpid()), "WATCHDOG_USEC": "soon"}):
            ServiceManager(environment).keep_alive(loop)
        assert unread(manager) == 0
        ServiceManager(of_another).tell("READY=1", "STATUS=x")
        assert manager.recv(4096) == b"READY=1\nSTATUS=x"
    ServiceManager(of_another).tell("READY=1")
    assert "the service manager was not told READY=1" in caplog.text
