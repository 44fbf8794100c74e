"""Reads: what is here, what is elsewhere, and what cannot be known."""

from __future__ import annotations

import pytest

from tests.core.scenes import answer, ask, calm, copies, fetch, kinds, match, placed, prepare, said, store, tell
from tests.sim.arena import SHARDS, content
from tokenlake.core import events, peers
from tokenlake.core.fetch import FETCHED, MISSING
from tokenlake.core.grants import SHIPPED, SKIPPED
from tokenlake.core.instructions import AbortFetch, StartFetch
from tokenlake.core.match import ASKED, LOCAL
from tokenlake.store import Kind
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SLOT_BYTES, join_keys, unpack_slots


def test_a_local_write_is_read_where_it_was_written() -> None:
    cluster = calm()
    writer = cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    reply = match(cluster, writer, keys)
    assert reply.hits == 2
    assert list(reply.codes) == [Code.LOCAL] * 2
    assert reply.checksums == b"".join(b"".join(content("red", key)) for key in keys)
    places = unpack_slots(reply.slots)
    assert [cluster.node(0).arena.read(place, 0) for place in places] == [content("red", key)[0] for key in keys]
    assert not said(cluster, 0, peer.Lookup)


def test_a_match_ends_at_the_first_gap_and_keeps_nothing_beyond() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, [keys[0]])
    store(cluster, writer, [keys[2]])
    for engine_ in (writer, reader):
        reply = match(cluster, engine_, keys)
        assert reply.hits == 1
        assert list(reply.codes[1:2]) == [Code.MISSING]
        assert len(reply.slots) == SLOT_BYTES
        tell(cluster, engine_.processes[0], engine.Release(((reply.lease, 0, 1),)))
    assert all(cluster.core(node).idle() for node in range(3))


def test_another_tenant_finds_nothing() -> None:
    cluster = calm()
    writer, stranger = cluster.join(0), cluster.join(0, tenant="blue")
    keys = placed(cluster, 0, 1)
    store(cluster, writer, keys)
    assert match(cluster, stranger, keys).codes == bytes([Code.MISSING])


def test_where_the_segments_of_a_lease_lie() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = [*placed(cluster, 0, 1, 2), *placed(cluster, 1, 0, 1)]
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    reply = answer(cluster, reader.processes[0], engine.Locate, lease)
    assert len(reply.owners) == 3
    for key, owner in zip(keys, reply.owners, strict=True):
        assert int(reply.nodes[owner].removeprefix("n")) in copies(cluster, key)
    fetch(cluster, reader, lease, 1)
    later = answer(cluster, reader.processes[0], engine.Locate, lease)
    assert later.owners[0] == engine.HERE
    assert [later.nodes[owner] for owner in later.owners[1:]] == [reply.nodes[owner] for owner in reply.owners[1:]]
    assert not answer(cluster, reader.processes[0], engine.Locate, 999).owners


def test_what_was_attended_elsewhere_is_not_counted_as_skipped() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    tell(cluster, reader.processes[0], engine.AttendedInPlace(lease, 2))
    tell(cluster, reader.processes[0], engine.Release(((lease, 0, 1), (lease, 1, 3))))
    counters = cluster.core(2).counters
    size = counters[ASKED] // 3
    assert size > 0
    assert (counters[SHIPPED], counters[SKIPPED]) == (2 * size, size)


def test_one_flight_serves_waiters_of_two_sessions() -> None:
    cluster = calm()
    writer, first, second = cluster.join(0), cluster.join(2), cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, keys)
    leases = [match(cluster, reader, keys).lease for reader in (first, second, first)]
    waits = [
        ask(reader.processes[0], engine.Fetch, lease, 0, 3, 0.0)
        for reader, lease in zip((first, second, first), leases, strict=True)
    ]
    cluster.run_for(0.1)
    assert [list(reply.codes) for [reply] in waits] == [[Code.LOCAL] * 3] * 3
    assert len({reply.slots for [reply] in waits}) == 1
    assert len(said(cluster, 2, StartFetch)) == 1
    segments = [copies(cluster, key)[2] for key in keys]
    assert [segment.pins for segment in segments] == [3] * 3
    for reader, lease in zip((first, second, first), leases, strict=True):
        tell(cluster, reader.processes[0], engine.Release(((lease, 0, 3),)))
    assert [segment.pins for segment in segments] == [0] * 3
    assert not cluster.core(0).census()["leases to peers"]


