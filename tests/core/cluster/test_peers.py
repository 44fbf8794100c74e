"""Peers that freeze, die or restart, networks that break or slow down, and the number of pings."""

from __future__ import annotations

from collections import Counter

from tests.core.cluster.test_directory_node import Node
from tests.core.scenes import answer, ask, calm, copies, fetch, match, placed, prepare, said, store, stored, within
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.core import events, instructions
from tokenlake.core.cluster.peers import PINGED, SUSPECTED, UNANSWERED
from tokenlake.core.cluster.transfer import ABORTED
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

MATCH_S = 0.020
MANY = 2 * PINGED + 4
GOSSIP_S = 0.25
ROUNDS = 3
"""Intervals in which each peer of `MANY` has its turn."""


def usable(cluster: Cluster, node: int, other: int) -> bool:
    """Does a match at `node` send a lookup to `other`?"""
    sent = lookups(cluster, node, other)
    match(cluster, cluster.join(node), placed(cluster, other, node))
    return lookups(cluster, node, other) > sent


def lookups(cluster: Cluster, node: int, other: int) -> int:
    frames = said(cluster, node, instructions.SendToPeer)
    return sum(frame.node == f"n{other}" and isinstance(frame.message, peer.Lookup) for frame in frames)


def reports(cluster: Cluster, node: int, to: int) -> int:
    """Reports of its load that `node` sent to `to`."""
    frames = said(cluster, node, instructions.SendToPeer)
    return sum(frame.node == f"n{to}" and isinstance(frame.message, peer.Ping | peer.Pong) for frame in frames)


def timed_match(cluster: Cluster, reader: Engine, keys: list[SegmentKey]) -> float:
    began = cluster.clock.now
    match(cluster, reader, keys)
    return cluster.clock.now - began


def test_a_frozen_peer_costs_one_deadline() -> None:
    cluster = calm()
    reader = cluster.join(0)
    keys = placed(cluster, 1, 2)
    assert timed_match(cluster, reader, keys) < 0.010
    cluster.node(1).freeze()
    assert MATCH_S <= timed_match(cluster, reader, keys) < MATCH_S + 0.010
    assert timed_match(cluster, reader, keys) < 0.010
    assert not usable(cluster, 0, 1)
    assert cluster.core(0).counters[SUSPECTED] == 0
    cluster.run_for(0.5)
    assert cluster.core(0).counters[SUSPECTED] == 1
    cluster.node(1).thaw()
    cluster.run_for(0.3)
    assert usable(cluster, 0, 1)
    assert usable(cluster, 1, 0)
    assert list(match(cluster, reader, keys).codes) == [Code.MISSING]


def test_a_peer_that_sends_frames_is_not_suspect() -> None:
    """Peer n1 leaves its pings unanswered, and sends other messages; n2 sends nothing."""
    node = Node()
    for _ in range(20):
        node.run_until(node.now + 0.1)
        node.say("n1", peer.Evicted("red", b""))
    assert node.core.counters[SUSPECTED] == 1
    assert node.core._peers.reachable(NodeId("n1"))
    assert not node.core._peers.reachable(NodeId("n2"))


def test_a_node_that_froze_takes_replies_that_arrived_in_time() -> None:
    """A node that was frozen does not blame its peers: it takes the replies that arrived meanwhile, and asks these
    peers again at once."""
    cluster, reader, keys = stored(2, pair=(1, 2), at=1, reader=0)
    answers = ask(reader.processes[0], engine.Match, join_keys(keys), 0.0)
    while not said(cluster, 0, peer.Lookup):
        cluster.run_for(0.0001)
    cluster.node(0).freeze()
    cluster.run_for(5 * MATCH_S)
    cluster.node(0).thaw()
    cluster.run_for(0.01)
    assert list(answers[0].codes) == [Code.REMOTE] * 2
    assert usable(cluster, 0, 1)


def test_an_overdue_peer_gets_one_way_messages() -> None:
    """An overdue peer that answers before it is SUSPECT gets no repetition of earlier messages, so that none may be
    left out."""
    cluster = calm()
    engine_ = cluster.join(0)
    key = placed(cluster, 1, 2)[0]
    cluster.node(1).freeze()
    match(cluster, engine_, [key])
    assert not usable(cluster, 0, 1)
    prepare(cluster, engine_, [key])
    cluster.run_for(0.005)
    cluster.node(1).thaw()
    cluster.run_for(0.01)
    assert cluster.core(0).counters[SUSPECTED] == 0
    assert match(cluster, cluster.join(1), [key]).codes == bytes([Code.PENDING])


