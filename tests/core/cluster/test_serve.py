"""The fan-out limit: redirects, deferrals, and their cost when nodes fail or lie."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.core import scenes
from tests.core.scenes import ask, calm, copies, fetch, kinds, match, placed, said, store, stored, tell, within
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Reading, Storing
from tokenlake.core import events, instructions
from tokenlake.core.cluster import fan_out, serve
from tokenlake.core.cluster.fan_out import DEFERRED, FAN_OUT, RECIPIENTS_KEPT_S, REDIRECTED, FanOut, Verdict
from tokenlake.core.cluster.serve import PEER_LEASE_SHARE
from tokenlake.core.instructions import SendBulk
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.memory import Kind
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

CROWD = 12


def scene(nodes: int = 6, **rules: Any) -> tuple[Cluster, list[Engine], SegmentKey]:
    """A segment with one copy, at node 0, and an engine on each node."""
    cluster = calm(nodes, **rules)
    engines = [cluster.join(node) for node in range(nodes)]
    cluster.run_for(0.1)
    (key,) = placed(cluster, 0, 1)
    store(cluster, engines[0], [key])
    cluster.run_for(1.0)
    assert kinds(cluster, key) == {0: Kind.PRIMARY}
    return cluster, engines, key


def read(cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey]) -> None:
    assert scenes.read(cluster, reader, keys) == [Code.LOCAL] * len(keys)


def pulls(cluster: Cluster) -> Counter[str]:
    """Per node, the segments that were fetched from it for engines."""
    fetched: Counter[str] = Counter()
    for node in range(len(cluster.nodes)):
        for order in said(cluster, node, instructions.StartFetch):
            if not order.background:
                fetched[order.node] += len(order.keys) // 32
    return fetched


def total(cluster: Cluster, metric: Metric) -> int:
    return sum(int(cluster.core(node).counters[metric]) for node in range(len(cluster.nodes)))


def test_the_third_reader_is_redirected() -> None:
    cluster, engines, key = scene()
    for reader in engines[2:]:
        read(cluster, reader, [key])
    assert total(cluster, REDIRECTED) == len(engines) - 2 - FAN_OUT
    assert pulls(cluster)["n0"] == FAN_OUT
    assert pulls(cluster).total() == len(engines) - 2
    cluster.settle()
    cluster.check_settled()


def test_recipients_are_forgotten() -> None:
    cluster, engines, key = scene()
    for reader in engines[2:]:
        cluster.run_for(RECIPIENTS_KEPT_S + 0.5)
        assert cluster.core(0).census()["segments with recipients"] == 0
        read(cluster, reader, [key])
    assert pulls(cluster) == {"n0": len(engines) - 2}


def test_a_waiting_crowd_reads_from_each_other() -> None:
    cluster = calm(CROWD, regions=8, dirty_share=1.0, session_reserve_share=1.0)
    engines = [cluster.join(node) for node in range(CROWD)]
    keys = [*placed(cluster, 1, 2, 1), *placed(cluster, 3, 4, 2)]
    writer, *readers = engines
    writer.store(keys, 0, Storing(fill_s=0.3))
    cluster.run_for(0.05)
    for reader in readers:
        reader.read(keys, Reading(hold_s=0.05, in_flight_wait_s=3.0))
    cluster.run_for(2.0)
    assert [reader.answers[0].hits for reader in readers] == [len(keys)] * len(readers)
    assert [reader.answers[1].codes for reader in readers] == [bytes([Code.LOCAL] * len(keys))] * len(readers)
    assert max(pulls(cluster).values()) <= 2 * FAN_OUT * len(keys)
    assert total(cluster, REDIRECTED)
    assert total(cluster, DEFERRED)
    cluster.settle()
    cluster.check_settled()


def freeze_readers(cluster: Cluster, engines: Sequence[Engine], key: SegmentKey) -> None:
    """A send to each of these nodes begins, and the node freezes before it has the segment."""
    core = cluster.core(0)
    for count, reader in enumerate(engines, 1):
        found = match(cluster, reader, [key])
        ask(reader.processes[0], engine.Fetch, found.lease, 0, 1, 0.0)
        until = cluster.clock.now + 1.0
        while core.census()["sends"] < count and cluster.clock.now < until:
            cluster.run_for(0.00005)
        reader.node.freeze()
    assert core.census()["sends"] == len(engines)


def test_a_match_that_cannot_wait_is_served() -> None:
    cluster, engines, key = scene()
    freeze_readers(cluster, engines[2:4], key)
    read(cluster, engines[4], [key])
    assert total(cluster, REDIRECTED) == total(cluster, DEFERRED) == 0
    assert pulls(cluster)["n0"] == 3


def test_frozen_readers_defer_others_briefly() -> None:
    cluster, engines, key = scene()
    freeze_readers(cluster, engines[2:4], key)
    began = cluster.clock.now
    waiting = ask(engines[4].processes[0], engine.Match, key, 0.0, True, "", None, 0, 5.0)
    while not waiting and cluster.clock.now < began + 5.0:
        cluster.run_for(0.001)
    assert waiting[0].hits == 1
    assert cluster.core(0).counters[DEFERRED] > 0
    assert cluster.clock.now - began < 0.2
    assert fetch(cluster, engines[4], waiting[0].lease, 1).codes == bytes([Code.LOCAL])
    for reader in engines[2:4]:
        reader.node.thaw()
    cluster.run_for(0.5)
    cluster.settle()
    cluster.check_settled()


def test_a_frozen_recipient_costs_part_of_a_deadline() -> None:
    cluster, engines, key = scene()
    for reader in engines[2:4]:
        read(cluster, reader, [key])
    for reader in engines[2:4]:
        reader.node.freeze()
    with within(cluster, 0.75 * cluster.core(4).config.match_deadline_s):
        reply = match(cluster, engines[4], [key])
        assert reply.hits == 1
    assert fetch(cluster, engines[4], reply.lease, 1).codes == bytes([Code.LOCAL])


@pytest.mark.parametrize("redirect", ["n4", "n0", "n1", "n5"])
def test_a_false_redirect_costs_one_lookup(redirect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The redirect names the reader itself, the sender of the redirect, a candidate, or a node without a copy."""
    cluster, engines, key = scene()
    lookups = len(said(cluster, 4, peer.Lookup))
    with monkeypatch.context() as patch:
        verdict = Verdict(NodeId(redirect)) if redirect != "n4" else Verdict()
        patch.setattr(FanOut, "decide", lambda self, node, segments, *, patient: verdict)
        if redirect == "n4":
            # Delivered as a frame, since the rules of the sender never redirect a reader to itself.
            reply = peer.LookupReply(0, 0, b"", (), (0.0, 0.0, 0.0), 0.0, redirect="n4")
            cluster.node(4).deliver(events.PeerSent("n0", reply))
        for _ in range(3):
            found = match(cluster, engines[4], [key])
            assert found.hits == 1
            tell(cluster, engines[4].processes[0], engine.Release(((found.lease, 0, 1),)))
        assert len(said(cluster, 4, peer.Lookup)) - lookups <= 3 * 3
        read(cluster, engines[4], [key])
        cluster.check()
    cluster.settle()
    cluster.check_settled()


