"""Reading a lease: fetches and their transfers, the limit of background transfers, and processes that share a lease."""

from __future__ import annotations

import pytest

from tests.core.scenes import (
    answer,
    ask,
    calm,
    copies,
    fetch,
    kinds,
    match,
    missed,
    most_at_once,
    offer,
    placed,
    prepare,
    release,
    said,
    store,
    stored,
    tell,
)
from tests.sim.arena import SHARDS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.core.cluster import transfers as fetches
from tokenlake.core.instructions import SendBulk, StartFetch
from tokenlake.identity import SegmentKey
from tokenlake.memory import Kind
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SLOT_BYTES as PACKED_SLOT_BYTES


def test_locate_names_the_node_of_each_segment() -> None:
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


# -- fetches


def test_one_transfer_serves_two_sessions() -> None:
    cluster = calm(regions=8)
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
        release(cluster, reader, lease, 3)
    assert [segment.pins for segment in segments] == [0] * 3
    assert not cluster.core(0).census()["leases to peers"]


def test_an_item_that_a_local_engine_writes_stays_leased() -> None:
    cluster = calm(regions=8)
    writer, reader, beside = cluster.join(0), cluster.join(2), cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    lease = match(cluster, reader, keys).lease
    prepared = prepare(cluster, beside, keys[:1])
    assert list(fetch(cluster, reader, lease, 2).codes) == [Code.PENDING, Code.LOCAL]
    tell(cluster, beside.processes[0], engine.Abort(prepared.write))
    assert list(fetch(cluster, reader, lease, 2).codes) == [Code.LOCAL, Code.LOCAL]
    assert missed(cluster.core(2).counters) == {}
    cluster.check()


def test_fetches_that_share_a_transfer_are_answered_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event takes long, however many fetches wait for one transfer."""
    monkeypatch.setattr(fetches, "SETTLED", 4)
    cluster, reader, keys = stored(3, regions=8)
    process = reader.processes[0]
    leases = [match(cluster, reader, keys).lease for _ in range(6)]
    waits = [ask(process, engine.Fetch, lease, 0, 3, 0.0) for lease in leases]
    for _ in range(200):
        cluster.run_for(0.0005)
        cluster.check()
    assert [list(reply.codes) for [reply] in waits] == [[Code.LOCAL] * 3] * 6
    assert len(said(cluster, 2, StartFetch)) == 1
    assert most_at_once(cluster, 2, engine.Fetched) <= 4
    for lease in leases:
        tell(cluster, process, engine.Release(((lease, 0, 3),)))
    cluster.settle()
    cluster.check_settled()


def test_a_fetch_of_an_unknown_lease_is_lost() -> None:
    cluster = calm()
    reader = cluster.join(0)
    reply = fetch(cluster, reader, 4711, 3)
    assert list(reply.codes) == [Code.LOST] * 3
    assert reply.slots == bytes(3 * PACKED_SLOT_BYTES)
    assert reply.checksums == bytes(3 * 8 * SHARDS)


def test_a_cached_tail_leaves_room_for_its_head() -> None:
    """Cached copies of a prompt's tail are leased with the prompt: its head gets slots nevertheless. Later cached
    copies take their slots, and that of no primary copy."""
    cluster = calm()
    writer, reader, others = cluster.join(0), cluster.join(2), cluster.join(2)
    for key in placed(cluster, 2, 0, 30, "others"):
        store(cluster, others, [key])
    keys = placed(cluster, 0, 1, 4)
    store(cluster, writer, keys)
    tail = match(cluster, reader, keys[2:])
    assert fetch(cluster, reader, tail.lease, 2).codes == bytes([Code.LOCAL] * 2)
    release(cluster, reader, tail.lease, 2)
    pool = cluster.core(2).store.pool(*copies(cluster, keys[3])[2].pool)
    assert pool is not None
    assert not pool.free

    whole = match(cluster, reader, keys)
    assert whole.codes == bytes([Code.REMOTE, Code.REMOTE, Code.LOCAL, Code.LOCAL])
    assert fetch(cluster, reader, whole.lease, 4).codes == bytes([Code.LOCAL] * 4)
    release(cluster, reader, whole.lease, 4)
    primary = pool.counts[Kind.PRIMARY]
    more = placed(cluster, 1, 0, 2, "more")
    store(cluster, writer, more)
    assert fetch(cluster, reader, match(cluster, reader, more).lease, 2).codes == bytes([Code.LOCAL] * 2)
    assert pool.counts[Kind.PRIMARY] == primary
    cluster.check()


# -- background transfers


def offering() -> tuple[Cluster, Engine, list[SegmentKey]]:
    """A reader at node 0, and eight segments of a writer at node 1, which node 1 may offer to node 0."""
    rules = {"regions": 10, "dirty_share": 1.0, "session_reserve_share": 1.0}
    cluster = calm(3, **rules)
    reader, writer = cluster.join(0), cluster.join(1)
    cluster.run_for(0.05)
    keys = placed(cluster, 0, 1, 8)
    store(cluster, writer, keys)
    return cluster, reader, keys


def one_under_way(cluster: Cluster, keys: list[SegmentKey]) -> None:
    """Node 1 offers four of the segments to node 0, in two offers, and is frozen while it sends the first one."""
    sends = len(said(cluster, 1, SendBulk))
    for start in (0, 2):
        offer(cluster, 1, 0, keys[start : start + 2])
    while len(said(cluster, 1, SendBulk)) == sends:
        cluster.run_for(0.0001)
    assert cluster.core(0).census()["transfers"] == 1
    assert cluster.core(0).census()["queued transfers"] == 1


def test_offered_segments_come_one_piece_after_the_other() -> None:
    cluster, _, keys = offering()
    one_under_way(cluster, keys)
    cluster.run_for(1.5)
    assert cluster.core(0).census()["queued transfers"] == 0
    assert [kinds(cluster, key)[0] for key in keys[:4]] == [Kind.PRIMARY] * 4
    cluster.check()


def test_a_fetch_starts_the_queued_transfer_of_its_segments() -> None:
    cluster, reader, keys = offering()
    one_under_way(cluster, keys)
    fetched = ask(reader.processes[0], engine.Fetch, match(cluster, reader, keys[2:4]).lease, 0, 2, 0.5)
    cluster.run_for(0.3)
    assert [list(reply.codes) for reply in fetched] == [[Code.LOCAL] * 2]
    cluster.check()


def test_an_offer_that_waits_too_long_leaves_the_owner() -> None:
    cluster, _, keys = offering()
    one_under_way(cluster, keys)
    cluster.node(1).freeze()
    cluster.run_for(3.0)
    assert cluster.core(0).census()["queued transfers"] == 0
    cluster.node(1).thaw()
    cluster.run_for(1.0)
    assert [kinds(cluster, key)[1] for key in keys[2:4]] == [Kind.PRIMARY] * 2
    cluster.settle()
    cluster.check_settled()
