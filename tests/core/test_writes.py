"""Writes: who keeps a segment, who learns of it, and what is refused."""

from __future__ import annotations

import collections
import itertools

import pytest

from tests.core.scenes import answer, ask, calm, copies, kinds, match, placed, prepare, said, store, tell
from tests.sim.arena import SHARDS, SLOTS, content
from tests.sim.engine import Storing
from tests.sim.prompts import prompt
from tokenlake.core.instructions import ReplaceRegion
from tokenlake.core.ownership import DUPLICATES
from tokenlake.store import Kind
from tokenlake.store import store as store_module
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SLOT_BYTES, unpack_slots


def test_the_emptier_candidate_pulls_what_was_written() -> None:
    cluster = calm(dirty_share=1.0)
    crowd, writer = cluster.join(1), cluster.join(0)
    for link in cluster.links_of("n1"):
        link.cut(0.4)
    store(cluster, crowd, placed(cluster, 1, 0, 3, "crowd"))
    cluster.run_for(0.5)
    key = placed(cluster, 1, 2)[0]
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.CACHED, 2: Kind.PRIMARY}
    place = copies(cluster, key)[2].place
    assert [cluster.node(2).arena.read(place, shard) for shard in range(SHARDS)] == list(content("red", key))


def test_a_refused_offer_leaves_the_copy_where_it_was_written() -> None:
    """Both candidates have their one region in the hands of another tenant."""
    cluster = calm(regions=1)
    for node in (1, 2):
        cluster.join(node, tenant="blue")
    cluster.run_for(0.01)
    writer, reader = cluster.join(0), cluster.join(1)
    key = placed(cluster, 1, 2)[0]
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.PRIMARY}
    assert [list(reply.codes) for reply in said(cluster, 2, peer.OfferReply)] in ([], [[Code.NO_REGION]])
    # Nobody on a node without a region can lease it, but the directory node names the one that has it.
    assert match(cluster, reader, [key]).codes == bytes([Code.SESSION_LIMIT])


def test_of_two_commits_the_first_wins() -> None:
    cluster = calm()
    writers = [cluster.join(0), cluster.join(1)]
    keys = placed(cluster, 2, 0, 2)
    cluster.run_for(0.01)
    for writer in writers:
        writer.store(keys, 0, Storing(fill_s=0.01))
    cluster.run_for(0.5)
    assert sum(cluster.core(node).counters[DUPLICATES] for node in (0, 1)) == 2
    for key in keys:
        assert sorted(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1
        assert Kind.DIRTY not in kinds(cluster, key).values()


def test_primary_copies_of_two_sides_of_a_cut_become_one() -> None:
    cluster = calm()
    keys = placed(cluster, 2, 0, 2) + placed(cluster, 0, 1, 2) + placed(cluster, 1, 2, 2)
    for link in cluster.links():
        link.cut(60.0)
    writers = [cluster.join(node) for node in range(3)]
    cluster.run_for(0.01)
    for writer in writers:
        for key in keys:
            store(cluster, writer, [key])
    assert all(list(kinds(cluster, key).values()) == [Kind.PRIMARY] * 3 for key in keys)
    for link in cluster.links():
        link.heal()
    cluster.run_for(0.5)
    assert all(sorted(kinds(cluster, key).values()) == [Kind.CACHED] * 2 + [Kind.PRIMARY] for key in keys)


def test_what_is_written_or_there_is_not_reserved_again() -> None:
    cluster = calm()
    writer, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys[:1])
    assert list(prepare(cluster, writer, keys).codes) == [Code.EXISTS, Code.RESERVED]
    assert list(prepare(cluster, other, keys).codes) == [Code.EXISTS, Code.PENDING]
    assert prepare(cluster, other, keys).write == 0


def test_writes_are_bounded_by_session_and_by_budget() -> None:
    cluster = calm(session_reserve_share=0.25, dirty_share=0.4)
    keys = placed(cluster, 0, 1, 9)
    writers = [cluster.join(0), cluster.join(0)]
    codes = [list(prepare(cluster, writer, keys[4 * at : 4 * at + 4]).codes) for at, writer in enumerate(writers)]
    assert codes[0] == [Code.RESERVED] * 3 + [Code.SESSION_LIMIT]
    assert codes[1] == [Code.RESERVED] * 2 + [Code.WRITE_BUDGET] * 2


