"""A copy with wrong bytes is reported by its reader, checked again on its node, dropped, and computed again."""

from __future__ import annotations

from tests.core.scenes import (
    answer,
    calm,
    copies,
    fetch,
    kinds,
    match,
    missed,
    offer,
    read,
    release,
    said,
    store,
    stored,
    supplied,
    tell,
)
from tests.sim.cluster import Cluster
from tests.sim.engine import SEGMENT_TOKENS
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.cluster.transfers import CORRUPT
from tokenlake.core.engines.corruption import CHECKING_SHARE, CONFIRMED, MAX_QUEUED
from tokenlake.core.instructions import CheckSlot, StartFetch
from tokenlake.core.report.account import Source
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

SHORTEST_S = 0.0001
"""The least time of a check in the simulated cluster."""


def flip(cluster: Cluster, node: int, key: SegmentKey) -> None:
    """Flip a bit in the copy of one node."""
    cluster.node(node).arena.flip(copies(cluster, key)[node].place, 0)


def test_the_same_fetch_uses_a_right_copy_elsewhere() -> None:
    cluster, reader, keys = stored(pair=(1, 0))
    (key,) = keys
    assert sorted(copies(cluster, key)) in ([0], [0, 1])
    if 1 not in copies(cluster, key):
        read(cluster, cluster.join(1), [key])
    lease = match(cluster, reader, [key])
    where = answer(cluster, reader.processes[0], engine.Locate, lease.lease)
    source = {"n0": 0, "n1": 1}[where.nodes[where.owners[0]]]
    flip(cluster, source, key)
    got = fetch(cluster, reader, lease.lease, 1)
    assert list(got.codes) == [Code.LOCAL]
    reader._look(reader.processes[0], lease.lease, [key], 0, got.codes, got.slots, verify=False)
    cluster.check()
    assert [order.node for order in said(cluster, 2, StartFetch)] == [f"n{source}", f"n{1 - source}"]
    cluster.run_for(0.1)
    assert set(copies(cluster, key)) == {1 - source, 2}
    counters = cluster.core(2).counters
    release(cluster, reader, lease.lease, 1, read=True)
    assert (supplied(counters, Source.FETCHED), missed(counters)) == (SEGMENT_TOKENS, {})


def test_a_report_of_a_local_engine_drops_the_copy() -> None:
    cluster = calm(1)
    careful, other = cluster.join(0, processes=2), cluster.join(0)
    keys = prompt("p", 3)
    store(cluster, careful, keys)
    flip(cluster, 0, keys[1])
    wrong = copies(cluster, keys[1])[0]
    held = match(cluster, careful, keys)
    tell(cluster, careful.processes[0], engine.Corrupt(held.lease, 1))
    cluster.run_for(0.1)
    core = cluster.core(0)
    assert core.counters[CONFIRMED] == 1
    assert match(cluster, other, keys).hits == 1
    # A process with a lease may still read the slot: it is quarantined.
    pool = core.store.pool(*wrong.pool)
    assert pool is not None
    assert wrong.pins == 1
    assert pool.quarantined == 1
    second = careful.processes[1]
    attached = answer(cluster, second, engine.Attach, held.lease)
    assert list(attached.codes) == [Code.LOCAL, Code.LOST, Code.LOCAL]
    assert fetch(cluster, careful, held.lease, 3).codes == attached.codes
    assert len(answer(cluster, second, engine.Locate, held.lease).owners) == 1
    for process in careful.processes:
        tell(cluster, process, engine.Release(((held.lease, 0, 3),)))
    assert wrong.pins == pool.quarantined == 0
    store(cluster, other, keys[1:2], 1)
    assert match(cluster, careful, keys).hits == 3
    cluster.check()


def test_false_reports_drop_nothing_and_cost_little() -> None:
    cluster = calm(2)
    writer = cluster.join(0)
    keys = prompt("p", 4)
    store(cluster, writer, keys)
    node = cluster.node(0)
    here = [key for key in keys if 0 in copies(cluster, key)]
    report = events.PeerSent("n1", peer.Corrupt("red", join_keys(here * MAX_QUEUED)))
    began = cluster.clock.now
    before = kinds(cluster, here[0])
    for _ in range(400):
        node.deliver(report)
        cluster.check()
        cluster.run_for(0.0005)
    assert kinds(cluster, here[0]) == before
    checks = said(cluster, 0, CheckSlot)
    assert cluster.core(0).counters[CONFIRMED] == 0
    busy_s = len(checks) * SHORTEST_S
    assert len(checks) > 2
    assert busy_s <= CHECKING_SHARE * (cluster.clock.now - began)
    assert cluster.core(0).census()["copies to check"] <= len(here) + 1
    cluster.run_for(0.5)
    assert cluster.core(0).census()["copies to check"] == 0


def test_reporters_take_turns_with_bounded_queues() -> None:
    cluster = calm(3, regions=120)
    writer = cluster.join(0)
    keys = [SegmentKey(key) for number in range(60) for key in prompt(f"p{number}", 6)]
    for start in range(0, len(keys), 30):
        store(cluster, writer, keys[start : start + 30])
    here = [key for key in keys if 0 in copies(cluster, key)]
    assert len(here) > MAX_QUEUED
    node = cluster.node(0)
    node.deliver(events.PeerSent("n1", peer.Corrupt("red", join_keys(here))))
    assert cluster.core(0).census()["copies to check"] == MAX_QUEUED
    flip(cluster, 0, here[-1])
    node.deliver(events.PeerSent("n2", peer.Corrupt("red", here[-1])))
    assert cluster.core(0).census()["copies to check"] == MAX_QUEUED + 1
    cluster.run_for(0.05)
    assert cluster.core(0).counters[CONFIRMED] == 1, "a reporter does not wait behind the queue of another"
    cluster.check()


def test_a_handover_of_wrong_bytes_drops_the_owners_copy() -> None:
    cluster, _, (key,) = stored(pair=(1, 2))
    flip(cluster, 0, key)
    offer(cluster, 0, 2, [key])
    cluster.run_for(3.0)
    assert [list(reply.codes) for reply in said(cluster, 2, peer.OfferReply)] == [[Code.BAD_CHECKSUM]]
    assert cluster.core(2).counters[CORRUPT] == 1
    assert cluster.core(0).counters[CONFIRMED] == 1
    assert kinds(cluster, key) == {}
    assert match(cluster, cluster.join(0), [key]).codes == bytes([Code.MISSING])
    cluster.check()
