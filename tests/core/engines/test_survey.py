"""Where segments are, without a lease."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.scenes import answer, calm, match, placed, read, said, store, stored
from tests.core.test_disk import on_disk, slow_down
from tests.sim.cluster import Cluster
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.instructions import Located
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys


def located(cluster: Cluster, node: int, keys: Sequence[SegmentKey], tenant: str = "red") -> list[list[str]]:
    """The nodes that a node's rules name for each key."""
    before = len(said(cluster, node, Located))
    cluster.node(node).deliver(events.LocateRequested(before, tenant, join_keys(list(keys))))
    cluster.run_for(0.1)
    (answer,) = said(cluster, node, Located)[before:]
    assert answer.request == before
    cluster.check()
    return [[answer.nodes[number] for number in owners] for owners in answer.owners]


def test_every_node_finds_the_owner() -> None:
    """And cached copies of its own. A tenant finds only its own segments. A silent directory node makes misses, after
    the deadline."""
    cluster, reader, keys = stored(pair=(1, 2))
    unknown = placed(cluster, 1, 2, 2)[1:]
    for asked in range(3):
        assert located(cluster, asked, [*keys, *unknown]) == [["n0"], []]
        assert located(cluster, asked, keys, "blue") == [[]]
    read(cluster, reader, keys)
    assert located(cluster, 2, keys) == [["n2", "n0"]]
    assert located(cluster, 0, keys) == [["n0"]]
    assert cluster.core(0).census()["leases to peers"] == 0
    cluster.node(1).freeze()
    assert located(cluster, 0, unknown) == [[]]
    assert cluster.core(0).census()["surveys"] == 0


def seconds(cluster: Cluster, node: int, keys: Sequence[SegmentKey]) -> list[float]:
    """The time on disks that a node's rules name for each key."""
    before = len(said(cluster, node, Located))
    cluster.node(node).deliver(events.LocateRequested(before, "red", join_keys(list(keys)), disks=True))
    cluster.run_for(0.1)
    (answer,) = said(cluster, node, Located)[before:]
    assert [[answer.nodes[number] for number in owners] for owners in answer.owners] == [["n0"]] * len(keys)
    cluster.check()
    return list(answer.disk_s)


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_segments_on_disk_come_with_their_time(asked: int) -> None:
    """The segments are on the disk and in the memory of n0; the directory nodes are n0, n1 and n2."""
    cluster = calm(3, disk_places=60)
    writer = cluster.join(0)
    for node in (1, 2):
        # Otherwise the first node would hand its segments over to the others.
        store(cluster, cluster.join(node), prompt(f"other-{node}", 12))
    stored = [prompt(f"fill-{number}", 4) for number in range(8)]
    for keys in stored:
        store(cluster, writer, keys)
        cluster.run_for(1.0)
    disk = next(keys for keys in stored if on_disk(cluster, 0, keys) == keys)
    others = [key for keys in stored for key in keys if not on_disk(cluster, 0, [key])]
    memory = [key for key in others if located(cluster, asked, [key]) == [["n0"]]][:4]
    slow_down(cluster)
    found = match(cluster, writer, disk)
    told = answer(cluster, writer.processes[0], engine.Locate, found.lease)
    writer.processes[0].tell(engine.Release(((found.lease, 0, 4),)))
    assert isinstance(told, engine.Located)
    alone = seconds(cluster, asked, disk)
    assert sum(alone) == pytest.approx(told.disk_s[0])
    assert seconds(cluster, asked, [*disk, *memory]) == pytest.approx([*alone, *[0.0] * 4])
    assert seconds(cluster, asked, memory) == []
    assert cluster.core(0).census()["leases to peers"] == 0


def test_a_reply_that_marks_other_keys_than_its_own_is_refused() -> None:
    cluster = calm(2)
    reply = peer.LookupReply(1, 0, bytes([Code.LOCAL]) * 4, (), (0.0, 0.0, 0.0), 0.0, disk_s=1.0, on_disk=b"\1")
    with pytest.raises(ValueError, match="on_disk of 1 for 4 keys"):
        cluster.core(0).handle(events.PeerSent("n1", reply), cluster.clock.now)


def test_an_owner_silent_about_its_disk_is_named() -> None:
    """An owner that is silent about its disk is named all the same."""
    cluster, _, keys = stored(pair=(1, 2))
    cluster.node(0).freeze()
    assert seconds(cluster, 2, keys) == []
    assert cluster.core(2).census()["surveys"] == 0
