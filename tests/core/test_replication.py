"""Hot segments on whole nodes: replicas, the choice of a copy, and failures, restarts and false reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.core.scenes import ask, calm, copies, fetch, kinds, match, placed, said, store, tell
from tests.sim.arena import SHARDS, SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.core import events, instructions, serve
from tokenlake.core.fetch import FETCHED
from tokenlake.core.replicas import CHOSEN, COPIED, UNLISTED_S
from tokenlake.core.replication import CROWD_READS, DEMOTED, MISSED, PROMOTED, REFUSED_S
from tokenlake.hot import Change, HotRule
from tokenlake.hot.rule import DROP_S
from tokenlake.identity import SegmentKey
from tokenlake.store import Kind
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

NODES = 4


def scene(nodes: int = NODES, **rules: Any) -> tuple[Cluster, list[Engine]]:
    """An engine on each node, after the time in which a node that joined gets no replicas."""
    cluster = calm(nodes, replica_share=0.5, **rules)
    engines = [cluster.join(node) for node in range(nodes)]
    cluster.run_for(1.0)
    return cluster, engines


def read(cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey]) -> list[Code]:
    """Match, fetch and release, then drop the cached copy, as if other reads had evicted it."""
    found = match(cluster, reader, keys)
    fetched = fetch(cluster, reader, found.lease, found.hits) if found.hits else None
    tell(cluster, reader.processes[0], engine.Release(((found.lease, 0, found.hits),)))
    core = reader.node.core
    assert core is not None
    for segment in list(core.store.segments()):
        if segment.key in keys and segment.kind is Kind.CACHED and not segment.pins:
            core.store.discard(segment, cluster.clock.now)
    return [Code(code) for code in fetched.codes] if fetched is not None else []


def hot(**rules: Any) -> tuple[Cluster, list[Engine], SegmentKey]:
    """A segment of node 0, read by all others until it has replicas."""
    cluster, engines = scene(**rules)
    (key,) = placed(cluster, 0, 1)
    store(cluster, engines[0], [key])
    crowd(cluster, engines, key)
    return cluster, engines, key


def crowd(cluster: Cluster, engines: Sequence[Engine], key: SegmentKey, rounds: int = 6) -> None:
    for _ in range(rounds):
        for reader in engines[1:]:
            if reader.alive:
                assert read(cluster, reader, [key]) == [Code.LOCAL]
        cluster.run_for(0.05)
    cluster.run_for(0.5)
    cluster.check()


def test_a_hot_segment_is_replicated_and_known() -> None:
    cluster, _, key = hot()
    assert kinds(cluster, key) == {0: Kind.PRIMARY, 1: Kind.REPLICA, 2: Kind.REPLICA, 3: Kind.REPLICA}
    for node in range(NODES):
        assert cluster.core(node).hot()["known"] == 1
    assert cluster.core(0).counters[PROMOTED] == 1
    assert sum(cluster.core(node).counters[COPIED] for node in range(NODES)) <= NODES - 1
    assert cluster.keepers() == {("red", key): ["n0"]}


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_observing_counts_and_replicates_nothing(mode: str) -> None:
    cluster, engines = scene(hot=mode)
    (key,) = placed(cluster, 0, 1)
    store(cluster, engines[0], [key])
    crowd(cluster, engines, key)
    assert kinds(cluster, key) == {0: Kind.PRIMARY}
    assert cluster.core(0).counters[PROMOTED] == (mode == "observe")
    notes = [note.text for note in said(cluster, 0, instructions.Note) if "hot" in note.text]
    assert len(notes) == (mode == "observe")
    assert not said(cluster, 0, peer.HotSet)
    cluster.settle()
    cluster.check_settled()


def test_replicas_without_reads_become_cached() -> None:
    cluster, _, key = hot()
    cluster.run_for(DROP_S + 600.0)
    assert cluster.core(0).counters[DEMOTED] == 1
    assert set(kinds(cluster, key).values()) == {Kind.PRIMARY, Kind.CACHED}
    assert all(
        cluster.core(node).hot() == {"known": 0, "of this directory node": 0, "copies": 0} for node in range(NODES)
    )


def test_a_match_asks_one_copy_of_a_hot_segment() -> None:
    cluster, engines, key = hot(nodes=6)
    reader = 5
    cluster.core(reader).store.discard(copies(cluster, key)[reader], cluster.clock.now)
    lookups, chosen = len(said(cluster, reader, peer.Lookup)), cluster.core(reader).counters[CHOSEN]
    assert read(cluster, engines[reader], [key]) == [Code.LOCAL]
    assert cluster.core(reader).counters[CHOSEN] == chosen + 1
    assert len(said(cluster, reader, peer.Lookup)) == lookups + 1


def test_an_evicted_replica_costs_one_lookup() -> None:
    cluster, engines, key = hot()
    found = copies(cluster, key)
    for node in (2, 3):
        cluster.core(node).store.discard(found[node], cluster.clock.now)
    reader = 1
    cluster.core(reader).store.discard(found[reader], cluster.clock.now)
    before = cluster.core(reader).counters[MISSED]
    for _ in range(8):
        assert read(cluster, engines[reader], [key]) == [Code.LOCAL]
    assert cluster.core(reader).counters[MISSED] > before
    cluster.check()


def test_a_frozen_replica_costs_no_match_its_deadline() -> None:
    """After a quarter of its deadline the match asks the candidates, and waits as long again for the nodes that they
    name."""
    cluster, engines, key = hot()
    found = copies(cluster, key)
    cluster.core(1).store.discard(found[1], cluster.clock.now)
    core = cluster.core(1)
    cluster.node(2).freeze()
    cluster.node(3).freeze()
    took: list[float] = []
    for _ in range(4):
        began = cluster.clock.now
        reply = match(cluster, engines[1], [key])
        took.append(cluster.clock.now - began)
        assert reply.hits == 1
        tell(cluster, engines[1].processes[0], engine.Release(((reply.lease, 0, 1),)))
    assert max(took) < core.config.match_deadline_s
    cluster.node(2).thaw()
    cluster.node(3).thaw()
    cluster.run_for(1.0)
    cluster.check()


def test_a_dead_owner_leaves_one_primary_copy() -> None:
    cluster, engines, key = hot()
    cluster.node(0).crash()
    cluster.run_for(2.0)
    assert sorted(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1
    for reader in engines[1:]:
        assert read(cluster, reader, [key]) == [Code.LOCAL]
    cluster.node(0).start()
    cluster.run_for(2.0)
    cluster.settle()
    cluster.check_settled()


def test_an_evicted_primary_copy_is_replaced() -> None:
    cluster, _, key = hot()
    cluster.core(0).store.drop(copies(cluster, key)[0], cluster.clock.now)
    cluster.node(0).deliver(events.Tick())
    cluster.run_for(1.0)
    assert list(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1
    cluster.settle()
    cluster.check_settled()


def test_a_missed_hot_set_is_sent_again() -> None:
    cluster, engines = scene()
    (key,) = placed(cluster, 0, 1)
    store(cluster, engines[0], [key])
    link = cluster.link("n0", "n2")
    for _ in range(6):
        for reader in (1, 3):
            read(cluster, engines[reader], [key])
        link.drop = 1
    cluster.run_for(2.0)
    assert cluster.core(0).hot()["known"] == 1
    assert cluster.core(2).hot()["known"] == 1


def test_a_restarted_directory_node_has_no_hot_set() -> None:
    cluster, _, key = hot()
    cluster.node(0).crash()
    cluster.node(0).start()
    cluster.run_for(1.0)
    assert [cluster.core(node).hot()["known"] for node in range(NODES)] == [0] * NODES
    cluster.run_for(UNLISTED_S + 1.0)
    assert Kind.REPLICA not in kinds(cluster, key).values()
    assert sorted(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1


def test_a_node_that_just_joined_gets_no_replicas() -> None:
    cluster, engines = scene(sync_grace_s=1e6)
    (key,) = placed(cluster, 0, 1)
    store(cluster, engines[0], [key])
    crowd(cluster, engines, key)
    assert kinds(cluster, key) == {0: Kind.PRIMARY}


def test_a_node_refuses_replicas_beyond_its_budget() -> None:
    cluster, engines = scene()
    keys = placed(cluster, 0, 1, 8)
    store(cluster, engines[0], keys)
    for number, key in enumerate(keys):
        cluster.node(2).deliver(events.PeerSent("n0", replicate(100 + number, key)))
    cluster.run_for(1.0)
    replies = [reply.codes for reply in said(cluster, 2, peer.ReplicateReply)]
    assert replies.count(bytes([Code.COMMITTED])) == cluster.core(2).hot()["copies"] > 0
    assert bytes([Code.REPLICA_BUDGET]) in replies
    cluster.check()


def recorded_owner(cluster: Cluster, directory_node: int, key: SegmentKey) -> str:
    """The owner that the directory node records, found out by a report of another node that it owns the segment."""
    claimant = f"n{len(cluster.nodes) - 1}"
    out = cluster.core(directory_node).handle(
        events.PeerSent(claimant, peer.PrimaryCopies("red", key)), cluster.clock.now
    )
    replies = [each.message for each in out if isinstance(each, instructions.SendToPeer)]
    return next((reply.nodes[0] for reply in replies if isinstance(reply, peer.Redundant)), claimant)


def replicate(call: int, key: SegmentKey) -> peer.Replicate:
    return peer.Replicate(call, "red", key, (0,), SLOT_BYTES, SHARDS, "n0", "n0")


def test_reads_of_a_replica_touch_the_primary_copy() -> None:
    cluster, engines, key = hot()
    before = copies(cluster, key)[0].touched
    assert kinds(cluster, key)[2] is Kind.REPLICA
    fetched = cluster.core(2).counters[FETCHED]
    read(cluster, engines[2], [key])
    assert cluster.core(2).counters[FETCHED] == fetched
    cluster.run_for(0.5)
    assert copies(cluster, key)[0].touched > before


@pytest.mark.parametrize(
    "entries",
    [
        (peer.HotEntry("red", bytes(32), (0, 99)),),
        (peer.HotEntry("red", bytes(32), (0, 1) * NODES),),
        tuple(peer.HotEntry("red", bytes(32), (0,)) for _ in range(5000)),
    ],
)
def test_an_impossible_hot_set_is_refused(entries: tuple[peer.HotEntry, ...]) -> None:
    cluster, _ = scene()
    with pytest.raises(ValueError, match="hot set"):
        cluster.core(1).handle(events.PeerSent("n0", peer.HotSet(9, entries)), cluster.clock.now)


def test_a_hot_set_lists_only_keys_of_its_directory_node() -> None:
    cluster, _ = scene()
    (key,) = placed(cluster, 2, 1)
    cluster.core(1).handle(
        events.PeerSent("n0", peer.HotSet(9, (peer.HotEntry("red", key, (0, 3)),))), cluster.clock.now
    )
    assert cluster.core(1).hot()["known"] == 0


def test_false_reports_cost_at_most_the_budgets() -> None:
    """Segments without a copy are not replicated; others are, up to `replica_share`."""
    cluster, engines = scene()
    keys = placed(cluster, 0, 1, 20)
    store(cluster, engines[0], keys[:4])
    counts = (1 << 31,) * len(keys)
    lies = peer.ReadCounts("red", join_keys(keys), (0,) * len(keys), counts, SLOT_BYTES, SHARDS)
    for _ in range(5):
        cluster.node(0).deliver(events.PeerSent("n3", lies))
        cluster.run_for(0.5)
        cluster.check()
    for node in range(1, NODES):
        pools = list(cluster.core(node).store.pools())
        assert sum(pool.counts[Kind.REPLICA] for pool in pools) <= 4
    cluster.settle()
    cluster.check_settled()


def test_a_planned_batch_is_spread_evenly() -> None:
    cluster, engines, key = hot(nodes=5)
    reader = engines[4]
    cluster.core(4).store.discard(copies(cluster, key)[4], cluster.clock.now)
    cluster.run_for(60.0)
    before = {node: len(said(cluster, node, peer.LookupReply)) for node in range(4)}
    for _ in range(8):
        ask(reader.processes[0], engine.Match, key, 0.0, True, "", None, 0, 0.0, True)
    cluster.run_for(0.05)
    assert [len(said(cluster, node, peer.LookupReply)) - before[node] for node in range(4)] == [2, 2, 2, 2]


def test_a_copy_that_is_fully_leased_stays_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node answers UNKNOWN, since it can lease the copy to no reader now. The copy stays in the hot set, and its
    owner in the directory."""
    cluster, engines, key = hot(nodes=5)
    reader = 4
    cluster.core(reader).store.discard(copies(cluster, key)[reader], cluster.clock.now)
    evictions = len(said(cluster, reader, peer.Evicted))
    with monkeypatch.context() as patch:
        patch.setattr(serve, "PEER_LEASE_SHARE", 0.0)
        for _ in range(8):
            assert match(cluster, engines[reader], [key]).hits == 0
        cluster.run_for(0.1)
    assert recorded_owner(cluster, 0, key) == "n0"
    assert len(said(cluster, reader, peer.Evicted)) == evictions
    assert read(cluster, engines[reader], [key]) == [Code.LOCAL]


