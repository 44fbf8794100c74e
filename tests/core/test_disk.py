"""The disk tier: segments that memory evicts are read back at their node and at others, with the right bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.scenes import (
    answer,
    ask,
    calm,
    copies,
    explained,
    fetch,
    match,
    match_independent,
    missed,
    placed,
    prepare,
    said,
    store,
    supplied,
)
from tests.sim.arena import SHARDS, content
from tests.sim.cluster import Cluster
from tests.sim.disk import Disk
from tests.sim.engine import Engine, Reading
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.cluster.serve import PEER_LEASE_SHARE
from tokenlake.core.disk import KEPT, NOT_ERASED, WRITTEN
from tokenlake.core.disk_reads import DAMAGED, READ
from tokenlake.core.instructions import DiskForget, DiskRead, DiskWrite, EvictionDone, Located
from tokenlake.core.report.account import Source
from tokenlake.disk.reads import READS
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory.removals import DISK_DAMAGED_RULE, DISK_RULE, OPERATOR_RULE
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.funnel import Funnel
from tokenlake.wire.slots import join_keys, split_keys, unpack_slots

RED = TenantId("red")


def disk_of(cluster: Cluster, node: int = 0) -> Disk:
    """The disk of a node."""
    found = cluster.node(node).disk
    assert found is not None
    return found


def count(cluster: Cluster, node: int, metric: Metric) -> int:
    """The value of a counter of a node."""
    return cluster.core(node).counters[metric]


def fill(cluster: Cluster, writer: Engine, prompts: int = 4, length: int = 4) -> list[list[SegmentKey]]:
    """Store more prompts than memory holds, one after the other; the first ones are then on disk only."""
    stored = [prompt(f"fill-{number}", length) for number in range(prompts)]
    for keys in stored:
        store(cluster, writer, keys)
        cluster.run_for(1.0)
    return stored


def on_disk(cluster: Cluster, node: int, keys: Sequence[SegmentKey]) -> list[SegmentKey]:
    """Those of the segments that are on the disk of a node and not in its memory."""
    tier, memory = cluster.core(node)._context.disk, cluster.core(node).store.index(RED)
    return [key for key in keys if tier.find(RED, key) >= 0 and key not in memory]


def alone(places: int = 40, prompts: int = 4) -> tuple[Cluster, Engine, list[list[SegmentKey]]]:
    """A node, its engine, and the prompts that are on its disk only."""
    cluster = calm(1, disk_places=places)
    writer = cluster.join(0)
    gone = [keys for keys in fill(cluster, writer, prompts) if on_disk(cluster, 0, keys) == keys]
    assert gone
    return cluster, writer, gone


def full(places: int = 40) -> tuple[Cluster, Engine, Engine, list[list[SegmentKey]]]:
    """Two nodes with full memory, their engines, and the prompts that are on the disk of the first one only. Node 1 is
    their directory node."""
    cluster = calm(2, disk_places=places)
    writer, reader = cluster.join(0), cluster.join(1)
    # Otherwise the first node would hand its segments over to the second.
    store(cluster, reader, prompt("other", 12))
    far = [placed(cluster, 1, 0, 4, f"far-{number}") for number in range(6)]
    for keys in far:
        store(cluster, writer, keys)
        cluster.run_for(1.0)
    return cluster, writer, reader, [keys for keys in far if on_disk(cluster, 0, keys) == keys]


def slow_down(cluster: Cluster) -> None:
    """The disk of node 0 is opened again, and is slow now."""
    disk_of(cluster).rate = 1e6
    cluster.node(0).deliver(events.DiskGone(0, "replaced"))
    cluster.run_for(1.0)
    cluster.node(0).find_disk()
    cluster.run_for(1.0)


def read(cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey], node: int) -> bytes:
    """Match and fetch segments, and compare every byte. Returns the codes of the fetch."""
    matched = match(cluster, reader, keys)
    if not matched.hits:
        return b""
    fetched = fetch(cluster, reader, matched.lease, matched.hits)
    arena = cluster.node(node).arena
    for key, code, slot in zip(keys, fetched.codes, unpack_slots(fetched.slots), strict=False):
        if code == Code.LOCAL:
            assert tuple(arena.read(slot, shard) for shard in range(SHARDS)) == content("red", key)
    answer(cluster, reader.processes[0], engine.Heartbeat)
    reader.processes[0].tell(engine.Release(((matched.lease, 0, matched.hits),), True))
    cluster.run_for(0.1)
    cluster.check()
    return bytes(fetched.codes)


def test_a_segment_that_memory_evicted_is_read_back_from_disk() -> None:
    cluster, writer, gone = alone()
    assert count(cluster, 0, KEPT) > 0
    matched = match(cluster, writer, gone[0])
    assert matched.codes == bytes([Code.REMOTE]) * 4
    located = answer(cluster, writer.processes[0], engine.Locate, matched.lease)
    assert set(located.nodes) == {"n0"}
    assert read(cluster, writer, gone[0], 0) == bytes([Code.LOCAL]) * 4
    assert count(cluster, 0, READ) == 4
    assert supplied(cluster.core(0).counters, Source.DISK) > 0
    written = count(cluster, 0, WRITTEN)
    fill(cluster, writer, 5)
    again = [order for order in said(cluster, 0, DiskWrite) if gone[0][0] in split_keys(order.keys)]
    assert len(again) == 1, "a segment that was read back is on disk already"
    assert count(cluster, 0, WRITTEN) >= written
    cluster.check()


def test_memory_evicts_first_what_is_on_disk_too() -> None:
    """Memory evicts a segment that is on disk too before one that is not."""
    cluster = calm(1, disk_places=4)
    writer = cluster.join(0)
    stored = fill(cluster, writer, 3)
    memory = cluster.core(0).store.index(RED)
    twice = {key for key, segment in memory.items() if segment.disk >= 0}
    assert twice
    for keys in stored:
        if twice & set(keys):
            read(cluster, writer, keys, 0)
            cluster.run_for(2.0)
    alone = set(memory) - twice
    store(cluster, writer, prompt("next", len(twice)))
    assert alone
    assert alone <= set(memory), "the segments in memory alone stay, although the others were read after them"
    assert not twice & set(memory)
    cluster.check()


def test_another_node_reads_a_segment_on_disk() -> None:
    cluster, _, reader, (far, *others) = full()
    assert read(cluster, reader, far, 1) == bytes([Code.LOCAL]) * 4
    assert count(cluster, 0, READ) == 4
    replies = [reply for reply in said(cluster, 0, peer.LookupReply) if reply.disk_s]
    assert replies
    assert not replies[-1].lease
    cluster.node(1).deliver(events.LocateRequested(1, "red", join_keys(others[0])))
    cluster.run_for(0.1)
    assert said(cluster, 1, Located)[-1].nodes == ("n0",)


def test_reads_for_another_node_take_a_share_of_the_slots() -> None:
    """They do not count as use of the engines of this node, whose memory would otherwise follow them."""
    cluster, _, _, far = full()
    core, now = cluster.core(0), cluster.clock.now
    (pool,) = core.store.pools()
    used, turnover_s, room = pool.used, pool.turnover_s(now), int(PEER_LEASE_SHARE * core.store.capacity(pool.id))
    core.store.take_pressed()
    asked = [key for keys in far for key in keys]
    assert len(asked) > room
    orders: list[DiskRead] = []
    for stream, keys in enumerate(far):
        out = core.handle(events.PullRequested(stream + 1, "n1", "red", join_keys(keys)), now)
        orders += [order for order in out if isinstance(order, DiskRead)]
    assert sum(len(split_keys(order.keys)) for order in orders) == room
    for order in orders:
        codes = bytes([Code.LOCAL]) * len(split_keys(order.keys))
        core.handle(events.FetchDone(order.fetch, codes, bytes(8 * SHARDS * len(codes)), True), now)
    core.check_integrity()
    assert (pool.used, pool.turnover_s(now)) == (used, turnover_s)
    assert not core.store.take_pressed()


def test_a_segment_on_disk_stays_known_after_a_read() -> None:
    """A segment on disk stays known when its reader reports the read."""
    cluster, _, reader, far = full()
    for _ in range(3):
        for keys in far:
            assert read(cluster, reader, keys, 1) == bytes([Code.LOCAL]) * 4
            cluster.run_for(1.0)


@pytest.mark.parametrize("asker", [0, 1])
def test_late_hints_reach_a_segment_on_disk(asker: int) -> None:
    """Hints of an engine of the owner, whose directory node is another node, and of an engine of that node."""
    cluster, *engines, (keys, *_) = full()
    engines[asker].processes[0].tell(engine.Hint(join_keys(keys), Hints(Outlook.OVER, stop_reason="stop")))
    cluster.run_for(1.0)
    cluster.check()
    assert on_disk(cluster, 0, keys) == keys
    assert read(cluster, engines[0], keys, 0) == bytes([Code.LOCAL]) * 4
    hints = [copies(cluster, key)[0].hints for key in keys]
    assert {(each.outlook, each.stop_reason) for each in hints} == {(Outlook.OVER, "stop")}


def test_a_segment_that_leaves_the_disk_is_reported_as_evicted() -> None:
    cluster, writer, _, _ = full(4)
    told = {key for each in said(cluster, 0, peer.Evicted) if each.rule == DISK_RULE for key in split_keys(each.keys)}
    assert told
    assert match_independent(cluster, writer, list(told)).hits == 0


def test_a_damaged_place_is_a_miss_and_void() -> None:
    cluster, writer, (gone, *_) = alone()
    disk = disk_of(cluster)
    for name, written in list(disk.places.items()):
        if written.key == gone[1]:
            disk.places[name] = written._replace(shards=(b"torn now", *written.shards[1:]))
    codes = read(cluster, writer, gone, 0)
    assert codes == bytes([Code.LOCAL, Code.LOST, Code.LOCAL, Code.LOCAL]) or codes[1] == Code.BAD_CHECKSUM
    assert count(cluster, 0, DAMAGED) == 1
    assert on_disk(cluster, 0, [gone[1]]) == []
    assert any(gone[1] in split_keys(order.keys) for order in said(cluster, 0, DiskForget))
    assert sum(missed(cluster.core(0).counters).values()) > 0


def test_a_device_that_fails_is_set_aside_and_used_again() -> None:
    cluster, writer, (gone, *_) = alone()
    disk_of(cluster).fails = True
    cluster.node(0).deliver(events.DiskGone(0, "input/output error"))
    cluster.run_for(1.0)
    assert match(cluster, writer, gone).hits == 0
    assert len(cluster.core(0)._context.disk) == 0
    store(cluster, writer, gone)
    disk_of(cluster).fails = False
    cluster.node(0).find_disk()
    cluster.run_for(1.0)
    cluster.check()
    fill(cluster, writer, 5)
    assert read(cluster, writer, gone, 0)[:1] == bytes([Code.LOCAL])


def test_an_operator_evicts_from_memory_and_from_disk() -> None:
    cluster, writer, (gone, *stored) = alone()
    cluster.node(0).deliver(events.EvictRequested(7, "red", join_keys(gone)))
    assert not said(cluster, 0, EvictionDone)
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].evicted == 4
    assert said(cluster, 0, EvictionDone)[-1].reached == (0,)
    assert match(cluster, writer, gone).hits == 0
    cluster.node(0).deliver(events.EvictRequested(8, "red", b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].request == 8
    assert len(cluster.core(0)._context.disk) == 0
    assert all(match(cluster, writer, keys).hits == 0 for keys in stored)
    assert not disk_of(cluster).places


@pytest.mark.parametrize("order", ["named", "all", "all, before the read"])
def test_an_eviction_ends_a_read_from_disk(order: str) -> None:
    """A segment that is being read back when it is evicted never arrives, and leaves the disk."""
    cluster, writer, (gone, *_) = alone()
    disk_of(cluster).slow_s = 0.1
    matched = match(cluster, writer, gone)
    replies = ask(writer.processes[0], engine.Fetch, matched.lease, 0, matched.hits, 5.0)
    if order != "all, before the read":
        cluster.run_for(0.01)
    assert bool(said(cluster, 0, DiskRead)) == (order != "all, before the read")
    cluster.node(0).deliver(events.EvictRequested(7, "red", join_keys(gone) if order == "named" else b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, DiskRead), "the read began before the walk through the disk"
    (done,) = said(cluster, 0, EvictionDone)
    assert (done.kept, done.reached) == (0, (0,))
    assert replies[0].codes == bytes([Code.LOST]) * 4
    assert match(cluster, writer, gone).hits == 0
    assert not {written.key for written in disk_of(cluster).places.values()} & set(gone)
    assert count(cluster, 0, DAMAGED) == 0
    cluster.check()


def test_an_eviction_leaves_no_disk_copy_of_what_is_written() -> None:
    """An engine writes a segment again that is on disk: it is kept, and its copy on disk is not."""
    cluster, writer, (gone, *_) = alone()
    assert prepare(cluster, writer, gone[:1]).codes == bytes([Code.RESERVED])
    cluster.node(0).deliver(events.EvictRequested(7, "red", gone[0]))
    cluster.run_for(1.0)
    (done,) = said(cluster, 0, EvictionDone)
    assert (done.evicted, done.kept, done.reached) == (1, 1, (0,))
    assert gone[0] not in {written.key for written in disk_of(cluster).places.values()}


def test_an_eviction_names_the_disks_that_it_did_not_reach() -> None:
    cluster, _, _ = alone()
    disk_of(cluster).fails = True
    cluster.node(0).deliver(events.EvictRequested(7, "red", b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].reached == ()
    assert count(cluster, 0, NOT_ERASED) > 0
    disk_of(cluster).fails = False
    # The rules do not know any more what is there.
    cluster.node(0).deliver(events.EvictRequested(8, "red", b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].reached == ()
    cluster.node(0).deliver(events.DiskGone(0, "set aside"))
    cluster.node(0).deliver(events.EvictRequested(9, "red", b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].reached == ()
    cluster.node(0).find_disk()
    cluster.node(0).deliver(events.EvictRequested(10, "red", b""))
    cluster.run_for(1.0)
    assert said(cluster, 0, EvictionDone)[-1].reached == (0,)
    assert not disk_of(cluster).places
    cluster.check()


def test_a_segment_evicted_while_it_is_written_is_erased_first() -> None:
    cluster = calm(1, disk_places=40)
    writer = cluster.join(0)
    disk_of(cluster).slow_s = 3.0
    for number in range(4):
        store(cluster, writer, prompt(f"fill-{number}", 4))
    assert cluster.core(0)._disk.census()["disk writes"]
    cluster.node(0).deliver(events.EvictRequested(7, "red", b""))
    cluster.run_for(0.5)
    assert not said(cluster, 0, EvictionDone)
    cluster.run_for(8.0)
    assert said(cluster, 0, EvictionDone)[-1].reached == (0,)
    assert not disk_of(cluster).places


def test_two_readers_of_one_segment_on_disk_share_a_read() -> None:
    cluster, _, (gone, *_) = alone()
    readers = [cluster.join(0), cluster.join(0)]
    for reader in readers:
        reader.read(gone, Reading())
    cluster.run_for(1.0)
    assert count(cluster, 0, READ) == 4
    assert sum(len(order.keys) // 32 for order in said(cluster, 0, DiskRead)) == 4
    cluster.check()


def test_reads_that_wait_for_their_device() -> None:
    """Reads that wait for their device keep the node consistent."""
    cluster, writer, stored = alone(60, 8)
    gone = [key for keys in stored for key in keys][: READS + 2]
    disk_of(cluster).slow_s = 0.01
    leases = [match(cluster, writer, [key]).lease for key in gone]
    replies = [ask(writer.processes[0], engine.Fetch, lease, 0, 1, 5.0) for lease in leases]
    cluster.run_for(0.005)
    assert len(said(cluster, 0, DiskRead)) == READS
    cluster.check()
    cluster.run_for(1.0)
    assert [reply.codes for [reply] in replies] == [bytes([Code.LOCAL])] * (READS + 2)


def test_nothing_is_written_while_memory_has_room_for_more() -> None:
    cluster = calm(1, regions=60, disk_places=40)
    store(cluster, cluster.join(0), prompt("few", 4))
    cluster.run_for(2.0)
    assert not said(cluster, 0, DiskWrite)


def reasons(funnel: Funnel) -> dict[str, str]:
    """The detail of each reason for a miss."""
    return {each.reason: each.detail for each in funnel.missed}


def test_explain_names_the_disk_of_this_node_and_of_another() -> None:
    cluster, writer, reader, (first, second, *_) = full()
    for asker, keys, place in ((writer, first, "the disk of n0"), (reader, second, "n0, in part from its disk,")):
        found = match(cluster, asker, keys, "r")
        fetch(cluster, asker, found.lease, found.hits)
        asker.processes[0].tell(engine.Release(((found.lease, 0, found.hits),), True))
        cluster.run_for(0.1)
        funnel = explained(cluster, asker, "r")
        assert [name for name, _ in funnel.elsewhere] == [place]
        assert (funnel.fetched, funnel.supplied, funnel.missed) == (funnel.ideal, funnel.ideal, ())


def test_explain_says_why_a_segment_was_not_read_from_disk() -> None:
    cluster, writer, stored = alone(prompts=6)
    disk_of(cluster).slow_s = 1.0
    late, aside = match(cluster, writer, stored[0], "late"), match(cluster, writer, stored[1], "aside")
    fetch(cluster, writer, late.lease, late.hits)
    ask(writer.processes[0], engine.Fetch, aside.lease, 0, aside.hits, 5.0)
    cluster.run_for(0.1)
    disk_of(cluster).fails = True
    cluster.node(0).deliver(events.DiskGone(0, "slow"))
    cluster.run_for(2.0)
    match(cluster, writer, stored[0], "after")
    assert reasons(explained(cluster, writer, "late")) == {"too_slow": "the disk of n0 did not send it in time"}
    lost = "the disk of n0 did not have it any more: its disk was set aside"
    assert reasons(explained(cluster, writer, "aside")) == {"lost": lost}
    assert reasons(explained(cluster, writer, "after"))["evicted"].startswith("its disk was set aside, at n0")
    assert count(cluster, 0, DAMAGED) == 0
    cluster.check()


def test_segments_on_disk_alone_count_as_left_by_a_drain() -> None:
    cluster, *_, far = full()
    node, core = cluster.node(0), cluster.core(0)
    alone = [key for keys in far for key in on_disk(cluster, 0, keys)]
    owned = {segment.key for segment in core.store.segments() if segment.owned}.union(alone)
    cluster.drain("n0")
    cluster.run_for(core.config.drain_s + 2.0)
    assert node.account is not None
    moved = sum(segments for _, segments, _ in node.account.moved)
    assert node.account.lost_segments == len(owned) - moved >= len(alone) > 0
    assert node.account.lost_bytes == node.account.lost_segments * next(iter(core.store.pools())).slot_bytes


def test_explain_says_that_a_segment_on_disk_was_unreadable() -> None:
    cluster, writer, (gone, *_) = alone()
    matched = match(cluster, writer, gone, "r")
    disk_of(cluster).fails = True
    fetch(cluster, writer, matched.lease, matched.hits)
    lost = f"the disk of n0 did not have it any more: {DISK_DAMAGED_RULE}"
    assert reasons(explained(cluster, writer, "r")) == {"lost": lost}


def test_explain_tells_damage_and_orders_from_evictions() -> None:
    cluster, writer, stored = alone(prompts=6)
    cluster.node(0).deliver(events.EvictRequested(1, RED, join_keys(stored[0])))
    disk_of(cluster).places.clear()
    read(cluster, writer, stored[1], 0)
    for keys, rule in ((stored[0], OPERATOR_RULE), (stored[1], DISK_DAMAGED_RULE)):
        match(cluster, writer, keys, "r")
        assert reasons(explained(cluster, writer, "r"))["evicted"].startswith(rule)


def test_the_owners_of_a_lease_come_with_the_time_on_their_disks() -> None:
    cluster, writer, reader, (keys, *_) = full()

    def located(asker: Engine) -> engine.Located:
        matched = match(cluster, asker, keys)
        found = answer(cluster, asker.processes[0], engine.Locate, matched.lease)
        asker.processes[0].tell(engine.Release(((matched.lease, 0, matched.hits),)))
        assert isinstance(found, engine.Located)
        assert (found.nodes, set(found.owners), len(found.owners)) == (("n0",), {0}, 4)
        return found

    fast = located(writer).disk_s
    assert 0 < fast[0] < 1e-3
    assert located(reader).disk_s == fast
    slow_down(cluster)
    assert located(writer).disk_s[0] > 500 * fast[0]
    assert located(reader).disk_s[0] > 500 * fast[0]
    assert read(cluster, writer, keys, 0) == bytes([Code.LOCAL]) * 4
    assert answer(cluster, writer.processes[0], engine.Locate, match(cluster, writer, keys).lease).disk_s == ()


def test_a_segment_found_on_disk_while_it_is_written() -> None:
    """A segment that is found on a disk while it is written is known although the write ends."""
    cluster, writer, reader, (keys, *_) = full()
    cluster.node(0).deliver(events.DiskGone(0, "gone"))
    cluster.run_for(1.0)
    assert match(cluster, reader, keys).hits == 0
    assert prepare(cluster, writer, keys[:1]).codes == bytes([Code.RESERVED])
    cluster.node(0).find_disk()
    cluster.run_for(1.0)
    writer.die()
    cluster.run_for(2.0)
    assert on_disk(cluster, 0, keys) == keys
    assert read(cluster, reader, keys, 1) == bytes([Code.LOCAL]) * 4


def test_the_owner_of_segments_read_from_disk() -> None:
    """Segments that are read from disk have the owner that their directory node names meanwhile."""
    cluster, writer, _, (keys, *_) = full()
    matched = match(cluster, writer, keys)
    disk_of(cluster).slow_s = 0.02
    ask(writer.processes[0], engine.Fetch, matched.lease, 0, matched.hits, 5.0)
    cluster.run_for(0.01)
    redundant = peer.Redundant(RED, join_keys(keys), ("n1",) * len(keys))
    cluster.link("n0", "n1").say("n1", redundant)
    cluster.run_for(0.5)
    index = cluster.core(0).store.index(RED)
    assert {index[key].source for key in keys} == {"n1"}
    assert on_disk(cluster, 0, keys) == []
    cluster.check()