def test_shards_of_two_processes_make_one_segment() -> None:
    cluster = calm()
    writer = cluster.join(0, processes=2)
    cluster.run_for(0.01)
    first, second = writer.processes
    key = placed(cluster, 0, 1)[0]
    prepared = prepare(cluster, writer, [key])
    attached = answer(cluster, second, engine.Attach, prepared.write)
    assert attached.slots == prepared.slots
    zero, one = content("red", key)
    first.view(prepared.slots, key).write(0, zero)
    assert list(answer(cluster, first, engine.Commit, prepared.write, (0,), 1, zero).codes) == [Code.RESERVED]
    assert match(cluster, writer, [key]).codes == bytes([Code.PENDING])
    second.view(prepared.slots, key).write(1, one)
    assert list(answer(cluster, second, engine.Commit, prepared.write, (0,), 2, one).codes) == [Code.COMMITTED]
    assert match(cluster, writer, [key]).checksums == zero + one


def test_a_slot_stays_with_the_process_that_still_fills_it() -> None:
    """The process that prepared dies while the other one writes its shard."""
    cluster = calm()
    writer = cluster.join(0, processes=2)
    cluster.run_for(0.01)
    prepared = prepare(cluster, writer, placed(cluster, 0, 1))
    second = writer.processes[1]
    answer(cluster, second, engine.Attach, prepared.write)
    writer.processes[0].die()
    cluster.run_for(1.0)
    cluster.check()
    place = unpack_slots(prepared.slots)[0]
    assert cluster.node(0).arena.regions[place.region].generations[place.slot] == place.generation
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [1]
    tell(cluster, second, engine.Abort(prepared.write))
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [0]


def test_a_late_commit_publishes_nothing_and_gives_back_what_it_names() -> None:
    cluster = calm()
    writer, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    prepared = prepare(cluster, writer, keys)
    cluster.run_for(cluster.rules["reservation_s"])
    again = prepare(cluster, other, keys)
    assert list(again.codes) == [Code.RESERVED] * 2
    places = set(unpack_slots(prepared.slots)) | set(unpack_slots(again.slots))
    assert len({(place.region, place.slot) for place in places}) == 4
    late = answer(cluster, writer.processes[0], engine.Commit, prepared.write, (0,), 3, bytes(16))
    assert list(late.codes) == [Code.EXPIRED]
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [1]
    writer.die()
    cluster.run_for(0.01)
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [0]


def test_four_segments_of_one_store_stay_together_on_sixteen_nodes() -> None:
    cluster = calm(16, dirty_share=1.0, session_reserve_share=1.0)
    writer = cluster.join(0)
    keys = list(
        itertools.chain(
            *(placed(cluster, directory_node, 0 if directory_node else 1)[:1] for directory_node in range(3, 11))
        )
    )
    store(cluster, writer, keys)
    owners = [[node for node, kind in kinds(cluster, key).items() if kind is Kind.PRIMARY] for key in keys]
    assert [len(nodes) for nodes in owners] == [1] * 8
    assert len({node for [node] in owners[:4]}) == len({node for [node] in owners[4:]}) == 1


def test_an_aborted_write_is_withdrawn_at_the_directory_node() -> None:
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 1, 0)
    prepared = prepare(cluster, writer, keys)
    cluster.run_for(0.01)
    assert match(cluster, reader, keys).codes == bytes([Code.PENDING])
    tell(cluster, writer.processes[0], engine.Abort(prepared.write))
    assert match(cluster, reader, keys).codes == bytes([Code.MISSING])


