"""Reading a lease: fetches and their transfers, the limit of background transfers, and processes that share a lease."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.scenes import (
    answer,
    ask,
    calm,
    copies,
    fetch,
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
from tokenlake.core.cluster.background import MAX_CREDIT, MAX_PIECE_BYTES, MAX_PIECES, BackgroundLimit
from tokenlake.core.instructions import SendBulk, StartFetch
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.memory import Kind
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SLOT_BYTES as PACKED_SLOT_BYTES

MIB = 1 << 20


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
    """Cached copies of the prompt's tail fill the budget of cached copies and are leased with the prompt: its head gets
    slots nevertheless."""
    cluster = calm(cached_share=0.1)
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
    assert (len(pool.free), pool.counts[Kind.CACHED]) == (0, pool.cached_slots)

    whole = match(cluster, reader, keys)
    assert whole.codes == bytes([Code.REMOTE, Code.REMOTE, Code.LOCAL, Code.LOCAL])
    assert fetch(cluster, reader, whole.lease, 4).codes == bytes([Code.LOCAL] * 4)
    release(cluster, reader, whole.lease, 4)
    # The lease is released: further cached copies take the slots of cached copies beyond the budget, and of no primary
    # copy.
    directory_nodes = pool.counts[Kind.PRIMARY]
    more = placed(cluster, 1, 0, 2, "more")
    store(cluster, writer, more)
    assert fetch(cluster, reader, match(cluster, reader, more).lease, 2).codes == bytes([Code.LOCAL] * 2)
    assert (pool.counts[Kind.PRIMARY], pool.counts[Kind.CACHED]) == (directory_nodes, 4)
    cluster.check()


# -- background transfers


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 32)), max_size=200), st.floats(0.05, 0.9))
def test_background_is_at_most_its_share_beside_fetches(wanted: list[tuple[bool, int]], share: float) -> None:
    """Throughout the test, at least one fetch is under way."""
    background = BackgroundLimit(share)
    background.started(MIB, background=False)
    read, kept = MIB, 0
    for is_read, mib in wanted:
        if is_read:
            background.started(mib * MIB, background=False)
            background.ended(background=False)
            read += mib * MIB
        elif background.allows(mib * MIB):
            background.started(mib * MIB, background=True)
            background.ended(background=True)
            kept += mib * MIB
        assert kept <= share * (read + kept) + 1


def test_background_alone_is_limited_in_number() -> None:
    background = BackgroundLimit(0.5)
    for _ in range(MAX_PIECES):
        assert background.allows(1 << 40)
        background.started(1 << 40, background=True)
    assert not background.allows(1)
    background.ended(background=True)
    assert background.allows(1)


def test_the_credit_is_bounded() -> None:
    background = BackgroundLimit(0.9)
    background.started(1 << 50, background=False)
    background.started(MAX_CREDIT - 1, background=True)
    background.ended(background=True)
    assert background.allows(1)
    assert not background.allows(2)


def test_a_piece_larger_than_the_maximum_credit_starts() -> None:
    background = BackgroundLimit(0.5)
    background.started(MIB, background=False)
    assert not background.allows(2 * MAX_CREDIT)
    background.started(MAX_CREDIT, background=False)
    assert background.allows(2 * MAX_CREDIT)
    background.started(2 * MAX_CREDIT, background=True)
    background.ended(background=True)
    # The piece exceeded the background share: further pieces wait until fetches have made up for it.
    background.started(MAX_CREDIT, background=False)
    assert not background.allows(MIB)
    background.started(2 * MIB, background=False)
    assert background.allows(MIB)


def test_the_size_of_a_piece() -> None:
    background = BackgroundLimit(0.5)
    assert background.piece_segments(MIB, 0.001) == MAX_PIECE_BYTES // MIB
    assert background.piece_segments(MIB, 0.02) == 2
    assert background.piece_segments(64 * MIB, 10.0) == 1


def offering(share: float = 0.5) -> tuple[Cluster, Engine, list[SegmentKey]]:
    """A reader at node 0, and eight segments of a writer at node 1, which node 1 may offer to node 0."""
    rules = {"regions": 10, "dirty_share": 1.0, "session_reserve_share": 1.0, "cached_share": 0.5}
    cluster = calm(3, background_share=share, **rules)
    reader, writer = cluster.join(0), cluster.join(1)
    cluster.run_for(0.05)
    keys = placed(cluster, 0, 1, 8)
    store(cluster, writer, keys)
    return cluster, reader, keys


def start_a_long_fetch(cluster: Cluster, reader: Engine, count: int, seconds: float) -> list[engine.Fetched]:
    """A fetch of `count` segments of node 2, which is frozen while it sends, so that it lasts for `seconds`. The list
    that its reply will be in."""
    helper = cluster.join(2)
    cluster.run_for(0.05)
    others = placed(cluster, 2, 1, count, "read")
    store(cluster, helper, others)
    cluster.run_for(1.0)
    found = match(cluster, reader, others)
    assert found.codes == bytes([Code.REMOTE] * count)
    sends = len(said(cluster, 2, SendBulk))
    fetched = ask(reader.processes[0], engine.Fetch, found.lease, 0, count, seconds)
    while len(said(cluster, 2, SendBulk)) == sends:
        cluster.run_for(0.0001)
    cluster.node(2).freeze()
    cluster.run_for(0.01)
    assert cluster.core(0).census()["transfers"] == 1
    return fetched


def test_offers_wait_while_a_fetch_is_under_way() -> None:
    """The offered segments are transferred after the fetch."""
    cluster, reader, keys = offering()
    before = len(said(cluster, 0, StartFetch))
    start_a_long_fetch(cluster, reader, 2, 0.8)
    for start in range(0, 8, 2):
        offer(cluster, 1, 0, keys[start : start + 2])
    cluster.run_for(0.5)
    started = said(cluster, 0, StartFetch)[before:]
    fetched = sum(len(each.keys) // KEY_BYTES for each in started if not each.background)
    pushed = sum(len(each.keys) // KEY_BYTES for each in started if each.background)
    assert fetched == 2
    assert pushed <= fetched
    assert cluster.core(0).census()["queued transfers"] > 0
    cluster.node(2).thaw()
    cluster.run_for(1.5)
    assert cluster.core(0).census()["queued transfers"] == 0
    cluster.check()
    cluster.settle()
    cluster.check_settled()


def test_a_fetch_starts_the_queued_transfer_of_its_segments() -> None:
    cluster, reader, keys = offering(share=0.1)
    start_a_long_fetch(cluster, reader, 1, 2.0)
    offer(cluster, 1, 0, keys[:2])
    cluster.run_for(0.2)
    assert cluster.core(0).census()["queued transfers"] > 0
    found = match(cluster, reader, keys[:2])
    fetched = ask(reader.processes[0], engine.Fetch, found.lease, 0, found.hits, 0.5)
    cluster.run_for(0.3)
    assert [list(reply.codes) for reply in fetched] == [[Code.LOCAL] * 2]
    assert cluster.core(0).census()["transfers"] == 1
    cluster.check()


def test_an_offer_that_waits_too_long_leaves_the_owner() -> None:
    cluster, reader, keys = offering(share=0.1)
    read = start_a_long_fetch(cluster, reader, 1, 4.0)
    offer(cluster, 1, 0, keys[:2])
    cluster.run_for(3.0)
    assert not read
    assert cluster.core(0).census()["queued transfers"] == 0
    kept = [segment for segment in cluster.core(1).store.segments() if segment.key in keys[:2]]
    assert [segment.kind for segment in kept] == [Kind.PRIMARY] * 2
    cluster.node(2).thaw()
    cluster.run_for(1.0)
    cluster.settle()
    cluster.check_settled()
