"""Segments between nodes with certificates: a record that was changed on its way is a miss, never wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.live import LAYOUT, Prompt, match, outcomes, read, store, wait_told, wait_until
from tests.server.certified import encrypted
from tests.server.meddler import Change, Meddler
from tests.server.raw import Raw, peer_address
from tokenlake.wire import Code, peer
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SEGMENTS = 8
"""The frame before the segments is record 0, and each segment, which is shorter than a record may be, is a record."""


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Cluster, Meddler]]:
    """Two nodes. node1 fetches from node0 through the meddler."""
    with Meddler() as meddler, Meddler() as other:
        via = {("node1", "node0"): meddler.port, ("node0", "node1"): other.port}
        made = encrypted(2, memory="8MiB", via=via)
        meddler.target, other.target = made.ports["node0"], made.ports["node1"]
        with made as cluster:
            yield cluster, meddler


def flip(at: int) -> Change:
    def change(number: int, record: bytes) -> list[bytes]:
        if number == 3:
            changed = bytearray(record)
            changed[at] ^= 1
            record = bytes(changed)
        return [record]

    return change


def repeat(number: int, record: bytes) -> list[bytes]:
    return [record, record] if number == 3 else [record]


def leave_out(number: int, record: bytes) -> list[bytes]:
    return [] if number == 3 else [record]


def swap() -> Change:
    kept: list[bytes] = []

    def change(number: int, record: bytes) -> list[bytes]:
        if number == 3:
            kept.append(record)
            return []
        return [record, kept.pop()] if kept else [record]

    return change


def found(pool: Pool, prompt: Prompt) -> int:
    with match(pool, prompt) as lease:
        return lease.hits


CHANGES: dict[str, Change] = {
    "a bit of the length": flip(0),
    "a bit of the segment": flip(40),
    "a bit of the tag": flip(-1),
    "repeated": repeat,
    "left out": leave_out,
    "swapped": swap(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_record_is_a_miss(scene: tuple[Cluster, Meddler], name: str) -> None:
    cluster, meddler = scene
    prompt = Prompt(700 + list(CHANGES).index(name), SEGMENTS)
    log = cluster.nodes[1].log
    before = log.read_text().count("ended early")
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        meddler.change = CHANGES[name]
        meddler.renew()
        # The path for segments counts as dead after a failed fetch, until a probe has passed.
        wait_until(lambda: found(other, prompt) == SEGMENTS, "the segments are found")
        with match(other, prompt) as lease:
            arrays = lease.fetch(deadline_s=2.0)
            assert len(arrays) < SEGMENTS
            assert prompt.wrong(arrays) == 0
        if name not in ("a bit of the length", "left out"):
            wait_until(lambda: log.read_text().count("ended early") > before, "the connection was closed")
        meddler.change = None
        meddler.renew()
        wait_until(lambda: read(other, prompt) == SEGMENTS, "it is fetched on a new connection")


def test_no_bytes_of_a_segment_are_on_the_wire(scene: tuple[Cluster, Meddler]) -> None:
    cluster, meddler = scene
    seen: list[bytes] = []

    def watch(number: int, record: bytes) -> list[bytes]:
        seen.append(record)
        return [record]

    prompt = Prompt(800, SEGMENTS)
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        meddler.change = watch
        meddler.renew()
        wait_until(lambda: read(other, prompt) == SEGMENTS, "the segments are fetched")
        meddler.change = None
    stream = b"".join(seen)
    assert len(stream) > SEGMENTS * LAYOUT.segment_bytes
    assert all(prompt.content(index)[:16] not in stream for index in range(SEGMENTS))


def test_unknown_and_used_keys_open_nothing(scene: tuple[Cluster, Meddler]) -> None:
    """The id of a connection is seen by everyone on the way."""
    cluster, _ = scene
    with Raw(peer_address(cluster.nodes[0])) as raw:
        raw.send(peer.OpenConnection(bytes(32)))
        assert raw.closed()
    with Raw(peer_address(cluster.nodes[0])) as raw:
        raw.send(peer.OpenConnection(bytes(32)))
        raw.send(peer.Pull("default", bytes(32)))
        answer = raw.body()
        assert answer == b"" or isinstance(peer.handshake_decoder.decode(answer), peer.PeerRefused)