def test_a_newcomer_gets_the_region_of_a_tenant_that_left() -> None:
    cluster = calm(regions=2)
    red = cluster.join(0)
    store(cluster, red, placed(cluster, 0, 1, 3))
    while cluster.core(0).store.spare_regions:
        store(cluster, red, placed(cluster, 0, 1, 2, f"more {cluster.clock.now}"))
    red.die()
    cluster.run_for(0.01)
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(0.05)
    assert len(said(cluster, 0, ReplaceRegion)) == 1
    keys = placed(cluster, 0, 1)
    store(cluster, blue, keys)
    assert match(cluster, blue, keys).hits == 1
    assert not ask(red.processes[0], engine.Heartbeat)


def test_a_newcomer_takes_from_one_tenant_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region is emptied a part at a time, and each time a part of every tenant that left was evicted."""
    monkeypatch.setattr(store_module, "RECLAIM_EVICTIONS", 1)
    cluster = calm(1, regions=3, dirty_share=1.0, session_reserve_share=1.0)
    previous_owner = [cluster.join(0, tenant=tenant) for tenant in ("red", "blue", "grey")]
    for each in previous_owner:
        store(cluster, each, prompt("kept", SLOTS))
        each.die()
    cluster.run_for(0.01)
    newcomer = cluster.join(0, tenant="green")
    cluster.run_for(2.0)
    assert len(said(cluster, 0, ReplaceRegion)) == 1
    left = collections.Counter(segment.tenant for segment in cluster.core(0).store.segments())
    assert list(left.values()) == [SLOTS, SLOTS]
    store(cluster, newcomer, prompt("new", 1))
    assert match(cluster, newcomer, prompt("new", 1)).hits == 1


def test_a_key_that_comes_twice_in_one_prepare_leaks_nothing() -> None:
    """The first is here, the next takes its slot, the last finds it gone: nothing stays reserved by nobody."""
    cluster = calm(1, regions=1, dirty_share=1.0, session_reserve_share=1.0)
    writer = cluster.join(0)
    cluster.run_for(0.01)
    keys = prompt("twice", 40)
    codes = prepare(cluster, writer, keys).codes
    room = codes.count(Code.RESERVED)
    writer.die()
    cluster.run_for(0.01)
    writer = cluster.join(0)
    store(cluster, writer, keys[:room])
    reply = prepare(cluster, writer, [keys[0], *keys[room : 2 * room], keys[0]])
    assert reply.codes[0] == Code.EXISTS
    assert Code.RESERVED in reply.codes
    tell(cluster, writer.processes[0], engine.Abort(reply.write))
    cluster.check()
    assert cluster.core(0).idle()


def test_parents_are_evicted_last_wherever_the_copies_are() -> None:
    """At the owner that pulled them and at the writer that keeps cached copies; of one store."""
    cluster = calm(regions=4, dirty_share=1.0, session_reserve_share=1.0)
    writer = cluster.join(0)
    cluster.run_for(0.01)
    keys = placed(cluster, 1, 2, 3)
    prepared = prepare(cluster, writer, keys)
    checksums = b""
    for index, key in enumerate(keys):
        view = writer.processes[0].view(prepared.slots[index * SLOT_BYTES : (index + 1) * SLOT_BYTES], key)
        for shard, data in enumerate(content("red", key)):
            view.write(shard, data)
            checksums += data
    answer(cluster, writer.processes[0], engine.Commit, prepared.write, (0, 1, 2), 3, checksums)
    cluster.run_for(0.5)
    for node in (0, 1, 2):
        for kind in (Kind.CACHED, Kind.PRIMARY):
            for pool in cluster.core(node).store.pools():
                order = list(pool.order[kind])
                depths = [segment.depth for segment in order if segment.key in keys]
                assert depths == sorted(depths, reverse=True), f"{kind.name} copies of node {node}"


def test_who_lost_a_race_knows_who_won_it() -> None:
    """When the winner dies, the copy of the loser is found."""
    cluster = calm()
    writers = [cluster.join(0), cluster.join(1)]
    key = placed(cluster, 2, 0)[0]
    cluster.run_for(0.01)
    for writer in writers:
        writer.store([key], 0, Storing(fill_s=0.01))
    cluster.run_for(0.5)
    held = copies(cluster, key)
    sources = {node: segment.source for node, segment in held.items() if segment.kind is Kind.CACHED}
    assert sources
    assert None not in sources.values()
