"""The cold tier: segments that memory evicts are read back at any node of any cluster, where that is cheaper than
computing them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.scenes import answer, ask, calm, copies, explained, fetch, match, missed, said, store, supplied
from tests.sim.arena import SHARDS, SLOT_BYTES, content
from tests.sim.cluster import Cluster
from tests.sim.cold import Cold, ColdPort
from tests.sim.engine import SEGMENT_TOKENS, Engine
from tests.sim.prompts import prompt
from tokenlake.core import departing, events
from tokenlake.core.cold import EXISTED, FAILED, REFUSED, WRITTEN
from tokenlake.core.cold_reads import ABSENT, DAMAGED, READ, READS
from tokenlake.core.cold_tier import ASIDE, LEAST_PAUSE_S
from tokenlake.core.instructions import ColdErase, ColdLook, ColdRead, ColdWrite, EvictionDone, PrefetchDone, Saved
from tokenlake.core.report.account import Source
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId
from tokenlake.memory.removals import COLD_DAMAGED_RULE
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys, split_keys, unpack_slots

RED = TenantId("red")


def cold_of(cluster: Cluster) -> Cold:
    """The tier."""
    assert cluster.cold is not None
    return cluster.cold


def port(cluster: Cluster, node: int = 0) -> ColdPort:
    """The tier as a node reaches it."""
    found = cluster.node(node).cold
    assert found is not None
    return found


def count(cluster: Cluster, metric: Metric, node: int = 0) -> int:
    """The value of a counter of a node."""
    return cluster.core(node).counters[metric]


def has(cluster: Cluster, keys: Sequence[SegmentKey]) -> bool:
    """Are all these segments in the tier?"""
    return all(("red", SLOT_BYTES, key) in cold_of(cluster).objects for key in keys)


def fill(cluster: Cluster, writer: Engine, prompts: int = 4, length: int = 4) -> list[list[SegmentKey]]:
    """Store more prompts than memory holds, one after the other."""
    stored = [prompt(f"fill-{number}", length) for number in range(prompts)]
    for keys in stored:
        store(cluster, writer, keys)
        cluster.run_for(1.0)
    return stored


def restarted(nodes: int = 1, prompts: int = 4) -> tuple[Cluster, list[Engine], list[list[SegmentKey]]]:
    """A cluster all nodes of which have started anew, an engine at each, and the prompts that only the tier has."""
    cluster = calm(nodes, has_cold=True)
    gone = [keys for keys in fill(cluster, cluster.join(0), prompts) if has(cluster, keys)]
    assert gone
    for node in cluster.nodes.values():
        node.crash()
        node.start()
    cluster.run_for(1.0)
    return cluster, [cluster.join(number) for number in range(nodes)], gone


def read(cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey], node: int = 0, name: str = "") -> bytes:
    """Match and fetch segments, compare every byte, and give them back as read. Returns the codes of the fetch."""
    matched = match(cluster, reader, keys, name)
    if not matched.hits:
        answer(cluster, reader.processes[0], engine.Heartbeat)
        reader.processes[0].tell(engine.Release(((matched.lease, 0, 0),), True))
        return b""
    fetched = fetch(cluster, reader, matched.lease, matched.hits)
    arena = cluster.node(node).arena
    for key, code, slot in zip(keys, fetched.codes, unpack_slots(fetched.slots), strict=False):
        if code == Code.LOCAL:
            assert tuple(arena.read(slot, shard) for shard in range(SHARDS)) == content("red", key)
    reader.processes[0].tell(engine.Release(((matched.lease, 0, matched.hits),), True))
    cluster.run_for(0.1)
    cluster.check()
    return bytes(fetched.codes)


def damage(cluster: Cluster, keys: Sequence[SegmentKey]) -> None:
    """The objects of these segments have other bytes."""
    objects = cold_of(cluster).objects
    for key in keys:
        name = "red", SLOT_BYTES, key
        objects[name] = objects[name]._replace(shards=(b"other by", *objects[name].shards[1:]))


# -- reads


def test_a_new_cluster_reads_what_another_one_wrote() -> None:
    cluster, (reader,), gone = restarted()
    matched = match(cluster, reader, gone[0])
    assert matched.codes == bytes([Code.REMOTE]) * 4
    located = answer(cluster, reader.processes[0], engine.Locate, matched.lease)
    assert set(located.nodes) == {"n0"}
    assert located.disk_s[0] >= cold_of(cluster).latency_s
    assert read(cluster, reader, gone[0]) == bytes([Code.LOCAL]) * 4
    assert count(cluster, READ) == 4
    reader.die()
    cluster.run_for(1.0)
    assert supplied(cluster.core(0).counters, Source.COLD) > 0


def test_what_was_read_is_owned_and_found_by_the_other_nodes() -> None:
    cluster, readers, gone = restarted(3)
    assert read(cluster, readers[1], gone[0], 1) == bytes([Code.LOCAL]) * 4
    assert all(copies(cluster, key)[1].owned for key in gone[0])
    looks = len(said(cluster, 2, ColdRead))
    assert read(cluster, readers[2], gone[0], 2) == bytes([Code.LOCAL]) * 4
    assert len(said(cluster, 2, ColdRead)) == looks


def test_two_nodes_that_read_the_same_agree_on_one_owner() -> None:
    cluster, readers, gone = restarted(3)
    matches = [ask(each.processes[0], engine.Match, join_keys(gone[0]), 0.0, True) for each in readers]
    cluster.run_for(0.05)
    for each, (found,) in zip(readers, matches, strict=True):
        ask(each.processes[0], engine.Fetch, found.lease, 0, found.hits, 0.0)
    cluster.run_for(1.0)
    for key in gone[0]:
        assert sum(segment.owned for segment in copies(cluster, key).values()) == 1
    assert all(len(names) == 1 for names in cluster.keepers().values())


def test_engines_of_a_node_share_one_read() -> None:
    cluster, (first,), gone = restarted()
    second = cluster.join(0)
    cluster.run_for(0.1)
    matches = [ask(each.processes[0], engine.Match, join_keys(gone[0]), 0.0, True) for each in (first, second)]
    cluster.run_for(0.05)
    fetches = [
        ask(each.processes[0], engine.Fetch, found.lease, 0, found.hits, 0.0)
        for each, (found,) in zip((first, second), matches, strict=True)
    ]
    cluster.run_for(0.2)
    assert [reply.codes for (reply,) in fetches] == [bytes([Code.LOCAL]) * 4] * 2
    assert sum(len(split_keys(order.keys)) for order in said(cluster, 0, ColdRead)) == 4


def test_the_history_of_a_segment_comes_back_with_it() -> None:
    cluster = calm(1, has_cold=True)
    cold_of(cluster).full = True
    writer, keys = cluster.join(0), prompt("hinted", 2)
    store(cluster, writer, keys)
    cluster.node(0).deliver(events.HintGiven("red", join_keys(keys), Hints(priority=1)))
    cold_of(cluster).full = False
    fill(cluster, writer, 6)
    assert has(cluster, keys)
    cluster.node(0).crash()
    cluster.node(0).start()
    cluster.run_for(1.0)
    assert read(cluster, cluster.join(0), keys) == bytes([Code.LOCAL]) * 2
    assert copies(cluster, keys[0])[0].hints.priority == 1


def test_a_prefix_of_another_node_is_continued_from_the_tier() -> None:
    cluster, readers, gone = restarted(2)
    store(cluster, readers[1], gone[0][:2])
    assert read(cluster, readers[0], gone[0]) == bytes([Code.LOCAL]) * 4
    assert count(cluster, READ) == 2


def test_what_another_node_has_behind_the_gap_comes_from_there() -> None:
    cluster, readers, gone = restarted(2)
    store(cluster, readers[1], gone[0][2:], 2)
    assert read(cluster, readers[0], gone[0]) == bytes([Code.LOCAL]) * 4
    assert count(cluster, READ) == 2


def test_independent_keys_are_found_one_by_one() -> None:
    cluster, (reader,), gone = restarted()
    wanted = [prompt("never", 1)[0], gone[0][2], prompt("never", 2)[1], gone[0][0]]
    fields = (join_keys(wanted), 0.0, True, "", None, 0, 0.0, 0.0, True)
    matched = answer(cluster, reader.processes[0], engine.Match, *fields)
    assert matched.codes == bytes([Code.MISSING, Code.REMOTE, Code.MISSING, Code.REMOTE])


def test_a_prefetch_reads_from_the_tier_what_no_node_has() -> None:
    cluster, _, gone = restarted(2)
    keys = join_keys([*gone[0], *prompt("never", 1)])
    cluster.node(0).deliver(events.PrefetchRequested(7, "red", keys, SLOT_BYTES, SHARDS))
    cluster.run_for(0.3)
    (done,) = said(cluster, 0, PrefetchDone)
    assert done.codes == bytes([Code.LOCAL]) * 4 + bytes([Code.MISSING])


def test_few_reads_run_at_a_time() -> None:
    cluster, _, _ = restarted()
    cold = cluster.core(0)._transfers.cold
    assert cold._queue._reads == READS


# -- the price


def test_what_is_cheaper_to_compute_is_not_read() -> None:
    cluster, (reader,), gone = restarted()
    tier = cluster.core(0)._tier
    tier.computed(PoolId(RED, SLOT_BYTES), cold_of(cluster).latency_s / 4)
    assert read(cluster, reader, gone[0], name="slow") == b""
    assert not said(cluster, 0, ColdRead)
    funnel = explained(cluster, reader, "slow")
    assert [(each.reason, each.detail) for each in funnel.missed] == [
        ("skipped", "computing it was faster than the cold tier")
    ]
    assert missed(cluster.core(0).counters) == {"skipped": funnel.ideal}


def test_engines_tell_how_long_they_compute() -> None:
    cluster, (reader,), gone = restarted()
    matched = match(cluster, reader, gone[0])
    fetch(cluster, reader, matched.lease, 4)
    tokens = SEGMENT_TOKENS
    took = (matched.lease, 0, 4 * tokens, 0.2)
    reader.processes[0].tell(engine.Release(((matched.lease, 0, 4),), True, took=(took,)))
    cluster.run_for(0.1)
    assert cluster.core(0)._tier._compute_s[PoolId(RED, SLOT_BYTES)] == pytest.approx(0.05)


def test_a_long_queue_counts_in_the_price() -> None:
    cluster, _, _ = restarted()
    cold = cluster.core(0)._transfers.cold
    pool = PoolId(RED, 1 << 20)
    cold.tier.computed(pool, 0.01)
    assert cold.pays(pool, 8)
    before = cold.predict_s(1 << 20)
    cold._queue._nbytes[-1] += 1 << 30
    assert cold.predict_s(1 << 20) > before + 0.5
    assert not cold.pays(pool, 8)
    cold._queue._nbytes[-1] -= 1 << 30


# -- trouble


def test_a_tier_that_brings_nothing_costs_one_deadline() -> None:
    cluster, (reader,), gone = restarted(prompts=6)
    cold_of(cluster).slow_s = 30.0
    began = cluster.clock.now
    assert Code.LOCAL not in read(cluster, reader, gone[0])
    assert cluster.clock.now - began < 1.0
    assert count(cluster, ASIDE) == 1
    looks = len(said(cluster, 0, ColdLook))
    assert read(cluster, reader, gone[1]) == b""
    assert len(said(cluster, 0, ColdLook)) == looks
    cold_of(cluster).slow_s = 0.0
    cluster.run_for(LEAST_PAUSE_S)
    assert read(cluster, reader, gone[1]) == bytes([Code.LOCAL]) * 4


def test_a_tier_that_stays_silent_is_set_aside_for_longer() -> None:
    cluster, (reader,), gone = restarted(prompts=6)
    cold_of(cluster).slow_s = 30.0
    for pause_s in (LEAST_PAUSE_S, 2 * LEAST_PAUSE_S, 4 * LEAST_PAUSE_S):
        read(cluster, reader, gone[0])
        assert not cluster.core(0)._tier.readable
        cluster.run_for(pause_s - 1.0)
        assert read(cluster, reader, gone[0]) == b""
        cluster.run_for(1.0)


def test_a_tier_that_goes_is_not_asked() -> None:
    cluster, (reader,), gone = restarted()
    port(cluster).gone()
    assert read(cluster, reader, gone[0]) == b""
    assert not said(cluster, 0, ColdLook)
    port(cluster).back()
    assert read(cluster, reader, gone[0]) == bytes([Code.LOCAL]) * 4


def test_slots_stay_pinned_until_a_read_ends_when_the_tier_goes() -> None:
    cluster, (reader,), gone = restarted()
    matched = match(cluster, reader, gone[0])
    cold_of(cluster).slow_s = 0.02
    replies = ask(reader.processes[0], engine.Fetch, matched.lease, 0, 4, 0.0)
    cluster.run_for(0.005)
    port(cluster).gone()
    cluster.check()
    assert any(cluster.core(0)._transfers.pinned())
    cluster.run_for(0.2)
    assert replies[0].codes == bytes([Code.LOCAL]) * 4


def test_a_late_answer_of_the_index_delays_no_match_for_long() -> None:
    cluster, (reader,), gone = restarted()
    cold_of(cluster).late_s = 1.0
    began = cluster.clock.now
    assert read(cluster, reader, gone[0]) == b""
    assert cluster.clock.now - began < 0.1
    cluster.run_for(2.0)
    assert not cluster.core(0)._tier.census()["looks into the cold tier"]


def test_damaged_objects_are_misses_and_are_removed() -> None:
    cluster, (reader,), gone = restarted()
    damage(cluster, gone[0][1:2])
    assert read(cluster, reader, gone[0]) == bytes([Code.LOCAL, Code.BAD_CHECKSUM, Code.LOCAL, Code.LOCAL])
    assert count(cluster, DAMAGED) == 1
    assert not has(cluster, gone[0][1:2])
    removal = cluster.core(0)._context.removals.get(RED, gone[0][1])
    assert removal is not None
    assert removal.rule == COLD_DAMAGED_RULE


def test_an_object_that_is_gone_is_not_asked_for_again_at_once() -> None:
    cluster, (reader,), gone = restarted()
    objects = cold_of(cluster).objects
    for key in gone[0][2:]:
        del objects["red", SLOT_BYTES, key]
    assert read(cluster, reader, gone[0])[2:] == bytes([Code.LOST]) * 2
    assert count(cluster, ABSENT) == 2
    for key in gone[0][2:]:
        cold_of(cluster).index["red", SLOT_BYTES, key] = None
    reads = len(said(cluster, 0, ColdRead))
    assert read(cluster, reader, gone[0]) == bytes([Code.LOCAL]) * 2
    assert len(said(cluster, 0, ColdRead)) == reads


# -- writes


def test_only_what_memory_is_about_to_evict_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departing, "LEAST_AHEAD", 0)
    cluster = calm(1, has_cold=True)
    writer = cluster.join(0)
    store(cluster, writer, prompt("few", 3))
    cluster.run_for(2.0)
    assert not said(cluster, 0, ColdWrite)
    fill(cluster, writer)
    assert count(cluster, WRITTEN) > 0


def test_what_the_tier_has_is_not_written_again() -> None:
    cluster, (reader,), gone = restarted()
    written = count(cluster, WRITTEN)
    objects = dict(cold_of(cluster).objects)
    for keys in gone:
        store(cluster, reader, keys)
        cluster.run_for(1.0)
    fill(cluster, reader, 4)
    assert count(cluster, EXISTED) > 0
    assert {name: each for name, each in cold_of(cluster).objects.items() if name in objects} == objects
    assert written == 0


def test_a_cached_copy_is_written_by_its_owner_only() -> None:
    cluster = calm(2, has_cold=True)
    writer, reader = cluster.join(0), cluster.join(1)
    keys = prompt("shared", 3)
    store(cluster, writer, keys)
    assert read(cluster, reader, keys, 1) == bytes([Code.LOCAL]) * 3
    fill(cluster, reader, 5)
    written = [key for order in said(cluster, 1, ColdWrite) for key in split_keys(order.keys)]
    owned = [key for key in keys if key in written]
    assert not owned or all(copies(cluster, key).get(0) is None for key in owned)


def test_the_budget_bounds_what_a_node_writes() -> None:
    cluster = calm(1, has_cold=True, cold_bytes_per_day=24 * 3 * SLOT_BYTES)
    fill(cluster, cluster.join(0), 6)
    assert count(cluster, WRITTEN) <= 3
    assert cluster.core(0).counters.by_labels(REFUSED)["day",] > 0


def test_a_tier_that_refuses_writes_is_left_alone_for_a_while() -> None:
    cluster = calm(1, has_cold=True)
    cold_of(cluster).full = True
    writer = cluster.join(0)
    fill(cluster, writer, 3)
    orders = len(said(cluster, 0, ColdWrite))
    assert count(cluster, FAILED) == 1 == orders
    cold_of(cluster).full = False
    cluster.run_for(LEAST_PAUSE_S)
    fill(cluster, writer, 6)
    assert count(cluster, WRITTEN) > 0


def test_slots_stay_pinned_until_a_write_ends_when_the_tier_goes() -> None:
    cluster = calm(1, has_cold=True)
    cold_of(cluster).slow_s = 3.0
    writer = cluster.join(0)
    for number in range(4):
        store(cluster, writer, prompt(f"fill-{number}", 4))
    pinned = list(cluster.core(0)._cold.pinned())
    assert pinned
    port(cluster).gone()
    cluster.check()
    assert list(cluster.core(0)._cold.pinned()) == pinned
    cluster.run_for(4.0)
    assert not list(cluster.core(0)._cold.pinned())


# -- orders


def test_an_operator_evicts_from_the_tier() -> None:
    cluster, (reader,), gone = restarted()
    cluster.node(0).deliver(events.EvictRequested(1, "red", join_keys(gone[0])))
    cluster.run_for(0.1)
    assert said(cluster, 0, EvictionDone)
    assert not any(has(cluster, [key]) for key in gone[0])
    assert read(cluster, reader, gone[0]) == b""
    cluster.node(0).deliver(events.EvictRequested(2, "red", b""))
    cluster.run_for(0.5)
    assert not cold_of(cluster).objects


def test_what_is_evicted_during_its_write_is_erased_behind_it() -> None:
    cluster = calm(1, has_cold=True)
    cold_of(cluster).slow_s = 2.0
    writer = cluster.join(0)
    for number in range(4):
        store(cluster, writer, prompt(f"fill-{number}", 4))
    (key,) = {segment.key for segment in cluster.core(0)._cold.pinned()}
    cluster.node(0).deliver(events.EvictRequested(1, "red", key))
    cluster.run_for(0.1)
    assert not said(cluster, 0, EvictionDone), "the segment is not erased yet"
    cluster.run_for(5.0)
    assert said(cluster, 0, EvictionDone)
    assert not has(cluster, [key])
    assert len([order for order in said(cluster, 0, ColdErase) if order.keys == key]) == 2


def test_what_is_evicted_while_it_is_read_never_arrives() -> None:
    cluster, (reader,), gone = restarted()
    matched = match(cluster, reader, gone[0])
    cold_of(cluster).slow_s = 0.02
    replies = ask(reader.processes[0], engine.Fetch, matched.lease, 0, 4, 0.0)
    cluster.run_for(0.005)
    cluster.node(0).deliver(events.EvictRequested(1, "red", join_keys(gone[0])))
    cluster.run_for(0.3)
    assert Code.LOCAL not in replies[0].codes
    assert not copies(cluster, gone[0][0])


def test_memory_is_saved_to_the_tier_before_the_daemon_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departing, "LEAST_AHEAD", 0)
    cluster = calm(1, has_cold=True)
    keys = prompt("late", 3)
    store(cluster, cluster.join(0), keys)
    assert not has(cluster, keys[:1])
    cluster.node(0).deliver(events.SaveRequested(5.0))
    cluster.run_for(2.0)
    assert [order.segments for order in said(cluster, 0, Saved)] == [3]
    assert has(cluster, keys)


@pytest.mark.parametrize("fault", ["gone", "slow", "full"])
def test_a_save_ends_whatever_the_tier_does(fault: str) -> None:
    cluster = calm(1, has_cold=True)
    store(cluster, cluster.join(0), prompt("late", 3))
    if fault == "gone":
        port(cluster).gone()
    cold_of(cluster).slow_s = 2.0 if fault == "slow" else 0.0
    cold_of(cluster).full = fault == "full"
    cluster.node(0).deliver(events.SaveRequested(1.0))
    cluster.run_for(4.0)
    assert len(said(cluster, 0, Saved)) == 1
    cluster.check()


def test_copies_from_the_tier_may_become_primary() -> None:
    cluster, (reader,), gone = restarted()
    read(cluster, reader, gone[0])
    assert {copies(cluster, key)[0].kind for key in gone[0]} == {Kind.PRIMARY}
