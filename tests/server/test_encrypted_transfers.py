"""Segments between nodes with certificates: bytes that were changed on their way are a miss, never wrong bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.robustness.live import LAYOUT, Prompt, outcomes, read, store, wait_told, wait_until
from tests.robustness.matrix.proxy import Direction, Flip, Part, Proxy
from tests.server.certified import encrypted
from tests.server.raw import Raw, peer_address
from tokenlake.wire import Code, peer
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SEGMENTS = 8


class Wire(Proxy):
    """A proxy that keeps what comes down."""

    seen = b""

    def _pass(
        self, direction: Direction, part: Part, piece: bytes, sink: socket.socket, descriptors: list[int]
    ) -> None:
        self.seen += piece if direction == "down" else b""
        super()._pass(direction, part, piece, sink, descriptors)


@pytest.fixture
def scene() -> Iterator[tuple[Cluster, Wire]]:
    """Two nodes. node1 fetches from node0 through the proxy."""
    made = encrypted(2, memory="8MiB")
    with Wire(("127.0.0.1", made.ports["node0"])) as wire:
        made.nodes[1].settings["peers"] = f"node0=127.0.0.1:{wire.port}"
        with made as cluster:
            yield cluster, wire


def test_a_flipped_bit_is_a_miss(scene: tuple[Cluster, Wire]) -> None:
    """On any connection between the nodes. `tests/rules/test_records.py` has the other changes of a record."""
    cluster, wire = scene
    prompts = [Prompt(700 + seed, SEGMENTS) for seed in range(4)]
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        for prompt in prompts:
            assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        wire.fault = Flip("down", "body", 4)
        wait_until(lambda: sum(read(other, prompt) for prompt in prompts) < SEGMENTS * 4 and wire.done > 3, "misses")
        wire.fault = None
        wait_until(lambda: all(read(other, prompt) == SEGMENTS for prompt in prompts), "all are fetched")
    assert "Traceback" not in "".join(node.log.read_text() for node in cluster.nodes)


def test_no_bytes_of_a_segment_are_on_the_wire(scene: tuple[Cluster, Wire]) -> None:
    cluster, wire = scene
    prompt = Prompt(800, SEGMENTS)
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        wait_until(lambda: read(other, prompt) == SEGMENTS, "the segments are fetched")
    assert len(wire.seen) > SEGMENTS * LAYOUT.segment_bytes
    assert all(prompt.content(index)[:16] not in wire.seen for index in range(SEGMENTS))
    # The id of a connection is seen by everyone on the way: unknown and used keys open nothing.
    for messages in ([], [peer.Pull("default", bytes(32))]):
        with Raw(peer_address(cluster.nodes[0])) as raw:
            raw.send(peer.OpenConnection(bytes(32)))
            for message in messages:
                raw.send(message)
            answer = raw.body()
            assert answer == b"" or isinstance(peer.handshake_decoder.decode(answer), peer.PeerRefused)
