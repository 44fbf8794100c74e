"""Hand-over of new segments to a node whose memory has been clearly emptier for long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.scenes import (
    ROOMY,
    calm,
    copies,
    fetch,
    kinds,
    match,
    offer,
    placed,
    read,
    release,
    said,
    store,
    stored,
    tell,
)
from tests.sim.arena import SHARDS, SLOTS, content
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core.cluster import handover
from tokenlake.core.cluster.handover import HANDED_OVER
from tokenlake.core.instructions import StartFetch
from tokenlake.hints import AccessRecord
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind
from tokenlake.wire import Code, engine, peer

GOSSIP_S = 0.25


def offers(cluster: Cluster) -> list[peer.Offer]:
    return [each for node in range(len(cluster.nodes)) for each in said(cluster, node, peer.Offer)]


def owners(cluster: Cluster, key: SegmentKey) -> list[str]:
    return cluster.keepers().get((TenantId("red"), key), [])


def check_handed_over(cluster: Cluster, giver: int, receiver: int, reader: Engine, keys: Sequence[SegmentKey]) -> None:
    """`receiver` owns the segments, its bytes are right, the directory nodes name it, `giver` has cached copies, and a
    node without a copy can read them."""
    for key in keys:
        assert kinds(cluster, key) == {giver: Kind.CACHED, receiver: Kind.PRIMARY}
        held = copies(cluster, key)
        assert (held[giver].source, held[receiver].source) == (f"n{receiver}", None)
        arena = cluster.node(receiver).arena
        assert [arena.read(held[receiver].place, shard) for shard in range(SHARDS)] == list(content("red", key))
        ((directory_node, _),) = cluster.core(receiver).ring.candidates(key)
        directory = cluster.core(int(directory_node.removeprefix("n")))._directory_node
        assert directory.recorded_owner(TenantId("red"), key) == f"n{receiver}"
    reply = match(cluster, reader, keys)
    assert reply.codes == bytes([Code.REMOTE]) * len(keys)
    assert fetch(cluster, reader, reply.lease, len(keys)).codes == bytes([Code.LOCAL]) * len(keys)
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, len(keys)),)))
    cluster.check()


def skewed(*locations: str) -> tuple[Cluster, Engine]:
    """Four nodes with these `locations`, of which node 1 is half full and only node 0 gets new segments, for so long
    that it is full and counts the others as emptier. And the engine at node 0."""
    cluster = calm(4, **ROOMY, locations=locations)
    writer, other = cluster.join(0), cluster.join(1)
    for turn in range(2):
        store(cluster, other, prompt(f"half {turn}", SLOTS))
    for turn in range(9):
        store(cluster, writer, prompt(f"skew {turn}", SLOTS))
    assert cluster.core(0)._context.vacancy().full
    return cluster, writer


def test_nothing_is_handed_over_under_even_load() -> None:
    """Every node is full, and each is the emptiest one now and then."""
    cluster = calm(3, regions=24, **ROOMY)
    engines = [cluster.join(node) for node in range(3)]
    random = cluster.clock.random
    for turn in range(600):
        store(cluster, engines[random.randrange(3)], prompt(f"even {turn}", random.randrange(1, SLOTS + 1)))
    assert all(cluster.core(node)._context.vacancy().full for node in range(3))
    assert not offers(cluster)


def test_nothing_is_handed_over_before_the_skew_has_lasted() -> None:
    cluster = calm(3, **ROOMY)
    writer = cluster.join(0)
    for turn in range(4):
        store(cluster, writer, prompt(f"burst {turn}", SLOTS))
    assert cluster.core(0)._context.vacancy().full
    assert not offers(cluster)


def test_a_near_node_before_an_emptier_far_one() -> None:
    """Each of the others has been clearly emptier for long."""
    for locations, receivers in (((), {2, 3}), (("rack-1", "rack-1", "rack-2", "rack-2"), {1})):
        cluster, writer = skewed(*locations)
        cluster.run_for(60.0)
        keys = [*placed(cluster, 1, 2, 1, "new"), *placed(cluster, 0, 2, 1, "new"), *placed(cluster, 3, 1, 1, "new")]
        store(cluster, writer, keys)
        (receiver,) = {node for key in keys for node, kind in kinds(cluster, key).items() if kind is Kind.PRIMARY}
        assert receiver in receivers
        check_handed_over(cluster, 0, receiver, cluster.join(5 - receiver if receiver > 1 else 2), keys)


@pytest.mark.parametrize("locations", [(), ("rack-1", "rack-1"), ("a/a/a/a", "b/b/b/b", "c/c/c/c", "c/c/c/d")], ids=str)
def test_a_skewed_load_fills_every_node(locations: tuple[str, ...]) -> None:
    """The engines of one node keep as many segments as the memory of all nodes has room for, near or far."""
    cluster, writer = skewed(*locations)
    for turn in range(60):
        store(cluster, writer, prompt(f"long {turn}", SLOTS))
    free = [cluster.core(node)._context.vacancy().free_share for node in range(4)]
    assert max(free) < 0.3
    slots = 4 * 4 * SLOTS
    assert len(cluster.keepers()) > 0.6 * slots


@pytest.mark.parametrize("pair", [(0, 1), (2, 1), (1, 0)], ids=["the giver", "the receiver", "another node"])
def test_any_node_may_be_the_directory_node(pair: tuple[int, int]) -> None:
    cluster = calm(4)
    writer, reader = cluster.join(0), cluster.join(3)
    keys = placed(cluster, *pair, 2)
    store(cluster, writer, keys)
    offer(cluster, 0, 2, keys)
    cluster.run_for(0.5)
    check_handed_over(cluster, 0, 2, reader, keys)
    assert cluster.core(0).counters[HANDED_OVER] == 2
    assert [message.handed_over for message in said(cluster, 2, peer.Redundant) if message.nodes[0] == "n2"] == [True]


def test_a_cached_copy_is_taken_over_without_a_transfer() -> None:
    cluster, reader, keys = stored(2, pair=(1, 3), nodes=4)
    found = match(cluster, reader, keys)
    fetch(cluster, reader, found.lease, 2)
    release(cluster, reader, found.lease, 2)
    before = len(said(cluster, 2, StartFetch))
    offer(cluster, 0, 2, keys)
    cluster.run_for(0.5)
    assert len(said(cluster, 2, StartFetch)) == before
    check_handed_over(cluster, 0, 2, cluster.join(3), keys)


def test_access_records_and_depths_go_along() -> None:
    cluster = calm(4)
    writer = cluster.join(0)
    keys = placed(cluster, 1, 3, 3)
    store(cluster, writer, keys, 4)
    offer(cluster, 0, 2, keys)
    cluster.run_for(0.5)
    taken = [copies(cluster, key)[2] for key in keys]
    assert [segment.depth for segment in taken] == [4, 5, 6]
    assert {segment.hints.access for segment in taken} == {AccessRecord(7, 4)}


def test_offers_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write beyond the bound stays; it is not offered later."""
    monkeypatch.setattr(handover, "MAX_OFFERS", 1)
    cluster = calm(4)
    writer = cluster.join(0)
    first, second = placed(cluster, 1, 2, 2)
    store(cluster, writer, [first, second])
    cluster.node(3).freeze()
    offer(cluster, 0, 3, [first])
    assert cluster.core(0).census()["offers"] == 1
    offer(cluster, 0, 2, [second])
    cluster.run_for(4.0)
    assert len(offers(cluster)) == 1
    assert cluster.core(0).census()["offers"] == 0
    assert owners(cluster, first) == owners(cluster, second) == ["n0"]


# -- receivers that do not take them


def test_a_partly_refused_offer_leaves_the_rest() -> None:
    cluster = calm(3, regions=1, **ROOMY)
    writer, other = cluster.join(0), cluster.join(2)
    held = prompt("held", SLOTS - 1)
    store(cluster, other, held)
    assert match(cluster, other, held).hits == SLOTS - 1
    keys = placed(cluster, 1, 2, 2)
    store(cluster, writer, keys)
    offer(cluster, 0, 2, keys)
    cluster.run_for(0.5)
    assert [reply.codes for reply in said(cluster, 2, peer.OfferReply)] == [bytes([Code.COMMITTED, Code.NO_SLOT])]
    assert [owners(cluster, key) for key in keys] == [["n2"], ["n0"]]
    assert all(read(cluster, cluster.join(1), [key]) == [Code.LOCAL] for key in keys)
    cluster.check()
