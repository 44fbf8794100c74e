"""Nodes that freeze, die, come back empty, and networks that break."""

from __future__ import annotations

from tests.core.scenes import answer, ask, calm, copies, fetch, kinds, match, placed, prepare, said, store
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tokenlake.core import events, instructions
from tokenlake.core.fetch import ABORTED, deadline_s
from tokenlake.core.peers import SUSPECTED
from tokenlake.identity import LeaseId, NodeId, SegmentKey
from tokenlake.store import Kind
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

MATCH_S = 0.020


def usable(cluster: Cluster, node: int, other: int) -> bool:
    return cluster.core(node)._peers.usable(NodeId(f"n{other}"))


def timed_match(cluster: Cluster, reader: Engine, keys: list[SegmentKey]) -> float:
    began = cluster.clock.now
    match(cluster, reader, keys)
    return cluster.clock.now - began


def test_a_frozen_peer_costs_one_deadline_and_comes_back() -> None:
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


def test_matches_under_way_wait_for_a_frozen_peer_together() -> None:
    cluster = calm()
    readers = [cluster.join(0), cluster.join(0)]
    keys = placed(cluster, 1, 2)
    cluster.run_for(0.01)
    cluster.node(1).freeze()
    replies = [ask(reader.processes[0], engine.Match, keys[0], 0.0) for reader in readers]
    cluster.run_for(MATCH_S + 0.010)
    assert all(replies)


def test_a_node_that_stood_still_takes_the_answers_that_came_meanwhile() -> None:
    """Its own absence is no peer's: what came is not UNKNOWN, and the peer is asked again at once."""
    cluster = calm()
    writer, reader = cluster.join(1), cluster.join(0)
    keys = placed(cluster, 1, 2, 3)
    store(cluster, writer, keys)
    answers = ask(reader.processes[0], engine.Match, join_keys(keys), 0.0)
    while not said(cluster, 0, peer.Lookup):
        cluster.run_for(0.0001)
    cluster.node(0).freeze()
    cluster.run_for(5 * MATCH_S)
    cluster.node(0).thaw()
    cluster.run_for(0.01)
    assert list(answers[0].codes) == [Code.REMOTE] * 3
    assert usable(cluster, 0, 1)


def test_a_peer_that_missed_a_deadline_is_still_told() -> None:
    """What an overdue peer is not told nobody would repeat: it never becomes SUSPECT."""
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


def test_a_fetch_from_a_frozen_node_is_given_up_in_time() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    (session,) = cluster.core(2)._sessions
    (source,) = set(session.leases[LeaseId(lease)].remotes)
    cluster.node(int(str(source).removeprefix("n"))).freeze()
    began = cluster.clock.now
    assert list(fetch(cluster, reader, lease, 2).codes) == [Code.LOST] * 2
    assert cluster.clock.now - began < 0.060
    assert cluster.core(2).counters[ABORTED] == 1
    # The receiver has not returned yet: its slots are still reserved. Then they are free.
    cluster.run_for(0.2)
    assert not copies(cluster, keys[0]).get(2)


def test_the_other_candidate_serves_when_the_directory_node_is_dead() -> None:
    cluster = calm()
    reader = cluster.join(0)
    key = placed(cluster, 1, 2)[0]
    for link in cluster.links_of("n1"):
        link.cut(0.3)
    store(cluster, cluster.join(2), [key])
    cluster.run_for(0.3)
    assert kinds(cluster, key) == {2: Kind.PRIMARY}
    cluster.node(1).crash()
    assert match(cluster, reader, [key]).codes == bytes([Code.REMOTE])