def test_the_directory_node_names_the_node_that_has_it() -> None:
    """A run of two kept together on a candidate of its first segment is no candidate of the second."""
    cluster = calm(4, run_length=4)
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 1, 2) + placed(cluster, 3, 2)
    store(cluster, writer, keys)
    assert kinds(cluster, keys[1])[1] is Kind.PRIMARY
    reply = match(cluster, reader, keys)
    assert list(reply.codes) == [Code.REMOTE] * 2
    assert list(fetch(cluster, reader, reply.lease, 2).codes) == [Code.LOCAL] * 2
    assert [lookup for lookup in said(cluster, 2, peer.Lookup) if lookup.keys == keys[1]]


def test_a_directory_node_asks_the_node_it_names_also_while_the_other_candidate_is_silent() -> None:
    """Its own directory waits for the first answer, but not for all of the deadline."""
    cluster = calm(4, run_length=4)
    writer, reader = cluster.join(2), cluster.join(0)
    keys = placed(cluster, 1, 2) + placed(cluster, 0, 3)
    store(cluster, writer, keys)
    assert kinds(cluster, keys[1])[1] is Kind.PRIMARY
    cluster.node(3).freeze()
    assert list(match(cluster, reader, keys[1:]).codes) == [Code.REMOTE]


def test_a_directory_node_is_told_that_the_node_it_names_has_nothing() -> None:
    """Also when it names the node that asks: nobody else would find out."""
    for asking in (1, 2):
        cluster = calm(4)
        key = placed(cluster, 0, 3)[0]
        directory_node = cluster.core(0)
        directory_node._directory_node.held(cluster.core(0)._peers.get(f"n{asking}").node, "red", [key])  # type: ignore[union-attr, arg-type]
        reader = cluster.join(1)
        assert match(cluster, reader, [key]).codes == bytes([Code.MISSING])
        cluster.run_for(0.01)
        assert not directory_node.census()["directory"]


def test_missing_is_for_the_directory_node_to_say() -> None:
    """The other candidate has nothing, the directory node does not answer: nobody knows."""
    cluster = calm()
    reader = cluster.join(2)
    key = placed(cluster, 0, 1)[0]
    assert match(cluster, reader, [key]).codes == bytes([Code.MISSING])
    cluster.node(0).freeze()
    assert match(cluster, reader, [key]).codes == bytes([Code.UNKNOWN])


def test_what_is_being_written_is_pending() -> None:
    cluster = calm()
    writer, reader = cluster.join(0, processes=1), cluster.join(2)
    keys = placed(cluster, 1, 0)
    prepare(cluster, writer, keys)
    cluster.run_for(0.01)
    assert match(cluster, reader, keys).codes == bytes([Code.PENDING])
    writer.die()
    cluster.run_for(0.02)
    assert match(cluster, reader, keys).codes == bytes([Code.MISSING])


def test_a_session_leases_at_most_its_share() -> None:
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0, session_lease_share=0.25)
    writer, reader = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 6)
    store(cluster, writer, keys)
    reply = match(cluster, reader, keys)
    assert reply.hits == 3
    assert reply.codes[3] == Code.SESSION_LIMIT
    assert match(cluster, reader, keys).codes[0] == Code.SESSION_LIMIT
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 1, 3),)))
    assert match(cluster, reader, keys).hits == 2
    assert match(cluster, writer, keys).hits == 3


