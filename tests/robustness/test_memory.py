"""The memory of an arena is what `memory` says, over hand-overs and restarts, with engines that stay alive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, EngineProcess, daemons, wait_until
from tests.robustness.memory import HEADER_BYTES, arena_bytes, engines_of, hand_overs, restarts

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
        try:
            assert arena_bytes([child]) == 0
            engine.ask("release")
            node.kill()
            wait_until(lambda: arena_bytes([child, *engines_of(node, [engine])]) == 0, "no memory is left")
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_arrays_outlive_the_memory_of_the_daemon(end: str) -> None:
    """An engine has arrays in every region. They stay readable, but keep no memory of the daemon that ended."""
    with daemons(1, "4MiB", "256KiB") as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        for seed in range(10):
            engine.ask("store", seed=seed, segments=16)
        assert engine.ask("match", seed=9, segments=16)["hits"] == 16
        if end == "kill":
            node.kill()
        else:
            engine.freeze()
            assert node.stop() == 0
            assert 0 < arena_bytes(engines_of(node, [engine])) <= 16 * (LAYOUT.segment_bytes + 4096)
            engine.thaw()
        wait_until(lambda: arena_bytes(engines_of(node, [engine])) == 0, "no memory is left")
        assert engine.ask("compare") == {"hits": 16, "wrong": 0}
        node.start()
        cluster.wait_ready()
        wait_until(lambda: bool(engine.ask("state")["connected"]), "connected again")
        engine.ask("store", seed=20, segments=16)
        assert engine.ask("compare") == {"hits": 16, "wrong": 0}
        assert arena_bytes(engines_of(node, [engine])) <= MEMORY + 16 * HEADER_BYTES
        engine.ask("release")
        assert engine.ask("match", seed=20, segments=16)["wrong"] == 0
