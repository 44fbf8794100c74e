"""The owner of a new segment: offers, refusals, races between writers, and segments that no node admits."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.core.scenes import answer, calm, copies, fetch, kinds, match, placed, prepare, said, store, tell
from tests.sim.arena import SHARDS, content
from tests.sim.cluster import Cluster
from tests.sim.engine import Storing
from tests.sim.prompts import prompt
from tokenlake.core.instructions import StartFetch
from tokenlake.core.ownership import DUPLICATES
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import Kind
from tokenlake.store.eviction import POLICIES, LeastRecentlyUsed
from tokenlake.store.store import NOT_ADMITTED
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SLOT_BYTES, join_keys

REFUSALS: Counter[SegmentKey] = Counter()
"""Per key, how many more times the policy refuses it."""


class Choosy(LeastRecentlyUsed):
    """Refuses a key as often as `REFUSALS` says."""

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        REFUSALS[key] -= 1
        return REFUSALS[key] < 0


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two nodes without a free slot, whose policy refuses keys by `REFUSALS`."""
    REFUSALS.clear()
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    cluster = calm(2, regions=3, eviction="choosy")
    engines = [cluster.join(0), cluster.join(1)]
    cluster.run_for(0.01)
    for turn in range(12):
        for node, writer in enumerate(engines):
            store(cluster, writer, placed(cluster, node, 1 - node, 2, f"crowd {node} {turn}"))
    for node in (0, 1):
        assert not any(pool.free for pool in cluster.core(node).store.pools())
    cluster.run_for(1.0)
    return cluster


def test_the_emptier_candidate_pulls_and_owns() -> None:
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


def test_a_refused_offer_makes_the_writer_the_owner() -> None:
    """The one region of each candidate belongs to another tenant."""
    cluster = calm(regions=1)
    for node in (1, 2):
        cluster.join(node, tenant="blue")
    cluster.run_for(0.01)
    writer, reader = cluster.join(0), cluster.join(1)
    key = placed(cluster, 1, 2)[0]
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.PRIMARY}
    assert [list(reply.codes) for reply in said(cluster, 2, peer.OfferReply)] in ([], [[Code.NO_REGION]])
    # A node without a region for the tenant can lease nothing, though the directory node names the owner.
    assert match(cluster, reader, [key]).codes == bytes([Code.SESSION_LIMIT])


def test_the_first_of_two_commits_wins() -> None:
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


def test_the_later_commit_has_the_first_as_its_source() -> None:
    """The source of the cached copy is the owner, so that the copy becomes the primary copy when the owner dies."""
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


def test_owners_on_two_sides_of_a_cut_become_one() -> None:
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


def test_sequences_of_four_have_one_owner_on_16_nodes() -> None:
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


@pytest.mark.parametrize("nodes", [1, 3])
def test_parents_are_evicted_last_at_writer_and_owner(nodes: int) -> None:
    cluster = calm(nodes, regions=4, dirty_share=1.0, session_reserve_share=1.0)
    writer = cluster.join(0)
    cluster.run_for(0.01)
    keys = placed(cluster, 1, 2, 3) if nodes > 1 else prompt("parents", 3)
    prepared = prepare(cluster, writer, keys)
    checksums = b""
    for index, key in enumerate(keys):
        view = writer.processes[0].view(prepared.slots[index * SLOT_BYTES : (index + 1) * SLOT_BYTES], key)
        for shard, data in enumerate(content("red", key)):
            view.write(shard, data)
            checksums += data
    answer(cluster, writer.processes[0], engine.Commit, prepared.write, (0, 1, 2), 3, checksums)
    cluster.run_for(0.5)
    for node in range(nodes):
        for kind in (Kind.CACHED, Kind.PRIMARY):
            for pool in cluster.core(node).store.pools():
                order = list(pool.orders[kind])
                depths = [segment.depth for segment in order if segment.key in keys]
                assert depths == sorted(depths, reverse=True), f"{kind.name} copies of node {node}"


# -- admission


def test_a_refused_segment_is_not_sent_and_stays_cached(full: Cluster) -> None:
    keys = placed(full, 1, 0, 2, "not_admitted")
    for key in keys:
        REFUSALS[key] = 99
    before = len(said(full, 1, StartFetch))
    store(full, full.engines[0], keys)
    assert len(said(full, 1, StartFetch)) == before
    for key in keys:
        assert kinds(full, key) == {0: Kind.CACHED}
        assert copies(full, key)[0].source is None
    refused = sum(full.core(node).counters[NOT_ADMITTED] for node in (0, 1))
    assert refused == 2
    offered = [code for reply in said(full, 1, peer.OfferReply) for code in reply.codes]
    assert full.core(1).counters[NOT_ADMITTED] == offered.count(Code.NOT_ADMITTED)