def test_a_process_alone_reads_more_than_its_share_in_windows() -> None:
    """What lies elsewhere counted too: of a prompt longer than half of a node the rest was computed again."""
    cluster = calm(5, dirty_share=1.0, session_reserve_share=1.0, session_lease_share=0.25)
    reader, keys = cluster.join(4), [*placed(cluster, 0, 1, 5), *placed(cluster, 2, 3, 4)]
    store(cluster, cluster.join(0), keys[:5])
    store(cluster, cluster.join(2), keys[5:], 5)
    reply = match(cluster, reader, keys)
    assert reply.codes == bytes([Code.REMOTE] * 9)
    process, slots = reader.processes[0], 7
    # Half of the slots beyond its share as well, and no more at a time.
    assert fetch(cluster, reader, reply.lease, 9).codes == bytes([Code.LOCAL] * slots + [Code.SESSION_LIMIT] * 2)
    assert cluster.core(4).census()["slots for what comes"] == 0
    assert answer(cluster, process, engine.Fetch, reply.lease, 7, 9, 0.0).codes == bytes([Code.SESSION_LIMIT] * 2)
    tell(cluster, process, engine.Release(((reply.lease, 0, 7),)))
    assert answer(cluster, process, engine.Fetch, reply.lease, 7, 9, 0.0).codes == bytes([Code.LOCAL] * 2)
    tell(cluster, process, engine.Release(((reply.lease, 7, 9),)))
    cluster.check()
    assert cluster.core(4).idle()


def test_what_a_session_leases_here_leaves_room_for_what_it_fetches() -> None:
    """As much as it may lease lay here: the first window that had something of another node was refused."""
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0, session_lease_share=0.25)
    here, there = cluster.join(0), cluster.join(1)
    keys = [*placed(cluster, 0, 1, 3), *placed(cluster, 1, 2, 2)]
    store(cluster, here, keys[:3])
    store(cluster, there, keys[3:], 3)
    reply = match(cluster, here, keys)
    assert reply.codes == bytes([Code.LOCAL] * 3 + [Code.REMOTE] * 2)
    assert fetch(cluster, here, reply.lease, 5).codes == bytes([Code.LOCAL] * 5)
    cluster.check()


def test_processes_that_fetch_the_same_share_its_slots() -> None:
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0, session_lease_share=0.25)
    writer, reader = cluster.join(0), cluster.join(2, processes=2)
    keys = placed(cluster, 0, 1, 6)
    cluster.run_for(0.01)
    store(cluster, writer, keys)
    reply = match(cluster, reader, keys)
    # The one that matched holds all of it until the other has read.
    assert reply.codes[:4] == bytes([Code.REMOTE] * 3 + [Code.SESSION_LIMIT])
    first, second = reader.processes
    answer(cluster, second, engine.Attach, reply.lease)
    fetched = [ask(process, engine.Fetch, reply.lease, 0, 3, 0.0) for process in (first, second) for _ in range(2)]
    cluster.run_for(0.05)
    assert [answers[0].codes for answers in fetched] == [bytes([Code.LOCAL] * 3)] * 4
    assert cluster.core(2).census()["slots for what comes"] == 0
    cluster.check()


def test_what_peers_lease_of_one_tenant_takes_no_room_from_another() -> None:
    """It did: a tenant's matches were answered UNKNOWN because of what others had leased."""
    cluster = calm(dirty_share=1.0, session_reserve_share=1.0)
    keys = placed(cluster, 0, 1, 3)
    for tenant in ("red", "blue"):
        store(cluster, cluster.join(0, tenant=tenant), keys)
    lent = []
    for call, tenant in enumerate(("red", "red", "blue")):
        cluster.node(0).deliver(events.PeerSent("n2", peer.Lookup(call, tenant, join_keys(keys))))
        lent.append(said(cluster, 0, peer.LookupReply)[-1].codes.count(Code.LOCAL))
    assert lent == [3, 1, 3]
    cluster.check()