def at_the_other_candidate() -> tuple[Cluster, SegmentKey]:
    """A hot segment whose directory node is n0 and whose owner is n1, with replicas on all other nodes."""
    cluster, engines = scene()
    (key,) = placed(cluster, 0, 1)
    cluster.node(0).freeze()
    cluster.run_for(0.6)
    store(cluster, engines[1], [key])
    cluster.node(0).thaw()
    cluster.run_for(1.0)
    crowd(cluster, [engines[1], engines[0], engines[2], engines[3]], key)
    assert kinds(cluster, key) == {0: Kind.REPLICA, 1: Kind.PRIMARY, 2: Kind.REPLICA, 3: Kind.REPLICA}
    return cluster, key


def evict(cluster: Cluster, key: SegmentKey, nodes: Sequence[int]) -> None:
    """Evict the copies as for want of memory. The directory node is not told."""
    for node in nodes:
        cluster.core(node).store.discard(copies(cluster, key)[node], cluster.clock.now)


def test_the_last_copy_becomes_the_primary_copy() -> None:
    cluster, key = at_the_other_candidate()
    directory_node = cluster.core(0)
    tenant = copies(cluster, key)[0].tenant
    evict(cluster, key, (2, 3))
    for node in (2, 3):
        directory_node.handle(events.PeerSent(f"n{node}", peer.Evicted(tenant, key, f"n{node}")), cluster.clock.now)
    evict(cluster, key, (1,))
    cluster.node(0).deliver(events.PeerSent("n1", peer.Evicted(tenant, key, "n1")))
    cluster.run_for(0.5)
    assert kinds(cluster, key)[0] is Kind.PRIMARY
    assert recorded_owner(cluster, 0, key) == "n0"
    cluster.settle()
    cluster.check_settled()


