"""The daemon's side of the query engine: start, restart, and connections to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, wait_until
from tokenlake.errors import Unreachable
from tokenlake.wire import engine
from tokenlake.wire.supervision import Start
from tokenlake_server import query_engine as query_engine_module
from tokenlake_server.handshake import PeerIdentity
from tokenlake_server.peer_addresses import PeerAddresses
from tokenlake_server.query_engine import QueryEngine
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


def children(node: Node) -> list[int]:
    """Process ids of a daemon's query engines."""
    assert node.process is not None
    threads = Path(f"/proc/{node.process.pid}/task").glob("*/children")
    return sorted(int(child) for thread in threads for child in thread.read_text().split())


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_without_a_query_engine() -> None:
    with Cluster(1, "8MiB", "1MiB") as cluster, cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(Unreachable, match="query_engine"):
            pool.link.call(engine.OpenQuery, engine.QueryOpened)
        assert pool.connected


def test_a_failed_start_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        identity = PeerIdentity("a", 1)
        query_engine = QueryEngine(Start("", "a", ""), identity, PeerAddresses({}), 1, loop)
        assert await asyncio.to_thread(started.wait, LIMIT_S)
        await query_engine.close()

    monkeypatch.setattr(query_engine_module, "subprocess", SimpleNamespace(Popen=start))
    asyncio.run(scene())
    assert not failures


def test_restart_and_end_of_the_query_engine() -> None:
    pytest.importorskip("torch")
    with Cluster(1, "8MiB", "1MiB", query_engine="true") as cluster, cluster.connect(0, LAYOUT) as pool:
        node = cluster.nodes[0]
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