def test_two_processes_hold_and_give_back_ranges_of_one_lease() -> None:
    cluster = calm()
    reader = cluster.join(0, processes=2)
    keys = placed(cluster, 0, 1, 4)
    cluster.run_for(0.01)
    store(cluster, reader, keys)
    lease = match(cluster, reader, keys).lease
    first, second = reader.processes
    attached = answer(cluster, second, engine.Attach, lease)
    assert list(attached.codes) == [Code.LOCAL] * 4
    assert attached.checksums == b"".join(b"".join(content("red", key)) for key in keys)

    def pins() -> list[int]:
        return [copies(cluster, key)[0].pins for key in keys]

    tell(cluster, first, engine.Release(((lease, 0, 2),)))
    assert pins() == [1, 1, 1, 1]
    tell(cluster, second, engine.Release(((lease, 1, 3), (lease, 1, 3))))
    assert pins() == [1, 0, 1, 1]
    first.die()
    cluster.run_for(0.01)
    assert pins() == [1, 0, 0, 1]
    tell(cluster, second, engine.Release(((lease, 0, 4),)))
    assert pins() == [0, 0, 0, 0]
    assert not cluster.core(0).census()["leases"]


def test_every_token_asked_for_is_counted_once() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 4)
    store(cluster, writer, keys[:3])
    reply = match(cluster, reader, keys)
    fetch(cluster, reader, reply.lease, 2)
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, 3),)))
    counters = cluster.core(2).counters
    tokens = [counters[metric] // 16 for metric in (ASKED, LOCAL, FETCHED, SKIPPED, MISSING)]
    assert tokens == [4, 0, 2, 1, 1]


def test_a_fetch_without_any_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of nothing in no time failed, and nobody ended the transfer."""
    monkeypatch.setattr(peers, "MEASURED_BYTES", 1)
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    reply = answer(cluster, reader.processes[0], engine.Fetch, lease, 0, 3, 1e-300)
    assert reply.codes == bytes([Code.LOST] * 3)
    assert len(said(cluster, 2, AbortFetch)) == 1


def test_a_tail_that_is_here_keeps_nobody_from_reading_its_head() -> None:
    """It filled the budget of cached copies and was leased with the prompt, at every attempt anew."""
    cluster = calm(cached_share=0.1)
    writer, reader = cluster.join(0), cluster.join(2)
    for key in placed(cluster, 2, 0, 30, "others"):
        store(cluster, writer, [key])
    keys = placed(cluster, 0, 1, 4)
    store(cluster, writer, keys)
    tail = match(cluster, reader, keys[2:])
    assert fetch(cluster, reader, tail.lease, 2).codes == bytes([Code.LOCAL] * 2)
    tell(cluster, reader.processes[0], engine.Release(((tail.lease, 0, 2),)))
    pool = copies(cluster, keys[3])[2].pool
    assert (len(pool.free), pool.counts[Kind.CACHED]) == (0, pool.budget(pool.budgets.cached, pool.slots))

    whole = match(cluster, reader, keys)
    assert whole.codes == bytes([Code.REMOTE, Code.REMOTE, Code.LOCAL, Code.LOCAL])
    assert fetch(cluster, reader, whole.lease, 4).codes == bytes([Code.LOCAL] * 4)
    tell(cluster, reader.processes[0], engine.Release(((whole.lease, 0, 4),)))
    # Nobody looks at them any more, so those beyond the budget take each other's slots again, and no primary copy's.
    directory_nodes = pool.counts[Kind.PRIMARY]
    more = placed(cluster, 1, 0, 2, "more")
    store(cluster, writer, more)
    assert fetch(cluster, reader, match(cluster, reader, more).lease, 2).codes == bytes([Code.LOCAL] * 2)
    assert (pool.counts[Kind.PRIMARY], pool.counts[Kind.CACHED]) == (directory_nodes, 4)
    cluster.check()


def test_a_fetch_of_a_lease_that_is_gone_is_lost() -> None:
    cluster = calm()
    reader = cluster.join(0)
    reply = fetch(cluster, reader, 4711, 3)
    assert list(reply.codes) == [Code.LOST] * 3
    assert reply.slots == bytes(3 * SLOT_BYTES)
    assert reply.checksums == bytes(3 * 8 * SHARDS)