def test_a_refused_segment_is_found_until_evicted(full: Cluster) -> None:
    key = placed(full, 1, 0, 1, "not_admitted")[0]
    REFUSALS[key] = 99
    store(full, full.engines[0], [key])
    found = match(full, full.engines[1], [key])
    assert found.codes == bytes([Code.REMOTE])
    tell(full, full.engines[1].processes[0], engine.Release(((found.lease, 0, 1),)))
    for turn in range(12):
        store(full, full.engines[0], placed(full, 0, 1, 2, f"later {turn}"))
    assert kinds(full, key) == {}
    assert match(full, full.engines[1], [key]).codes == bytes([Code.MISSING])


def test_a_later_commit_goes_to_the_previous_owner(full: Cluster) -> None:
    keys = placed(full, 1, 0, 4, "not_admitted") + placed(full, 0, 1, 4, "not admitted either")
    for index, key in enumerate(keys):
        REFUSALS[key] = 1
        store(full, full.engines[index % 2], [key])
    for turn in range(12):
        store(full, full.engines[0], placed(full, 0, 1, 2, f"later {turn}"))
        store(full, full.engines[1], placed(full, 1, 0, 2, f"later {turn}, n1"))
    refusers: list[str] = []
    for key in keys:
        assert kinds(full, key) == {}
        store(full, full.engines[0], [key])
        previous_owner = copies(full, key)[0].previous_owner
        assert previous_owner is not None
        refusers.append(previous_owner)
        assert full.keepers()[TenantId("red"), key] == refusers[-1:]
    assert set(refusers) == {"n0", "n1"}


def test_a_read_places_a_refused_segment_again(full: Cluster) -> None:
    key = placed(full, 1, 0, 1, "not_admitted")[0]
    REFUSALS[key] = 2
    store(full, full.engines[0], [key])
    for _ in range(2):
        assert kinds(full, key) == {0: Kind.CACHED}
        found = match(full, full.engines[0], [key])
        assert found.codes == bytes([Code.LOCAL])
        tell(full, full.engines[0].processes[0], engine.Release(((found.lease, 0, 1),)))
        full.run_for(0.5)
    held = kinds(full, key)
    assert list(held.values()).count(Kind.PRIMARY) == 1
    full.check()


def test_a_remote_read_places_a_refused_segment_again(full: Cluster) -> None:
    key = placed(full, 1, 0, 1, "not_admitted")[0]
    REFUSALS[key] = 1
    store(full, full.engines[0], [key])
    found = match(full, full.engines[1], [key])
    fetch(full, full.engines[1], found.lease, 1)
    tell(full, full.engines[1].processes[0], engine.Release(((found.lease, 0, 1),)))
    full.run_for(1.0)
    assert list(kinds(full, key).values()).count(Kind.PRIMARY) == 1
    full.check()


def test_free_slots_admit_every_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    cluster = calm(2, regions=4, eviction="choosy")
    writer = cluster.join(0)
    keys = placed(cluster, 1, 0, 4)
    for key in keys:
        REFUSALS[key] = 99
    store(cluster, writer, keys)
    assert all(Kind.PRIMARY in kinds(cluster, key).values() for key in keys)
    assert sum(cluster.core(node).counters[NOT_ADMITTED] for node in (0, 1)) == 0


def test_a_single_node_evicts_refused_segments_first(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    cluster = calm(1, regions=1, eviction="choosy")
    writer = cluster.join(0)
    for turn in range(12):
        store(cluster, writer, [SegmentKey(bytes([turn + 1]) * 32)])
    before = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    key = SegmentKey(bytes(32))
    REFUSALS[key] = 99
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.CACHED}
    asked = answer(cluster, writer.processes[0], engine.Match, join_keys([key]), 0.0)
    assert asked.hits == 1
    # The refused segment evicted one of the others at most, and the next refused segment takes its slot.
    tell(cluster, writer.processes[0], engine.Release(((asked.lease, 0, 1),)))
    other = SegmentKey(b"\xff" * 32)
    REFUSALS[other] = 99
    store(cluster, writer, [other])
    kept = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    assert len(kept) >= len(before) - 1
    assert kinds(cluster, key) == {}
