"""The connection never holds a request up."""

from __future__ import annotations

import threading
import time

import pytest

from tests.engines.memory_pool import MemoryPool, as_pool
from tests.engines.test_layouts import layout
from tokenlake.errors import CredentialRefused, Unreachable
from tokenlake_client.engines.common import connection as module
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.pool import CachePool


class Daemon:
    """Answers connection attempts; `error` refuses them, `gate` holds them up."""

    def __init__(self) -> None:
        self.pool = MemoryPool(layout())
        self.error: Exception | None = Unreachable("nobody there")
        self.gate = threading.Event()
        self.gate.set()
        self.attempts = 0
        self.reports: list[str] = []
        self.now = 100.0

    def connect(self) -> CachePool:
        self.attempts += 1
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return as_pool(self.pool)

    def report(self, what: str, error: BaseException) -> None:
        self.reports.append(f"{what}: {error}")

    def connection(self) -> Connection:
        return Connection(self.connect, self.report, clock=lambda: self.now)


def test_one_attempt_at_construction_and_then_one_a_second() -> None:
    daemon = Daemon()
    connection = daemon.connection()
    for _ in range(5):
        assert connection.get() is None
    assert daemon.attempts == 1
    daemon.now += module.RETRY_S
    daemon.error = None
    assert connection.get() is as_pool(daemon.pool)
    assert connection.get() is as_pool(daemon.pool)
    assert daemon.attempts == 2


def test_an_attempt_that_hangs_does_not_hold_requests_up() -> None:
    daemon = Daemon()
    connection = daemon.connection()
    daemon.now += module.RETRY_S
    daemon.gate.clear()
    daemon.error = None
    started = time.perf_counter()
    assert connection.get() is None
    daemon.now += module.RETRY_S
    assert connection.get() is None
    assert time.perf_counter() - started < 20 * module.WAIT_S
    assert daemon.attempts == 2
    assert connection._attempt is not None
    daemon.gate.set()
    connection._attempt.join(10)
    assert connection.get() is as_pool(daemon.pool)


def test_a_refusal_is_not_repeated_every_second() -> None:
    daemon = Daemon()
    daemon.error = CredentialRefused("unknown token")
    connection = daemon.connection()
    daemon.now += 2 * module.RETRY_S
    assert connection.get() is None
    assert daemon.attempts == 1
    assert daemon.reports == ["connecting to the pool: unknown token"]


def test_a_pool_that_arrives_after_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
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
