"""Each change of the connection's state is one line in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tokenlake_client.engines.vllm.status import PoolStatus

NAME = "test of the status"


def connection() -> Any:
    return SimpleNamespace(socket="/run/lake.sock", node="a", connected=True)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture
def status(caplog: pytest.LogCaptureFixture) -> PoolStatus:
    caplog.set_level(logging.INFO, NAME)
    return PoolStatus(logging.getLogger(NAME))


def test_the_first_connection_is_logged_once(status: PoolStatus, caplog: pytest.LogCaptureFixture) -> None:
    status.update(None, silent=False)
    assert lines(caplog) == []
    for _ in range(3):
        status.update(connection(), silent=False)
    assert lines(caplog) == [("INFO", "TokenLake: connected to the pool: node a at /run/lake.sock")]


def test_a_lost_daemon_and_its_return_are_logged(status: PoolStatus, caplog: pytest.LogCaptureFixture) -> None:
    pool = connection()
    status.update(pool, silent=False)
    lines(caplog)
    for _ in range(2):
        pool.connected = False
        status.update(pool, silent=False)
        status.update(pool, silent=True)
        pool.connected = True
        status.update(pool, silent=False)
        assert lines(caplog) == [
            ("WARNING", "TokenLake: lost the daemon at /run/lake.sock; serving without the pool"),
            ("INFO", "TokenLake: the daemon at /run/lake.sock is back; using the pool again"),
        ]


def test_a_silent_daemon_is_logged(status: PoolStatus, caplog: pytest.LogCaptureFixture) -> None:
    status.update(connection(), silent=False)
    lines(caplog)
    status.update(connection(), silent=True)
    status.update(connection(), silent=True)
    ((level, line),) = lines(caplog)
    assert level == "WARNING"
    assert "does not answer" in line
