"""Memory that the daemon before left: what is found again, what is not, and which slots stay as they are."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.core.scenes import answer, calm, copies, fetch, match, placed, prepare, read, release, said, store
from tests.sim.arena import REGION_BYTES, SHARDS, SLOT_BYTES, SLOTS, content
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tests.sim.node import SimNode
from tests.sim.prompts import prompt
from tokenlake.core import CoreConfig, NodeCore, events, instructions
from tokenlake.core.engines import grants
from tokenlake.core.kept import DROPPED, KEPT, KEPT_BYTES
from tokenlake.directory.ring_record import RingRecord
from tokenlake.disk.notes import Note, Notes
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, State, ledger
from tokenlake.memory.ledger import MAX_GENERATION, Record
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.checks import check_request
from tokenlake.wire.frames import encode
from tokenlake.wire.slots import SlotRef, join_keys, unpack_slots

KEYS = prompt("kept", 4)
RED = TenantId("red")


def scene(**rules: Any) -> tuple[Cluster, SimNode, Engine]:
    """A cluster that keeps its memory, its first node, and an engine there."""
    cluster = calm(3, keep=True, **rules)
    return cluster, cluster.node(0), cluster.join(0)


def restart(cluster: Cluster, node: SimNode, *, clean: bool = True, returns: float | None = 0.0) -> NodeCore:
    """The daemon of a node ends, and the next one begins; `returns`: as of `SimProcess.returns_after_s`."""
    assert node.kept is not None
    for process in node.kept.survivors.values():
        process.returns_after_s = returns
    if clean:
        node.end()
        cluster.run_for(0.05)
    else:
        node.crash()
    assert node.life.stopped
    node.start()
    cluster.run_for(0.3)
    cluster.check()
    assert node.core is not None
    return node.core


def dropped(core: NodeCore) -> dict[str, int]:
    return {reason: count for (reason,), count in core.counters.by_labels(DROPPED).items()}


def levels(core: NodeCore) -> dict[str, float]:
    return {level.metric.name.removeprefix("tokenlake_"): level.value for level in core.levels()}


@pytest.mark.parametrize("clean", [True, False])
def test_segments_are_found_again(clean: bool) -> None:
    cluster, node, writer = scene()
    keys = placed(cluster, 1, 2, 3)
    store(cluster, writer, keys)
    core = restart(cluster, node, clean=clean)
    assert (core.counters[KEPT], core.counters[KEPT_BYTES]) == (3, 3 * SLOT_BYTES)
    assert read(cluster, writer, keys) == [Code.LOCAL] * 3
    assert read(cluster, cluster.join(2), keys) == [Code.LOCAL] * 3, "the directory node names the owner"
    owned = [each for each in said(cluster, 0, peer.Owned) if each.keys]
    assert owned, "the directory node was told"


def test_bytes_that_are_wrong_after_a_crash_are_no_segment() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:2])
    node.arena.flip(copies(cluster, KEYS[1])[0].place, 0)
    core = restart(cluster, node, clean=False)
    assert core.counters[KEPT] == 1
    assert read(cluster, writer, KEYS[:2])[0] is Code.LOCAL
    assert len(copies(cluster, KEYS[1])) == 0


def test_what_was_being_written_is_a_miss() -> None:
    cluster, node, writer = scene()
    writer.store(KEYS[:2], 0, Storing(fill_s=0.1))
    cluster.run_for(0.02)
    held = dict(writer.processes[0].fills)
    assert held
    core = restart(cluster, node)
    assert core.counters[KEPT] == 0
    cluster.run_for(0.3)
    assert writer.answers[-1].codes == bytes([Code.EXPIRED]) * 2, "the commit comes too late"
    assert not copies(cluster, KEYS[0])
    assert core.idle(), "the slots are free again"
    store(cluster, writer, KEYS[:2])


def test_a_note_a_pin_and_the_kind_go_on() -> None:
    cluster, node, writer = scene(pinned_share=0.5)
    store(cluster, writer, KEYS[:1])
    for _ in range(3):
        cluster.run_for(1.5)
        read(cluster, writer, KEYS[:1])
    writer.processes[0].tell(engine.Hint(join_keys(KEYS[:1]), Hints(priority=1, pin_s=30.0)))
    cluster.run_for(0.1)
    before = copies(cluster, KEYS[0])[0]
    accesses = cluster.core(0).store.accesses(before)
    assert accesses > 2
    core = restart(cluster, node)
    after = copies(cluster, KEYS[0])[0]
    assert after is not before
    assert (core.store.accesses(after), after.hints.priority, after.kind) == (accesses, 1, Kind.PRIMARY)
    assert core.census()["pinned segments"] == 1
    assert 25.0 < core._pins.left_s(after) <= 30.0
    cluster.run_for(31.0)
    assert core.census()["pinned segments"] == 0


def test_a_cached_copy_knows_its_source() -> None:
    cluster, node, reader = scene()
    store(cluster, cluster.join(1), KEYS[:1])
    assert read(cluster, reader, KEYS[:1]) == [Code.LOCAL]
    restart(cluster, node, clean=False)
    found = copies(cluster, KEYS[0])[0]
    assert (found.kind, found.source, found.owned) == (Kind.CACHED, NodeId("n1"), False)


def test_another_owner_makes_the_copy_a_cached_one() -> None:
    """Another node computed the segment while the daemon was down."""
    cluster, node, writer = scene()
    (key,) = placed(cluster, 1, 2)
    store(cluster, writer, [key])
    node.crash()
    cluster.run_for(0.5)
    store(cluster, cluster.join(2), [key])
    node.start()
    cluster.run_for(1.0)
    cluster.check()
    found = copies(cluster, key)
    assert {index: each.owned for index, each in found.items()} == {0: False, 2: True}


def test_an_order_to_evict_holds_while_segments_are_checked() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:3])
    node.crash()
    node.start()
    assert node.kept is not None
    assert node.kept.pending
    node.deliver(events.EvictRequested(7, "red", join_keys(KEYS[1:2])))
    assert not said(cluster, 0, instructions.EvictionDone)
    cluster.run_for(0.3)
    cluster.check()
    assert len(said(cluster, 0, instructions.EvictionDone)) == 1
    assert dropped(cluster.core(0)) == {"ordered": 1}
    assert [len(copies(cluster, key)) for key in KEYS[:3]] == [1, 0, 1]
    store(cluster, cluster.join(0), KEYS[1:2], 1)
    assert copies(cluster, KEYS[1]), "it may be written anew"


def test_a_whole_tenant_is_evicted_while_segments_are_checked() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:3])
    node.crash()
    node.start()
    node.deliver(events.EvictRequested(7, "red", b""))
    cluster.run_for(0.5)
    cluster.check()
    assert node.kept is not None
    assert not node.kept.records
    assert not list(cluster.core(0).store.segments())


# -- survivors


def test_a_lease_goes_on() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:3])
    found = match(cluster, writer, KEYS[:3])
    process = writer.processes[0]
    process.items[found.lease] = 3
    for index in range(3):
        process.views[found.lease, index] = process.view(found.slots[16 * index : 16 * index + 16], KEYS[index])
    core = restart(cluster, node)
    assert not core.census()["survivors"]
    (session,) = core._sessions
    assert [each is not None and each.pins for each in session.leases[LeaseId(found.lease)].segments] == [1, 1, 1]
    assert fetch(cluster, writer, found.lease, 3).codes == bytes([Code.LOCAL]) * 3
    process.views.clear()
    release(cluster, writer, found.lease, 3, read=True)
    assert core.idle()
    cluster.check()


def test_slots_of_a_process_that_does_not_return_stay() -> None:
    cluster, node, writer = scene(session_reserve_share=1.0, dirty_share=1.0)
    store(cluster, writer, KEYS[:3])
    core = restart(cluster, node, returns=5.0)
    assert levels(core) == {"survivors": 1, "withheld_slots": SLOTS - 3}
    pool = next(iter(core.store.pools()))
    kept = list(pool.regions)
    other = cluster.join(0)
    for number in range(4):
        other.store(prompt(f"more {number}", 4), 0, Storing())
        cluster.run_for(0.1)
        cluster.check()
    assert len(copies(cluster, KEYS[0])) == 1, "segments of the daemon before are not evicted"
    assert kept[0] in pool.withheld
    assert read(cluster, other, KEYS[:3]) == [Code.LOCAL] * 3, "but they are read"
    writer.die()
    cluster.run_for(0.3)
    cluster.check()
    assert levels(core) == {}
    assert not pool.withheld
    for number in range(4, 10):
        other.store(prompt(f"more {number}", 4), 0, Storing())
        cluster.run_for(0.1)
        cluster.check()
    assert sum(each.place.region == kept[0] for each in core.store.segments()) == SLOTS
    assert len(copies(cluster, KEYS[0])) == 0


def test_a_survivor_of_one_tenant_blocks_no_other() -> None:
    cluster, node, red = scene()
    blue = cluster.join(0, "blue")
    cluster.run_for(0.1)
    store(cluster, red, KEYS[:1])
    store(cluster, blue, KEYS[:1])
    assert node.kept is not None
    restart(cluster, node)
    node.crash()
    for process in node.kept.survivors.values():
        process.returns_after_s = 5.0 if process.tenant == "red" else 0.0
    node.start()
    cluster.run_for(0.3)
    cluster.check()
    withheld = {pool.tenant: bool(pool.withheld) for pool in cluster.core(0).store.pools()}
    assert withheld == {"red": True, "blue": False}


def test_two_processes_return_to_one_session() -> None:
    cluster, node, _ = scene()
    both = cluster.join(0, processes=2)
    cluster.run_for(0.1)
    store(cluster, both, KEYS[:2])
    found = match(cluster, both, KEYS[:2])
    answer(cluster, both.second, engine.Attach, found.lease)
    for process in both.processes:
        process.items[found.lease] = 2
        for index in range(2):
            process.views[found.lease, index] = process.view(found.slots[16 * index : 16 * index + 16], KEYS[index])
    core = restart(cluster, node)
    session = next(each for each in core._sessions if found.lease in each.leases)
    assert len(session.processes) == 2
    lease = session.leases[LeaseId(found.lease)]
    assert len(lease.held) == 2
    both.processes[0].views.clear()
    release(cluster, both, found.lease, 2)
    cluster.check()
    assert session.leases, "the other process still holds it"
    both.second.die()
    cluster.run_for(0.2)
    cluster.check()
    assert not session.leases


def test_survivors_without_a_session_share_none() -> None:
    """They had not heard of their session when the daemon ended."""
    core = raw()
    kept_region(core, 0)
    core.handle(events.MemoryKept(1, 1, ((8, "red"), (9, "red"))), 0.0)
    for number in (8, 9):
        core.handle(events.Joined(10 + number, 1, "red", SLOT_BYTES, SHARDS, 16, 0, 0, number), 0.0)
    assert len(list(core._sessions)) == 2
    for number in (8, 9):
        core.handle(events.ProcessGone(10 + number), 0.0)
    core.check_integrity()
    assert core.census()["survivors"] == 0


def test_a_session_of_the_daemon_before_is_no_other_tenants() -> None:
    core = raw()
    kept_region(core, 0)
    core.handle(events.MemoryKept(1, 1, ((8, "red"), (9, "blue"))), 0.0)
    for connection, number, tenant in ((1, 8, "red"), (2, 9, "blue")):
        core.handle(events.Joined(connection, 1, tenant, SLOT_BYTES, SHARDS, 16, 4711, 0, number), 0.0)
    assert [each.tenant for each in core._sessions] == ["red", "blue"]
    # No survivor of this number, or of another tenant: the session does not exist.
    for connection, number in ((3, 0), (4, 7), (5, 9)):
        (answer_,) = core.handle(events.Joined(connection, 1, "red", SLOT_BYTES, SHARDS, 16, 4711, 0, number), 0.0)
        assert isinstance(answer_, instructions.Answer)
        assert isinstance(answer_.message, engine.Failed)
    core.check_integrity()


def test_a_survivor_that_connects_again_keeps_its_grants() -> None:
    core = raw()
    kept_region(core, 0)
    kept_segments(core, 0, KEYS[:1])
    core.handle(events.MemoryKept(1, 1, ((8, "red"),)), 0.0)
    core.handle(events.Joined(1, 1, "red", SLOT_BYTES, SHARDS, 16, 4711, 0, 8), 0.0)
    slot = SlotRef(0, 0, 1).pack()
    core.handle(events.Requested(1, engine.Regrant(1, ((5, 1, 0, slot),), (), False)), 0.0)
    # Its connection broke before the last part.
    core.handle(events.Joined(2, 1, "red", SLOT_BYTES, SHARDS, 16, 4711, 0, 8), 0.0)
    (session,) = core._sessions
    assert list(session.processes) == [2]
    assert list(session.leases[LeaseId(5)].held) == [2]
    core.handle(events.Requested(2, engine.Regrant(1, ((5, 1, 0, slot),), (), True)), 0.0)
    core.check_integrity()
    assert core.census()["survivors"] == 0
    again = core.handle(events.Requested(2, engine.Regrant(1, ((5, 1, 0, slot),), (), True)), 0.0)
    assert again == [instructions.Answer(2, engine.Regranted(1, bytes([Code.LOCAL])))]
    core.check_integrity()


def test_a_grant_of_another_generation_is_refused() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:1])
    place = copies(cluster, KEYS[0])[0].place
    process = writer.processes[0]
    wrong = process.view(SlotRef(place.region, place.slot, place.generation + 1).pack(), KEYS[0])
    process.views[77, 0] = wrong
    process.items[77] = 1
    assert node.kept is not None
    node.end()
    cluster.run_for(0.05)
    node.start()
    cluster.run_for(0.3)
    core = cluster.core(0)
    assert core.census()["survivors"] == 1, "it has not returned"
    assert not any(session.leases for session in core._sessions)
    process.views.clear()
    writer.die()
    cluster.run_for(0.3)
    cluster.check()
    assert levels(core) == {}


def test_only_a_survivor_is_granted_what_it_names() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:1])
    restart(cluster, node)
    stranger = cluster.join(0)
    cluster.run_for(0.1)
    slot = copies(cluster, KEYS[0])[0].packed
    reply = answer(cluster, stranger.processes[0], engine.Regrant, ((5, 1, 0, slot),), ((6, slot),), True)
    assert reply.codes == bytes([Code.LOST, Code.LOST])
    cluster.check()


def test_grants_beyond_a_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:2])
    process = writer.processes[0]
    for index in range(2):
        segment = copies(cluster, KEYS[index])[0]
        process.views[50 + index, 0] = process.view(segment.packed, KEYS[index])
        process.items[50 + index] = 1
    monkeypatch.setattr(grants, "MAX_GRANTS", 1)
    core = restart(cluster, node)
    (session,) = core._sessions
    assert len(session.leases) == 1
    assert core.census()["survivors"] == 1, "slots that it holds without a grant are not given out"


def test_the_limits_of_a_regrant_fit_the_request() -> None:
    """As many slots as the limit fit into a frame, and a larger one is refused."""
    leases = tuple((1, 1, 0, bytes(16)) for _ in range(engine.MAX_REGRANTED))
    check_request(engine.Regrant(1, leases, (), True))
    assert len(encode(engine.Regrant(1, leases, (), True))) < engine.MAX_FRAME
    with pytest.raises(ValueError, match="limit is 128"):
        check_request(engine.Regrant(1, leases, ((1, bytes(16)),), True))


# -- memory of another size, tenants that are gone, damaged regions


def raw(**rules: Any) -> NodeCore:
    """The rules of a node that keeps its memory, before any other event."""
    record = RingRecord.of({"n0": 4 * REGION_BYTES})
    core = NodeCore(CoreConfig("n0", 2, record, 4, REGION_BYTES, made=False, keep=True, **rules))
    core.start(0.0)
    return core


def kept_region(core: NodeCore, region: int, tenant: str = "red", generation: int = 1) -> list[Any]:
    packed = struct.pack(f"<{SLOTS}Q", *[generation] * SLOTS)
    return core.handle(events.RegionKept(region, REGION_BYTES, tenant, SLOT_BYTES, packed), 0.0)


def record_of(key: SegmentKey, generation: int = 1, tenant: str = "red") -> bytes:
    note = Notes().pack(Note(0, 1, NO_HINTS))
    return ledger.pack(Record(generation, key, True, 0, note, 0.0, 0.0, b"".join(content(tenant, key))))


def kept_segments(core: NodeCore, region: int, keys: list[SegmentKey], tenant: str = "red") -> list[Any]:
    slots = b"".join(SlotRef(region, slot, 1).pack() for slot in range(len(keys)))
    found = tuple(record_of(key, tenant=tenant) for key in keys)
    return core.handle(events.SegmentsKept(tenant, SLOT_BYTES, slots, found), 0.0)


def closed(core: NodeCore, seconds: float = 2.0) -> list[int]:
    """The regions that are closed within this time."""
    found: list[int] = []
    until = seconds
    while (wake := core.next_wake()) is not None and wake <= until:
        out = core.handle(events.Tick(), wake)
        core.check_integrity()
        found += [each.region for each in out if isinstance(each, instructions.CloseRegion)]
    return found


def test_less_memory_gives_the_emptiest_regions_back() -> None:
    core = raw()
    for region in range(6):
        assert not kept_region(core, region)
    for region in range(6):
        kept_segments(core, region, prompt(f"region {region}", 1 if region in (2, 4) else 3))
    core.handle(events.MemoryKept(1, 6), 0.0)
    core.check_integrity()
    assert core.store.regions.excess == 2 * REGION_BYTES
    assert core.vacancy().free_share <= 1.0
    assert sorted(closed(core)) == [2, 4]
    assert core.store.regions.excess == 0
    assert len(list(core.store.segments())) == 12


def test_survivors_keep_memory_that_is_too_much() -> None:
    core = raw()
    for region in range(5):
        kept_region(core, region)
    core.handle(events.MemoryKept(1, 5, ((9, "red"),)), 0.0)
    assert not closed(core)
    core.handle(events.SurvivorGone(9), 2.0)
    assert len(closed(core, 5.0)) == 1


def test_a_tenant_that_is_gone_loses_its_regions() -> None:
    core = raw(quotas={"red": 1.0})
    kept_region(core, 0)
    kept_region(core, 1, "blue")
    kept_segments(core, 0, KEYS[:2])
    out = kept_segments(core, 1, KEYS[:2], "blue")
    (cleared,) = [each for each in out if isinstance(each, instructions.Record)]
    assert cleared.records == (b"", b"")
    assert dropped(core) == {"tenant": 2}
    core.handle(events.MemoryKept(1, 2), 0.0)
    assert closed(core) == [1]


def test_a_tenant_above_its_quota_gives_regions_back() -> None:
    core = raw(quotas={"red": 0.25, "blue": 1.0})
    for region in range(3):
        kept_region(core, region)
    core.handle(events.MemoryKept(1, 3), 0.0)
    assert len(closed(core)) == 2


def test_a_region_without_a_tenant_is_spare_again() -> None:
    core = raw()
    assert not core.handle(events.RegionKept(3, REGION_BYTES, "", 0), 0.0)
    core.handle(events.MemoryKept(1, 9), 0.0)
    assert dict(core.store.regions.spare) == {3: REGION_BYTES}
    core.check_integrity()
    made = [
        each.region
        for _ in range(3)
        for each in core.handle(events.Tick(), 0.0)
        if isinstance(each, instructions.MakeRegion)
    ]
    assert min(made) >= 9, "no number is used twice"


def test_a_spare_region_that_has_no_room_is_closed() -> None:
    core = raw()
    for region in range(4):
        kept_region(core, region)
    (order,) = core.handle(events.RegionKept(4, REGION_BYTES, "", 0), 0.0)
    assert order == instructions.CloseRegion(4)


@pytest.mark.parametrize("generations", [b"", struct.pack("<2Q", 1, 1), struct.pack("<3Q", 1, MAX_GENERATION + 1, 1)])
def test_a_region_with_senseless_generations_is_closed(generations: bytes) -> None:
    core = raw()
    (order,) = core.handle(events.RegionKept(0, REGION_BYTES, "red", SLOT_BYTES, generations), 0.0)
    assert order == instructions.CloseRegion(0)
    core.handle(events.MemoryKept(1, 1), 0.0)
    core.check_integrity()


def test_records_that_say_nothing_are_void() -> None:
    core = raw()
    kept_region(core, 0, generation=2)
    good, stale = record_of(KEYS[0], 2), record_of(KEYS[1], 1)
    places = [SlotRef(0, 0, 2), SlotRef(0, 1, 2), SlotRef(0, 2, 2), SlotRef(0, 0, 2), SlotRef(5, 0, 1)]
    slots = b"".join(place.pack() for place in places)
    raws = (good, stale, good[:-1] + b"x", record_of(KEYS[2], 2), record_of(KEYS[3]))
    (cleared,) = core.handle(events.SegmentsKept("red", SLOT_BYTES, slots, raws), 0.0)
    assert isinstance(cleared, instructions.Record)
    assert dropped(core) == {"void": 2, "held": 1, "region": 1}
    assert unpack_slots(cleared.slots) == places[1:]


def test_a_segment_that_two_records_name_is_taken_once() -> None:
    core = raw()
    kept_region(core, 0)
    kept_segments(core, 0, [KEYS[0], KEYS[0]])
    assert dropped(core) == {"known": 1}
    core.handle(events.MemoryKept(1, 1), 0.0)
    core.check_integrity()
    assert len(list(core.store.segments())) == 1


def test_new_segments_get_greater_generations() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:1])
    core = restart(cluster, node)
    node.deliver(events.EvictRequested(1, "red", join_keys(KEYS[:1])))
    reply = prepare(cluster, writer, KEYS[:1])
    (place,) = unpack_slots(reply.slots)
    generations = node.arena.regions[place.region].generations
    assert place.generation == generations[place.slot]
    assert core.store.get(RED, KEYS[0]) is not None


def test_records_are_written_anew_before_the_end() -> None:
    cluster, node, writer = scene()
    store(cluster, writer, KEYS[:2])
    assert node.kept is not None
    before = dict(node.kept.records)
    cluster.run_for(2.0)
    read(cluster, writer, KEYS[:2])
    assert node.kept.records == before, "a read writes no record"
    node.deliver(events.SealRequested())
    cluster.run_for(0.05)
    assert len(said(cluster, 0, instructions.Sealed)) == 1
    notes = [Notes().unpack(found.note) for each in node.kept.records.values() if (found := ledger.unpack(each))]
    assert [note.accesses for note in notes] == [2, 2]
    assert cluster.core(0).census()["seals under way"] == 0


def test_segments_with_too_many_shards_have_no_record() -> None:
    core = raw()
    store_, shards = core.store, ledger.max_shards(SLOT_BYTES) + 1
    core._context.out.clear()
    store_.regions.made(store_.regions.make(REGION_BYTES))
    segment = store_.reserve(RED, SLOT_BYTES, KEYS[0], Kind.DIRTY, 0, 0.0, shards=shards)
    assert not isinstance(segment, Code)
    store_.publish(segment, bytes(8 * shards), 0.0)
    order = core._ledger.take()
    assert order is not None
    assert order.records == (b"",)
    assert segment.state is State.READY


def test_a_node_that_keeps_nothing_says_nothing_of_a_ledger() -> None:
    cluster = calm(1)
    writer = cluster.join(0)
    store(cluster, writer, KEYS[:2])
    assert not said(cluster, 0, instructions.Record)
