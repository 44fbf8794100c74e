"""Engines whose pid the daemon does not know, because they are in another PID namespace: their death is noticed, and no
process takes over the leases of another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, EngineProcess, Prompt, all_free, match, store, total, wait_until
from tests.robustness.matrix.proxy import Proxy
from tests.server.raw import Raw, hello
from tokenlake.wire import Code, engine
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


@pytest.fixture
def node() -> Iterator[Node]:
    with Cluster(1, "4MiB", "1MiB", None, "tests.robustness.old_kernel_daemon", match_deadline_ms="2000") as cluster:
        cluster.deadlines = PATIENT
        yield cluster.nodes[0]


def test_the_slots_of_killed_engines_come_back(node: Node) -> None:
    for number in range(3):
        with EngineProcess(node.socket) as engine_process:
            engine_process.ask("store", seed=number, segments=20)
            assert engine_process.ask("match", seed=number, segments=20)["hits"] == 20
            assert engine_process.ask("prepare", seed=100 + number, segments=2)["codes"] == [Code.RESERVED] * 2
            engine_process.kill()
    wait_until(lambda: all_free(node), "leases and reservations are given back")
    log = node.log.read_text()
    assert log.count(": the process has ended") == 3
    assert "SO_PEERPIDFD" in log


@pytest.mark.parametrize("fetch", [True, False], ids=["reader", "scheduler"])
def test_a_forked_child_does_not_stand_for_its_parent(node: Node, fetch: bool) -> None:
    """The child keeps the socket of its parent open, and a scheduler maps no region."""
    with EngineProcess(node.socket) as engine_process:
        engine_process.ask("store", seed=1, segments=20)
    with EngineProcess(node.socket) as engine_process:
        assert engine_process.ask("match", seed=1, segments=20, fetch=fetch)["hits"] == 20 * fetch
        assert not all_free(node)
        child = engine_process.ask("fork")["child"]
        try:
            engine_process.kill()
            wait_until(lambda: all_free(node), "leases are given back")
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_engine_that_left_keeps_the_slots_of_its_arrays(node: Node) -> None:
    """The engine closed its pool, and may still read."""
    with EngineProcess(node.socket) as engine_process:
        engine_process.ask("store", seed=1, segments=20)
        assert engine_process.ask("match", seed=1, segments=20)["hits"] == 20
        engine_process.ask("leave")
        with Pool.connect(node.socket, LAYOUT, deadlines=PATIENT) as pool:
            for seed in range(2, 30):
                store(pool, Prompt(seed, 16))
        assert engine_process.ask("compare") == {"hits": 20, "wrong": 0}
        assert total(node, "tokenlake_processes") == 1
        engine_process.ask("release")
        wait_until(lambda: all_free(node), "the last array is gone")


def test_a_connection_that_breaks_is_resumed(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    with Proxy(node.socket, path) as proxy:
        with Pool.connect(path, LAYOUT, deadlines=PATIENT) as pool:
            prompt = Prompt(1, 4)
            store(pool, prompt)
            with match(pool, prompt) as lease:
                arrays = lease.fetch()
                for _ in range(3):
                    link = pool.link
                    proxy.cut()
                    wait_until(lambda link=link: pool.link is not link, "connected again")  # type: ignore[misc]
                    assert pool.link.life == link.life
                    assert prompt.wrong(arrays) == 0
                assert total(node, "tokenlake_processes") == 1
                assert lease.fetch()[0].tobytes() == prompt.content(0)
                del arrays
        wait_until(lambda: all_free(node), "it left")


def test_no_process_takes_over_the_leases_of_another(node: Node) -> None:
    with EngineProcess(node.socket) as engine_process:
        engine_process.ask("store", seed=1, segments=20)
        assert engine_process.ask("match", seed=1, segments=20)["hits"] == 20
        for guess in range(1, 20):
            with Raw(node.socket) as raw:
                raw.send(hello(session=engine_process.session, resume=guess))
                welcome = raw.reply()
                assert isinstance(welcome, engine.Welcome)
                assert welcome.connection != guess, "the leases of another process were taken over"
                raw.send(engine.ReconcileGrants((), ()))
        wait_until(lambda: total(node, "tokenlake_processes") == 1, "the other processes are gone")
        assert total(node, "tokenlake_map_entries") >= 1
        assert engine_process.ask("compare") == {"hits": 20, "wrong": 0}


def test_a_process_without_the_lock_is_refused(node: Node) -> None:
    """The daemon could not notice its death."""
    with Raw.joined(node.socket) as raw:
        raw.send(engine.Match(2, bytes(32), 1.0))
        refused = raw.failed()
        assert "lock" in refused.reason
