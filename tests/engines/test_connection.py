"""A request never waits for an attempt to connect."""

from __future__ import annotations

import threading
import time

import pytest

from tests.engines.faulty_pool import FaultyPool
from tests.engines.test_layouts import layout
from tokenlake.errors import CredentialRefused, Unreachable
from tokenlake_client.engines.common import connection as module
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.pool import Pool


class Daemon:
    """Answers attempts to connect: `error` refuses them, a closed `gate` delays them."""

    def __init__(self) -> None:
        self.pool = FaultyPool(layout())
        self.error: Exception | None = Unreachable("no daemon")
        self.gate = threading.Event()
        self.gate.set()
        self.attempts = 0
        self.reports: list[str] = []
        self.now = 100.0

    def connect(self) -> Pool:
        self.attempts += 1
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return self.pool

    def report(self, what: str, error: BaseException) -> None:
        self.reports.append(f"{what}: {error}")

    def connection(self) -> Connection:
        return Connection(self.connect, self.report, clock=lambda: self.now)


def test_one_attempt_at_the_start_and_one_per_second() -> None:
    daemon = Daemon()
    connection = daemon.connection()
    for _ in range(5):
        assert connection.get() is None
    assert daemon.attempts == 1
    daemon.now += module.RETRY_S
    daemon.error = None
    assert connection.get() is daemon.pool
    assert connection.get() is daemon.pool
    assert daemon.attempts == 2


def test_a_request_does_not_wait_for_a_hanging_attempt() -> None:
    daemon = Daemon()
    connection = daemon.connection()
    daemon.now += module.RETRY_S
    daemon.gate.clear()
    daemon.error = None
    assert connection.get() is None
    daemon.now += module.RETRY_S
    assert connection.get() is None
    assert daemon.attempts == 2
    daemon.gate.set()
    until = time.monotonic() + 10
    while connection.get() is None:
        assert time.monotonic() < until
    assert connection.get() is daemon.pool


def test_a_refused_connection_is_retried_later() -> None:
    daemon = Daemon()
    daemon.error = CredentialRefused("unknown token")
    connection = daemon.connection()
    daemon.now += 2 * module.RETRY_S
    assert connection.get() is None
    assert daemon.attempts == 1
    assert daemon.reports == ["connecting to the pool: unknown token"]


def test_a_connection_opened_after_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon()
    connection = daemon.connection()
    daemon.now += module.RETRY_S
    daemon.gate.clear()
    daemon.error = None
    assert connection.get() is None
    closed = threading.Event()
    monkeypatch.setattr(daemon.pool, "close", closed.set)
    connection.close()
    daemon.gate.set()
    assert closed.wait(10)
    assert connection.get() is None


def test_a_pool_that_cannot_say_whether_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised into the engine, which leaves the pool alone for a second."""
    daemon = Daemon()
    daemon.error = None
    connection = daemon.connection()

    def broken(_: object) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(FaultyPool, "connected", property(broken))
    connection.failed()
    assert connection.get() is None
    daemon.now += module.RETRY_S
    assert connection.get() is daemon.pool


def test_a_pool_that_is_connected_again_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that failed while the pool was connected means a slow daemon, which is left alone for a second."""
    daemon = Daemon()
    daemon.error = None
    connection = daemon.connection()
    connected = True
    monkeypatch.setattr(FaultyPool, "connected", property(lambda _: connected))
    connection.failed()
    assert connection.get() is None
    daemon.now += module.RETRY_S
    assert connection.get() is daemon.pool
    connected = False
    connection.failed()
    assert connection.get() is None
    connected = True
    assert connection.get() is daemon.pool
    connection.failed()
    assert connection.get() is None
