"""The owner of a segment: commits, duplicates, admission, and the order of eviction."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.scenes import answer, calm, copies, fetch, kinds, match, placed, prepare, said, store, tell
from tests.sim.arena import SHARDS, content
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tests.sim.prompts import prompt
from tokenlake.core import context, events
from tokenlake.core.cluster.owner import DUPLICATES
from tokenlake.core.instructions import StartFetch
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind
from tokenlake.memory.eviction import LeastRecentlyUsed
from tokenlake.memory.store import NOT_ADMITTED
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SLOT_BYTES

REFUSALS: Counter[SegmentKey] = Counter()
"""Per key, how many more times the policy refuses it."""


class Choosy(LeastRecentlyUsed):
    """Refuses a key as often as `REFUSALS` says."""

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        REFUSALS[key] -= 1
        return REFUSALS[key] < 0


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, list[Engine]]:
    """Two nodes without a free slot, whose policy refuses keys by `REFUSALS`, and an engine at each."""
    REFUSALS.clear()
    monkeypatch.setattr(context, "Forecast", Choosy)
    cluster = calm(2, regions=3)
    engines = [cluster.join(0), cluster.join(1)]
    cluster.run_for(0.01)
    for turn in range(12):
        for node, writer in enumerate(engines):
            store(cluster, writer, placed(cluster, node, 1 - node, 2, f"crowd {node} {turn}"))
    for node in (0, 1):
        assert not any(pool.free for pool in cluster.core(node).store.pools())
    cluster.run_for(1.0)
    return cluster, engines


def read(cluster: Cluster, reader: Engine, key: SegmentKey) -> Code:
    """Match and release one segment, fetch it where it is elsewhere, and let the reports of reads arrive. The code of
    the match."""
    found = match(cluster, reader, [key])
    if found.hits:
        fetch(cluster, reader, found.lease, 1)
        tell(cluster, reader.processes[0], engine.Release(((found.lease, 0, 1),)))
    cluster.run_for(1.0)
    return Code(found.codes[0])


# -- commits


def test_the_writer_owns_what_it_commits() -> None:
    """No bytes travel, and the directory node names the writer."""
    cluster = calm(4)
    writer, reader = cluster.join(0), cluster.join(3)
    keys = [*placed(cluster, 1, 2, 2), *placed(cluster, 0, 1, 2)]
    store(cluster, writer, keys)
    for key in keys:
        assert kinds(cluster, key) == {0: Kind.PRIMARY}
        place = copies(cluster, key)[0].place
        assert [cluster.node(0).arena.read(place, shard) for shard in range(SHARDS)] == list(content("red", key))
    assert not any(said(cluster, node, kind) for node in range(4) for kind in (StartFetch, peer.Offer))
    assert [message.keys for message in said(cluster, 0, peer.Owned)] == [b"".join(keys[:2])]
    reply = match(cluster, reader, keys)
    assert reply.codes == bytes([Code.REMOTE]) * 4
    owners = answer(cluster, reader.processes[0], engine.Locate, reply.lease)
    assert {owners.nodes[owner] for owner in owners.owners} == {"n0"}


@pytest.mark.parametrize("nodes", [1, 3])
def test_parents_are_evicted_last(nodes: int) -> None:
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
    (pool,) = cluster.core(0).store.pools()
    assert [segment.key for segment in pool.orders[Kind.PRIMARY]] == keys[::-1]


# -- duplicates


def test_the_first_of_two_commits_wins() -> None:
    """The later writer keeps a cached copy whose source is the owner."""
    cluster = calm()
    writers = [cluster.join(0), cluster.join(1)]
    keys = placed(cluster, 2, 0, 2)
    cluster.run_for(0.01)
    for writer in writers:
        writer.store(keys, 0, Storing(fill_s=0.01))
    cluster.run_for(0.5)
    assert sum(cluster.core(node).counters[DUPLICATES] for node in (0, 1)) == 2
    for key in keys:
        assert sorted(kinds(cluster, key).values()) == [Kind.CACHED, Kind.PRIMARY]
        ((owner, _),) = (each for each in copies(cluster, key).items() if each[1].kind is Kind.PRIMARY)
        (cached,) = (segment for segment in copies(cluster, key).values() if segment.kind is Kind.CACHED)
        assert cached.source == f"n{owner}"
    cluster.check()


def test_the_directory_nodes_own_duplicate_becomes_a_cached_copy() -> None:
    """The later writer is the directory node itself: it learns of the owner without a message."""
    cluster = calm()
    writers = [cluster.join(0), cluster.join(2)]
    (key,) = placed(cluster, 2, 1)
    cluster.run_for(0.01)
    writers[1].store([key], 0, Storing(fill_s=0.05))
    writers[0].store([key], 0, Storing(fill_s=0.01))
    cluster.run_for(0.5)
    assert kinds(cluster, key) == {0: Kind.PRIMARY, 2: Kind.CACHED}
    assert copies(cluster, key)[2].source == "n0"
    assert not said(cluster, 2, peer.Redundant)
    assert cluster.core(2).counters[DUPLICATES] == 1


def test_a_redundant_cached_copy_stays() -> None:
    """A `Redundant` message that comes again, or about a copy that a fetch brought, changes nothing."""
    cluster = calm(4)
    writer, reader = cluster.join(0), cluster.join(3)
    (key,) = placed(cluster, 1, 2)
    store(cluster, writer, [key])
    assert read(cluster, reader, key) is Code.REMOTE
    cluster.node(3).deliver(events.PeerSent("n1", peer.Redundant("red", key, ("n2",))))
    cached = copies(cluster, key)[3]
    assert (cached.kind, cached.source) == (Kind.CACHED, "n0")
    assert cluster.core(3).counters[DUPLICATES] == 0


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
    cluster.settle()
    cluster.check_settled()


# -- admission


def test_a_refused_segment_is_found_until_evicted(full: tuple[Cluster, list[Engine]]) -> None:
    """A refused segment stays cached and is found until evicted."""
    cluster, engines = full
    (key,) = placed(cluster, 1, 0, 1, "not_admitted")
    REFUSALS[key] = 99
    store(cluster, engines[0], [key])
    assert kinds(cluster, key) == {0: Kind.CACHED}
    assert copies(cluster, key)[0].source is None
    assert copies(cluster, key)[0].owned
    assert cluster.core(0).counters[NOT_ADMITTED] == 1
    assert cluster.core(1).counters[NOT_ADMITTED] == 0
    found = match(cluster, engines[1], [key])
    assert found.codes == bytes([Code.REMOTE])
    tell(cluster, engines[1].processes[0], engine.Release(((found.lease, 0, 1),)))
    for turn in range(12):
        store(cluster, engines[0], placed(cluster, 0, 1, 2, f"later {turn}"))
    assert kinds(cluster, key) == {}
    evicted = [message.keys for message in said(cluster, 0, peer.Evicted)]
    assert b"".join(evicted).count(key) == 1
    assert match(cluster, engines[1], [key]).codes == bytes([Code.MISSING])


@pytest.mark.parametrize("reader", [0, 1], ids=["at the owner", "at another node"])
def test_a_read_admits_a_refused_segment(full: tuple[Cluster, list[Engine]], reader: int) -> None:
    """The policy is asked again at each read; reads at other nodes are reported to the owner."""
    cluster, engines = full
    (key,) = placed(cluster, 1, 0, 1, "not_admitted")
    REFUSALS[key] = 2
    store(cluster, engines[0], [key])
    for _ in range(2):
        assert kinds(cluster, key)[0] is Kind.CACHED
        assert read(cluster, engines[reader], key) in (Code.LOCAL, Code.REMOTE)
    assert kinds(cluster, key)[0] is Kind.PRIMARY
    assert list(kinds(cluster, key).values()).count(Kind.PRIMARY) == 1
    assert cluster.keepers()[TenantId("red"), key] == ["n0"]
    cluster.check()


def test_of_a_prompt_the_first_segments_are_admitted(
    full: tuple[Cluster, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that admits two of three segments: the later one is of no use without the first ones."""
    cluster, engines = full
    admissions = iter((True, True, False))
    monkeypatch.setattr(Choosy, "admits", lambda self, key, hints, now: next(admissions))
    keys = placed(cluster, 1, 0, 3, "in part")
    prepared = prepare(cluster, engines[0], keys)
    assert prepared.codes == bytes([Code.RESERVED]) * 3
    fields = prepared.write, (0, 1, 2), 3, b"".join(b"".join(content("red", key)) for key in keys)
    for index, key in enumerate(keys):
        view = engines[0].processes[0].view(prepared.slots[index * SLOT_BYTES : (index + 1) * SLOT_BYTES], key)
        for shard, data in enumerate(content("red", key)):
            view.write(shard, data)
    answer(cluster, engines[0].processes[0], engine.Commit, *fields)
    assert [kinds(cluster, key)[0] for key in keys] == [Kind.PRIMARY, Kind.PRIMARY, Kind.CACHED]
    cluster.run_for(0.1)
    assert match(cluster, engines[1], keys).hits == 3


def test_free_slots_admit_every_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setattr(context, "Forecast", Choosy)
    cluster = calm(2, regions=4)
    writer = cluster.join(0)
    keys = placed(cluster, 1, 0, 4)
    for key in keys:
        REFUSALS[key] = 99
    store(cluster, writer, keys)
    assert all(kinds(cluster, key) == {0: Kind.PRIMARY} for key in keys)
    assert sum(cluster.core(node).counters[NOT_ADMITTED] for node in (0, 1)) == 0


def test_refused_segments_are_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setattr(context, "Forecast", Choosy)
    cluster = calm(1, regions=1)
    writer = cluster.join(0)
    for turn in range(12):
        store(cluster, writer, [SegmentKey(bytes([turn + 1]) * 32)])
    before = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    key = SegmentKey(bytes(32))
    REFUSALS[key] = 99
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.CACHED}
    # The refused segment evicted one of the others at most, and the next refused segment takes its slot.
    other = SegmentKey(b"\xff" * 32)
    REFUSALS[other] = 99
    store(cluster, writer, [other])
    kept = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    assert len(kept) >= len(before) - 1
    assert kinds(cluster, key) == {}