def test_the_number_of_remembered_segments_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "MAX_REMEMBERED", 2)
    cluster = calm(4)
    engines = [cluster.join(node) for node in range(4)]
    keys = placed(cluster, 0, 1, 4)
    store(cluster, engines[0], keys)
    found = match(cluster, engines[2], keys)
    fetch(cluster, engines[2], found.lease, found.hits)
    assert found.hits == 4
    assert cluster.core(0).census()["segments with recipients"] == 2
    cluster.check()


def test_later_sends_do_not_prolong_a_deferral() -> None:
    """A reader is deferred for the sends under way at its first lookup, not for those that begin meanwhile."""
    cluster, _, key = scene()
    core, streams = cluster.core(0), itertools.count(100)
    lookup = events.PeerSent("n4", peer.Lookup(1, "red", key, may_defer=True))
    deferred, began = True, cluster.clock.now
    while deferred and cluster.clock.now < began + 1.0:
        for node in ("n2", "n3"):
            core.handle(events.PullRequested(next(streams), node, "red", key), cluster.clock.now)
        replies = [
            out.message for out in core.handle(lookup, cluster.clock.now) if isinstance(out, instructions.SendToPeer)
        ]
        deferred = [reply.codes for reply in replies if isinstance(reply, peer.LookupReply)] == [bytes([Code.DEFERRED])]
        cluster.run_for(0.01)
    assert 0.05 <= cluster.clock.now - began < 0.1
    assert core.counters[DEFERRED] > 3


def redirects(cluster: Cluster, key: SegmentKey, reader: str, lookups: int = 12) -> set[str]:
    """The redirects that node 0 answers to lookups of a reader; the load that each causes makes the next one differ."""
    core, now = cluster.core(0), cluster.clock.now
    found = set()
    for _ in range(lookups):
        out = core.handle(events.PeerSent(reader, peer.Lookup(1, "red", key)), now)
        (reply,) = (each.message for each in out if isinstance(each, instructions.SendToPeer))
        assert isinstance(reply, peer.LookupReply)
        found.add(reply.redirect)
        core.handle(events.PeerSent(reader, peer.ReleaseLease((reply.lease,))), now)
    return found


