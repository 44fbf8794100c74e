"""Daemons of one machine that read each other's memory with NIXL: the kernel copies between the processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, pid_of, read, store, wait_told, wait_until
from tests.robustness.matrix import on_peer
from tests.robustness.matrix.measure import Outcome
from tokenlake.wire import Code
from tokenlake_server.nixl.agent import library

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(library() is None, reason="NIXL is not installed (make install-nixl)"),
    pytest.mark.rest,
]

WITH_NIXL = {"transport": "nixl", "fabric": "trusted"}


def test_segments_are_read_with_nixl_where_it_is_allowed() -> None:
    """The third daemon is not: it reads over TCP, and nothing of NIXL is in its memory."""
    with daemons(3, **WITH_NIXL) as cluster:
        plain = cluster.nodes[2]
        plain.kill()
        plain.settings |= {"transport": "auto", "fabric": "untrusted"}
        plain.start()
        cluster.wait_ready()
        wait_until(lambda: cluster.nodes[0].metrics()["tokenlake_nixl_nodes"] == 1, "a probe has come")
        prompt = Prompt(1, 4)
        with cluster.connect(0, LAYOUT) as reader, cluster.connect(1, LAYOUT) as owner:
            assert store(owner, prompt) == bytes([Code.COMMITTED]) * 4
            wait_told(cluster)
            before = cluster.nodes[0].metrics()["tokenlake_nixl_bytes"]
            assert read(reader, prompt) == 4
            assert cluster.nodes[0].metrics()["tokenlake_nixl_bytes"] == before + 4 * LAYOUT.segment_bytes
        with cluster.connect(2, LAYOUT) as other:
            assert read(other, prompt) == 4
        maps = Path(f"/proc/{pid_of(plain)}/maps").read_text()
        assert "nixl" not in maps
        assert "libuc" not in maps
        assert [node.stop() for node in cluster.nodes] == [0, 0, 0]


@pytest.mark.parametrize("scenario", [on_peer.killed, on_peer.stopped])
def test_faults_of_a_node_that_is_read(scenario: Callable[[int], Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WITH_NIXL.items():
        monkeypatch.setitem(os.environ, f"TOKENLAKE_{name.upper()}", value)
    outcome = scenario(7)
    assert outcome.compared
    assert outcome.wrong == 0
    assert outcome.lost <= outcome.may_lose