def test_a_fetch_from_a_frozen_node_ends_at_its_deadline() -> None:
    cluster, reader, keys = stored(2)
    lease = match(cluster, reader, keys).lease
    (source,) = answer(cluster, reader.processes[0], engine.Locate, lease).nodes
    cluster.node(int(source.removeprefix("n"))).freeze()
    with within(cluster, 0.060):
        assert list(fetch(cluster, reader, lease, 2).codes) == [Code.LOST] * 2
    assert cluster.core(2).counters[UNANSWERED] == 1
    # The receiver has not returned yet: its slots are still reserved. Then they are free.
    cluster.run_for(0.2)
    assert not copies(cluster, keys[0]).get(2)


def test_a_new_connection_ends_the_leases_of_the_previous_one() -> None:
    """PeerUp without a PeerDown before it: the peer restarted faster than its connection broke."""
    cluster = calm()
    store(cluster, cluster.join(0), placed(cluster, 0, 1, 2))
    reader = cluster.join(2)
    match(cluster, reader, placed(cluster, 0, 1, 2))
    assert cluster.core(0).census()["leases to peers"] == 1
    cluster.node(0).deliver(events.PeerUp("n2", 9))
    assert cluster.core(0).census()["leases to peers"] == 0


def test_nothing_is_fetched_from_a_suspect_node() -> None:
    """Leases made before the freeze cost one deadline together, not one each."""
    cluster = calm()
    writer, readers = cluster.join(0), [cluster.join(2), cluster.join(2)]
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    writer.die()
    leases = [match(cluster, reader, keys[:1] if at else keys[1:]).lease for at, reader in enumerate(readers)]
    located = [
        answer(cluster, reader.processes[0], engine.Locate, lease)
        for reader, lease in zip(readers, leases, strict=True)
    ]
    for source in {node for reply in located for node in reply.nodes}:
        cluster.node(int(source.removeprefix("n"))).freeze()
    cluster.run_for(1.0)
    with within(cluster, 0.010):
        for reader, lease in zip(readers, leases, strict=True):
            assert list(fetch(cluster, reader, lease, 1).codes) == [Code.LOST]
    assert cluster.core(2).counters[ABORTED] == 0


def test_a_large_cluster_pings_few_peers_per_interval() -> None:
    cluster = calm(MANY)
    sent = len(said(cluster, 0, peer.Ping))
    intervals = 2 * ROUNDS
    cluster.run_for(intervals * GOSSIP_S)
    assert 0 < len(said(cluster, 0, peer.Ping)) - sent <= intervals * PINGED
    before = [reports(cluster, node, 0) for node in range(1, MANY)]
    # Each peer has one turn in a round of intervals, and is passed over at most once.
    cluster.run_for((2 * ROUNDS + 1) * GOSSIP_S)
    assert all(reports(cluster, node, 0) > before[node - 1] for node in range(1, MANY))


def test_a_peer_that_reported_its_load_is_not_pinged() -> None:
    cluster = calm(2)
    before = [len(said(cluster, node, peer.Ping)) for node in (0, 1)]
    cluster.run_for(8 * GOSSIP_S)
    sent = Counter({node: len(said(cluster, node, peer.Ping)) - before[node] for node in (0, 1)})
    assert 4 <= sent.total() <= 10


def test_a_large_cluster_finds_a_frozen_node_in_two_rounds() -> None:
    cluster = calm(MANY)
    cluster.run_for(2 * ROUNDS * GOSSIP_S)
    reader = cluster.join(0)
    cluster.node(1).freeze()
    match(cluster, reader, placed(cluster, 1, 2))
    cluster.run_for(2 * GOSSIP_S + 0.05)
    assert cluster.core(0).counters[SUSPECTED] == 1
    # All other nodes find it within two rounds.
    cluster.run_for(2 * ROUNDS * GOSSIP_S + cluster.core(0).config.suspect_s)
    assert all(cluster.core(node).counters[SUSPECTED] == 1 for node in range(MANY) if node != 1)
    cluster.node(1).thaw()
    cluster.run_for(GOSSIP_S + 0.05)
    assert all(usable(cluster, node, 1) for node in range(MANY) if node != 1)