def test_one_node_at_a_time_is_asked_to_become_owner() -> None:
    cluster, key = at_the_other_candidate()
    node = cluster.node(0)
    evict(cluster, key, (1,))
    for gone in ("n1", "n0"):
        node.deliver(events.PeerSent("n1", peer.Evicted("red", key, gone)))
    offers = len(said(cluster, 0, peer.Offer))
    # Reports of a crowd: the directory node decides at each, before the first answer can arrive.
    for _ in range(5):
        node.deliver(events.PeerSent("n3", peer.ReadCounts("red", key, (0,), (CROWD_READS,), SLOT_BYTES, SHARDS)))
    assert cluster.core(0).hot()["of this directory node"] == 1
    cluster.run_for(0.5)
    assert list(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1
    assert len(said(cluster, 0, peer.Offer)) == offers + 1
    cluster.settle()
    cluster.check_settled()


def test_a_node_without_its_replica_is_not_asked_soon() -> None:
    cluster, _, key = hot()
    tenant = copies(cluster, key)[0].tenant
    evict(cluster, key, (2,))
    cluster.node(0).deliver(events.PeerSent("n1", peer.Evicted(tenant, key, "n2")))
    asked = len(said(cluster, 0, peer.Replicate))
    cluster.run_for(REFUSED_S / 2)
    assert len(said(cluster, 0, peer.Replicate)) == asked
    assert 2 not in kinds(cluster, key)


def test_off_ignores_reports_of_other_nodes() -> None:
    cluster, engines = scene(hot="off")
    keys = placed(cluster, 0, 1, 2)
    store(cluster, engines[0], keys)
    counts = (1 << 20,) * len(keys)
    cluster.node(0).deliver(
        events.PeerSent("n3", peer.ReadCounts("red", join_keys(keys), (0, 1), counts, SLOT_BYTES, SHARDS))
    )
    assert cluster.core(0).counters[PROMOTED] == 0
    assert cluster.core(0).hot()["of this directory node"] == 0


def test_a_dead_replica_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = HotRule.decide

    def three_copies(self: HotRule, *of: Any) -> list[Change]:
        return [Change(change.item, min(3, change.copies)) for change in decide(self, *of)]

    monkeypatch.setattr(HotRule, "decide", three_copies)
    cluster, _, key = hot(nodes=6)
    replicas = [node for node, kind in kinds(cluster, key).items() if kind is Kind.REPLICA]
    assert len(replicas) == 2
    cluster.node(replicas[0]).crash()
    cluster.run_for(2.0)
    after = [node for node, kind in kinds(cluster, key).items() if kind is Kind.REPLICA]
    assert len(after) == 2
    assert replicas[0] not in after
