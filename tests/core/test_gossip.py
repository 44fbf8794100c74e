"""Pings: what they cost a node of a large cluster, and what finds a node that stands still."""

from __future__ import annotations

from collections import Counter

from tests.core.scenes import calm, match, placed, said
from tokenlake.core.peers import PINGED, SUSPECTED
from tokenlake.identity import NodeId
from tokenlake.wire import peer

MANY = 2 * PINGED + 4
GOSSIP_S = 0.25
ROUNDS = 3
"""Intervals in which each peer of `MANY` has its turn."""


def test_a_node_of_a_large_cluster_sends_few_pings_and_hears_from_all() -> None:
    cluster = calm(MANY)
    sent = len(said(cluster, 0, peer.Ping))
    intervals = 2 * ROUNDS
    cluster.run_for(intervals * GOSSIP_S)
    assert 0 < len(said(cluster, 0, peer.Ping)) - sent <= intervals * PINGED
    heard = {each.node: each.reported_at for each in cluster.core(0)._peers}
    assert len(heard) == MANY - 1
    # Its turn comes once in a round, and is passed over at most once.
    assert min(heard.values()) > cluster.clock.now - (2 * ROUNDS + 1) * GOSSIP_S


def test_who_told_its_load_is_not_pinged_as_well() -> None:
    cluster = calm(2)
    before = [len(said(cluster, node, peer.Ping)) for node in (0, 1)]
    cluster.run_for(8 * GOSSIP_S)
    sent = Counter({node: len(said(cluster, node, peer.Ping)) - before[node] for node in (0, 1)})
    assert 4 <= sent.total() <= 10


def test_a_frozen_node_of_a_large_cluster_is_found_by_whoever_calls_it() -> None:
    cluster = calm(MANY)
    cluster.run_for(2 * ROUNDS * GOSSIP_S)
    reader = cluster.join(0)
    cluster.node(1).freeze()
    match(cluster, reader, placed(cluster, 1, 2))
    cluster.run_for(2 * GOSSIP_S + 0.05)
    assert cluster.core(0).counters[SUSPECTED] == 1
    # All others find it in their turn.
    cluster.run_for(cluster.core(0)._peers.notices_s)
    reachable = [cluster.core(node)._peers.reachable(NodeId("n1")) for node in range(2, MANY)]
    assert not any(reachable)
    cluster.node(1).thaw()
    cluster.run_for(GOSSIP_S + 0.05)
    assert all(cluster.core(node)._peers.usable(NodeId("n1")) for node in range(MANY) if node != 1)