def test_a_directory_node_that_came_back_empty_learns_what_others_hold() -> None:
    """Until the owner advertised, the directory node does not say that nobody has it."""
    cluster = calm(4, sync_grace_s=60.0)
    writer = cluster.join(0)
    key = placed(cluster, 1, 2)[0]
    for node in (1, 2):
        cluster.link("n0", f"n{node}").cut(0.3)
    store(cluster, writer, [key])
    cluster.run_for(0.3)
    assert kinds(cluster, key) == {0: Kind.PRIMARY}
    reader = cluster.join(3)
    assert match(cluster, reader, [key]).codes == bytes([Code.REMOTE])
    cluster.node(1).crash()
    cluster.link("n0", "n1").cut(1.0)
    cluster.node(1).start()
    cluster.run_for(0.3)
    assert match(cluster, reader, [key]).codes == bytes([Code.UNKNOWN])
    cluster.run_for(1.0)
    reply = match(cluster, reader, [key])
    assert reply.codes == bytes([Code.REMOTE])
    assert list(fetch(cluster, reader, reply.lease, 1).codes) == [Code.LOCAL]
    missing = placed(cluster, 1, 2, 2)[1]
    assert match(cluster, reader, [missing]).codes == bytes([Code.MISSING])


def test_a_node_that_restarts_stores_nothing_twice() -> None:
    cluster = calm()
    writer = cluster.join(0)
    keys = placed(cluster, 1, 2, 3)
    store(cluster, writer, keys)
    cluster.node(1).crash()
    cluster.node(1).start()
    cluster.run_for(1.0)
    again = cluster.join(1)
    # The writer still had its copies: they are primary copies now.
    assert match(cluster, again, keys).hits == 3
    store(cluster, again, keys)
    assert all(list(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1 for key in keys)


def test_a_push_to_a_owner_that_dies_ends_as_a_primary_copy_here() -> None:
    cluster = calm()
    writer = cluster.join(0)
    keys = placed(cluster, 1, 2, 3)
    cluster.run_for(0.01)
    writer.store(keys, 0, Storing())
    while not said(cluster, 0, peer.Offer):
        cluster.run_for(0.0002)
    for node in (1, 2):
        cluster.node(node).crash()
    cluster.run_for(0.1)
    assert all(kinds(cluster, key) == {0: Kind.PRIMARY} for key in keys)


def test_an_offer_that_nobody_answers_ends() -> None:
    cluster = calm()
    writer = cluster.join(0)
    keys = placed(cluster, 1, 2, 3)
    cluster.run_for(0.01)
    writer.store(keys, 0, Storing())
    while not said(cluster, 0, peer.Offer):
        cluster.run_for(0.0002)
    for node in (1, 2):
        cluster.node(node).freeze()
    cluster.run_for(2.0)
    assert all(kinds(cluster, key) == {0: Kind.PRIMARY} for key in keys)
    for node in (1, 2):
        cluster.node(node).thaw()
    cluster.run_for(2.0)
    assert all(list(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1 for key in keys)


def test_a_connection_made_anew_ends_what_the_former_one_carried() -> None:
    """PeerUp without a PeerDown before it: the peer restarted faster than its connection broke."""
    cluster = calm()
    store(cluster, cluster.join(0), placed(cluster, 0, 1, 2))
    reader = cluster.join(2)
    match(cluster, reader, placed(cluster, 0, 1, 2))
    # Whichever of the two copies answered first.
    (lender,) = (node for node in (0, 1) if cluster.core(node).census()["leases to peers"])
    cluster.node(lender).deliver(events.PeerUp("n2", 9))
    assert cluster.core(lender).census()["leases to peers"] == 0


def test_a_session_that_is_gone_frees_what_it_held() -> None:
    cluster = calm()
    engine_ = cluster.join(0, processes=2)
    cluster.run_for(0.01)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, engine_, keys)
    match(cluster, engine_, keys)
    prepare(cluster, engine_, placed(cluster, 0, 1, 2, "more"))
    assert not cluster.core(0).idle()
    engine_.die()
    cluster.run_for(0.5)
    assert cluster.core(0).idle()
    assert not cluster.core(0).census()["sessions"]


def test_a_silent_session_keeps_its_slots_and_loses_its_names() -> None:
    cluster = calm(reservation_s=60.0)
    silent, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    cluster.run_for(0.01)
    prepared = prepare(cluster, silent, keys)
    silent.silent_until = cluster.clock.now + 5.0
    cluster.run_for(2 * cluster.lease_s)
    assert list(prepare(cluster, other, keys).codes) == [Code.RESERVED] * 2
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [2]
    beat = answer(cluster, silent.processes[0], engine.Heartbeat)
    assert not beat.alive
    late = answer(cluster, silent.processes[0], engine.Commit, prepared.write, (0, 1), 3, bytes(32))
    assert list(late.codes) == [Code.EXPIRED] * 2
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [0]


def test_a_lease_outlives_its_deadline_while_the_process_lives() -> None:
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0)
    silent, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, silent, keys)
    reply = match(cluster, silent, keys)
    silent.silent_until = cluster.clock.now + 60.0
    for turn in range(8):
        store(cluster, other, placed(cluster, 0, 1, 4, f"turn {turn}"))
    assert [copies(cluster, key)[0].packed for key in keys] == [reply.slots[at : at + 16] for at in (0, 16, 32)]
    silent.die()
    cluster.run_for(0.1)
    for turn in range(8):
        store(cluster, other, placed(cluster, 0, 1, 4, f"again {turn}"))
    assert not any(0 in copies(cluster, key) for key in keys)


