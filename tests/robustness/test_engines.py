"""An engine that dies while it is frozen, and a peer that sends too late."""

from __future__ import annotations

import pytest

from tests.robustness.fake_peer import FakePeer
from tests.robustness.live import LAYOUT, EngineProcess, Prompt, daemons, match, read, store, total, wait_until

pytestmark = pytest.mark.live


def test_frozen_and_killed_engine_frees_its_quarantine() -> None:
    with daemons(lease_s="0.4", reservation_s="0.4") as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("prepare", seed=6, segments=8)
        engine.freeze()
        wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 8, "in quarantine")
        engine.kill()
        wait_until(lambda: total(node, "tokenlake_processes") == 0, "its death is seen")
        assert total(node, "tokenlake_quarantined_slots") == 0


def test_bytes_that_come_late_reach_no_new_owner() -> None:
    """A peer sends wrong bytes slowly and the receiver gives up: the slots get new owners while the peer still
    sends."""
    with FakePeer("node1") as peer, daemons(1, "1MiB", "1MiB", peers=f"node1=127.0.0.1:{peer.port}") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            wait_until(lambda: total(node, "tokenlake_peers_connected") == 1, "the peer is connected")
            prompt = Prompt(22, 5)
            peer.serves(pool.prefix(prompt.tokens).keys, LAYOUT)
            for attempt in range(5):
                # After a fetch without a byte of a segment the peer is not asked until it has answered a probe.
                wait_until(lambda: match(pool, prompt).hits == 5, "the peer's segments are found")
                with match(pool, prompt) as lease:
                    # The deadline is long enough for the handshake and the Pull on a busy machine, and too short for a
                    # segment.
                    assert lease.fetch(deadline_s=0.5) == []
                # For the engine the fetch has ended. The daemon frees its slots only when the receiving thread has
                # returned.
                kept = [Prompt(300 + attempt * 10 + number, 14) for number in range(4)]
                for other in kept:
                    store(pool, other)
                for other in kept:
                    read(pool, other)
                wait_until(lambda attempt=attempt: peer.cut == attempt + 1, "the transfer was cut")  # type: ignore[misc]
                for other in kept:
                    read(pool, other)
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "receivers returned")
            assert total(node, "tokenlake_received_segments_total") == 0
