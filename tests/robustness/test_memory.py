"""The memory of an arena is what `memory` says, over hand-overs and restarts, with engines that stay alive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.live import EngineProcess, daemons, total, wait_until
from tests.robustness.memory import arena_bytes, engines_of, hand_overs, restarts

pytestmark = pytest.mark.live

MEMORY = 4 << 20


def test_hand_overs_need_no_further_memory(tmp_path: Path) -> None:
    moved, memory, largest = hand_overs(3, tmp_path)
    assert moved == 10
    assert largest <= memory


def test_restarts_need_no_second_arena() -> None:
    memory, largest, left = restarts(2)
    assert left == 0
    assert largest <= memory


def test_a_forked_child_keeps_no_memory() -> None:
    """An engine forks a process that lives longer than the engine and the daemon."""
    with daemons() as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("store", seed=1, segments=20)
        assert engine.ask("match", seed=1, segments=20)["hits"] == 20
        child = engine.ask("fork")["child"]
        assert arena_bytes([child]) == 0
        engine.ask("release")
        node.kill()
        wait_until(lambda: arena_bytes([child, *engines_of(node, [engine])]) == 0, "no memory is left")


def test_arrays_outlive_the_daemon() -> None:
    with daemons() as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("store", seed=1, segments=20)
        assert engine.ask("match", seed=1, segments=20)["hits"] == 20
        assert node.stop() == 0
        left = 20 * (16 << 10)
        wait_until(lambda: arena_bytes(engines_of(node, [engine])) <= left, "only the leased segments are left")
        assert engine.ask("compare") == {"hits": 20, "wrong": 0}
        node.start()
        cluster.wait_ready()
        wait_until(lambda: bool(engine.ask("state")["connected"]), "connected again")
        assert engine.ask("compare") == {"hits": 20, "wrong": 0}
        engine.ask("release")
        assert arena_bytes(engines_of(node, [engine])) <= MEMORY
        assert total(node, "tokenlake_quarantined_slots") == 0