def test_too_many_sessions_and_wrong_ones_are_refused_by_name() -> None:
    cluster = calm(max_sessions=1)
    for connection, session in enumerate((0, 0, 4711), 1):
        cluster.node(0).deliver(events.Joined(connection, 1, "red", 64, 2, 16, session, 0))
    refused = [i.message.reason for i in said(cluster, 0, instructions.Answer) if isinstance(i.message, engine.Failed)]
    assert "max_sessions" in refused[0]
    assert "session 4711 does not exist" in refused[1]


def test_nothing_is_fetched_from_a_node_that_is_known_to_be_silent() -> None:
    """Leases made before the freeze cost one deadline together, not one each."""
    cluster = calm()
    writer, readers = cluster.join(0), [cluster.join(2), cluster.join(2)]
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    writer.die()
    leases = [match(cluster, reader, keys[:1] if at else keys[1:]).lease for at, reader in enumerate(readers)]
    sources = {
        session.leases[LeaseId(lease)].remotes[0]
        for session, lease in zip(cluster.core(2)._sessions, leases, strict=False)
    }
    for source in sources:
        cluster.node(int(str(source).removeprefix("n"))).freeze()
    cluster.run_for(1.0)
    began = cluster.clock.now
    for reader, lease in zip(readers, leases, strict=True):
        assert list(fetch(cluster, reader, lease, 1).codes) == [Code.LOST]
    assert cluster.clock.now - began < 0.010
    assert cluster.core(2).counters[ABORTED] == 0


def test_leases_at_other_nodes_live_as_long_as_the_engine() -> None:
    cluster = calm(peer_lease_s=1.0)
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    for _ in range(6):
        cluster.run_for(0.5)
        answer(cluster, reader.processes[0], engine.Heartbeat)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) > 0
    assert list(fetch(cluster, reader, lease, 2).codes) == [Code.LOCAL] * 2
    reader.die()
    cluster.run_for(1.5)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) == 0


def test_a_network_that_became_slower_is_given_longer_deadlines_until_fetches_end_in_time() -> None:
    peers = calm(2).core(0)._peers
    node, nbytes = NodeId("n1"), 16 << 20
    slow_s = nbytes / 10e6
    missed = 0
    while (wait_s := deadline_s(peers.predict_s(node, nbytes))) < slow_s:
        peers.missed(node, nbytes, wait_s)
        missed += 1
        assert missed < 10
    assert missed > 1
    before = peers.predict_s(node, nbytes)
    peers.missed(node, 1000, 1.0)
    assert peers.predict_s(node, nbytes) == before
