"""The daemon's side of the query engine: start, restart, and connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, pid_of, wait_until
from tokenlake.errors import Unreachable
from tokenlake.wire import engine
from tokenlake.wire.supervision import Start
from tokenlake_client import Pool
from tokenlake_server.engines import query_engine as query_engine_module
from tokenlake_server.engines.query_engine import STOP_S, QueryEngine
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.handshake import PeerIdentity
from tokenlake_testing import fork_server
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

HUNG_S = 60.0
"""Time until a hung process is replaced by one that has imported torch."""


@pytest.fixture(autouse=True)
def _executed() -> Iterator[None]:
    """These tests are about the process that a daemon itself starts."""
    with fork_server.executed():
        yield


def children(node: Node) -> list[int]:
    """Process ids of a daemon's query engines."""
    threads = Path(f"/proc/{pid_of(node)}/task").glob("*/children")
    return sorted(int(child) for thread in threads for child in thread.read_text().split())


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def serving(**settings: str) -> Iterator[tuple[Node, Pool]]:
    """A daemon and a client of it."""
    with Cluster(1, "8MiB", "1MiB", **settings) as cluster:
        cluster.deadlines = PATIENT
        with cluster.connect(0, LAYOUT) as pool:
            yield cluster.nodes[0], pool


def test_an_engine_without_a_query_engine() -> None:
    with serving() as (_, pool):
        with pytest.raises(Unreachable, match="query_engine"):
            pool.link.call(engine.OpenQuery, engine.QueryOpened)
        assert pool.connected


async def test_a_failed_start_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is repeated after any error. It once was not after an error other than OSError, such as a missing
    thread."""
    pytest.importorskip("torch")
    failures: list[Exception] = [RuntimeError("can't start new thread"), BlockingIOError("no process")]
    started = threading.Event()

    def start(*args: Any, **settings: Any) -> subprocess.Popen[bytes]:
        if failures:
            raise failures.pop()
        started.set()
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(query_engine_module, "subprocess", SimpleNamespace(Popen=start))
    loop = asyncio.get_running_loop()
    identity = PeerIdentity("a", 1)
    query_engine = QueryEngine(Start("", "a", "", 1), identity, PeerAddresses({}), loop)
    assert await asyncio.to_thread(started.wait, LIMIT_S)
    await query_engine.close()
    assert not failures


def test_restart_and_end_of_the_query_engine() -> None:
    pytest.importorskip("torch")
    with serving(query_engine="true") as (node, pool):
        (first,) = children(node)
        pool.link.call(engine.OpenQuery, engine.QueryOpened)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: children(node) not in ([], [first]), "another is started")

        def refused() -> bool:
            try:
                pool.link.call(engine.OpenQuery, engine.QueryOpened)
            except Unreachable as error:
                return "not ready" in str(error)
            return False

        wait_until(refused, "the daemon noticed, and torch is not loaded yet")
        wait_until(lambda: node.metrics()["tokenlake_query_engine_ready"] == 1, "it serves")
        assert node.metrics()["tokenlake_query_engine_starts"] == 2
        (second,) = children(node)
        pool.link.call(engine.OpenQuery, engine.QueryOpened)
        node.kill()
        wait_until(lambda: not alive(second), "it ended with its daemon")


def test_a_hung_query_engine_is_replaced() -> None:
    """A stopped process keeps its channel open, and is noticed because it reports nothing."""
    pytest.importorskip("torch")
    with serving(query_engine="true") as (node, pool):
        wait_until(lambda: node.metrics()["tokenlake_query_engine_ready"] == 1, "it serves", HUNG_S)
        (first,) = children(node)
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: children(node) not in ([], [first]), "another is started", HUNG_S)
        assert not alive(first)
        wait_until(lambda: node.metrics()["tokenlake_query_engine_ready"] == 1, "it serves", HUNG_S)
        pool.link.call(engine.OpenQuery, engine.QueryOpened)


def test_a_daemon_stops_while_its_query_engine_starts() -> None:
    """The process imports torch, for seconds, and reads nothing meanwhile."""
    pytest.importorskip("torch")
    with Cluster(1, "8MiB", "1MiB", query_engine="true") as cluster:
        node = cluster.nodes[0]
        wait_until(lambda: len(children(node)) == 1, "it starts")
        (child,) = children(node)
        # As if the import took very long.
        os.kill(child, signal.SIGSTOP)
        began = time.monotonic()
        node.stop()
        assert time.monotonic() - began < STOP_S, "the process is not waited for"
        assert not alive(child)
