"""Each change of the connection's state is one line in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tokenlake_client.engines.common.status import PoolStatus

NAME = "test of the status"
CONNECTED = "TokenLake: connected to the pool: node a at /run/lake.sock"
LOST = "TokenLake: lost the daemon at /run/lake.sock; serving without the pool"
BACK = "TokenLake: the daemon at /run/lake.sock is back; using the pool again"


def test_each_change_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    status, pool = PoolStatus(logging.getLogger(NAME)), SimpleNamespace(socket="/run/lake.sock", node="a")

    def lines(there: Any, *, connected: bool = True, silent: bool = False) -> list[tuple[str, str]]:
        caplog.clear()
        pool.connected = connected
        for _ in range(2):
            status.update(there, silent=silent)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    assert lines(None) == []
    assert lines(pool) == [("INFO", CONNECTED)]
    for _ in range(2):
        assert lines(pool, connected=False) == [("WARNING", LOST)]
        assert lines(pool, connected=False, silent=True) == []
        assert lines(pool) == [("INFO", BACK)]
    ((level, line),) = lines(pool, silent=True)
    assert level == "WARNING"
    assert "does not answer" in line