def send(cluster: Cluster, key: SegmentKey, reader: str, stream: int) -> None:
    """Node 0 sends the segment to an engine of a node."""
    core = cluster.core(0)
    core.handle(events.PullRequested(stream, reader, "red", key), cluster.clock.now)
    core.handle(events.SendDone(stream), cluster.clock.now)


def test_redirects_name_only_recipients_that_have_it() -> None:
    """A redirect names neither a recipient that is down nor one from which a redirected reader came back."""
    cluster, _, key = scene(nodes=7)
    for stream, node in enumerate(("n2", "n3", "n6"), 100):
        send(cluster, key, node, stream)
    assert redirects(cluster, key, "n5") == {"n2", "n3", "n6"}
    cluster.core(0).handle(events.PeerDown("n6", 1), cluster.clock.now)
    assert redirects(cluster, key, "n5") == {"n2", "n3"}
    (without_it,) = redirects(cluster, key, "n4", lookups=1)
    send(cluster, key, "n4", 103)
    assert redirects(cluster, key, "n5", lookups=60) == {"n2", "n3", "n4"} - {without_it}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_other_nodes_lease_a_share_of_the_slots(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup beyond the share is answered with UNKNOWN, since another node may have a copy that can be leased."""
    monkeypatch.setattr(serve, "PEER_LEASE_SHARE", share)
    cluster, engines, key = scene()
    found = match(cluster, engines[4], [key])
    assert found.codes == bytes([Code.REMOTE if share else Code.UNKNOWN])
    assert cluster.core(0).census()["leases to peers"] == found.hits == bool(share)


def test_peer_leases_of_a_tenant_leave_room_for_another() -> None:
    """Leases of one tenant's segments do not count against another tenant, whose lookups would be answered with
    UNKNOWN."""
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0)
    keys = placed(cluster, 0, 1, 4)
    for tenant in ("red", "blue"):
        store(cluster, cluster.join(0, tenant=tenant), keys)
    lookups = [("red", keys[:3]), ("red", keys[:3]), ("red", keys[2:]), ("blue", keys[:3])]
    # Two leases on the same slots count once.
    assert [leased(cluster, *lookup) for lookup in lookups] == [3, 3, 1, 3]
    cluster.check()


def test_leases_on_the_same_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "READERS_PER_SLOT", 2)
    cluster, _, key = scene()
    half_of_the_slots = 6
    lent = [leased(cluster, "red", [key]) for _ in range(2 * half_of_the_slots + 1)]
    assert lent == [1] * 2 * half_of_the_slots + [0]
    cluster.check()


def leased(cluster: Cluster, tenant: str, keys: Sequence[SegmentKey]) -> int:
    """Number of segments that node 0 leases to node 2."""
    cluster.node(0).deliver(events.PeerSent("n2", peer.Lookup(0, tenant, join_keys(keys))))
    return said(cluster, 0, peer.LookupReply)[-1].codes.count(Code.LOCAL)


def test_one_node_that_reads_slowly_pins_a_share_of_the_slots() -> None:
    """Its sends do not end: no `SendDone` follows."""
    cluster, _, keys = stored(4)
    core, now = cluster.core(0), cluster.clock.now
    capacity = core.store.capacity(copies(cluster, keys[0])[0].pool)

    def sent(stream: int, node: str) -> int:
        [bulk] = core.handle(events.PullRequested(stream, node, "red", join_keys(keys)), now)
        assert isinstance(bulk, SendBulk)
        return bulk.codes.count(Code.LOCAL)

    # Node 1 asks again and again.
    slow = [sent(stream, "n1") for stream in range(1, 9)]
    assert slow[0] == len(keys)
    assert sum(slow) <= PEER_LEASE_SHARE * capacity
    assert sent(100, "n2") == len(keys), "another node is served"
    for stream in range(1, 9):
        core.handle(events.SendDone(stream), now)
    assert sent(1, "n1") == len(keys)
    core.check_integrity()


def test_leases_of_one_message_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SLICE", 20)
    cluster, _, (key,) = stored()
    node = cluster.node(0)
    for call in range(10):
        node.deliver(events.PeerSent("n2", peer.Lookup(call + 1, "red", key)))
    leases = [message.lease for message in said(cluster, 0, peer.LookupReply)]
    assert len(set(leases)) == 10
    node.deliver(events.PeerSent("n2", peer.ReleaseLease(tuple(leases))))
    assert cluster.core(0).census()["leases to peers"] == 7
    cluster.check()
    cluster.run_for(0.5)
    assert cluster.core(0).census()["leases to peers"] == 0
    cluster.check()
