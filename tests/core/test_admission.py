"""What is not worth storing: refused before its bytes travel, found where it was written, placed again when it is read.

Two nodes, full of what another prompt stored; their policy refuses a key as often as it is told to.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.scenes import answer, calm, copies, fetch, kinds, match, placed, said, store, tell
from tests.sim.cluster import Cluster
from tokenlake.core.instructions import StartFetch
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import Kind
from tokenlake.store.eviction import POLICIES, LeastRecentlyUsed
from tokenlake.store.store import NOT_ADMITTED_RULE_NAME
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

REFUSALS: Counter[SegmentKey] = Counter()
"""How often a key is refused yet."""


class Choosy(LeastRecentlyUsed):
    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        REFUSALS[key] -= 1
        return REFUSALS[key] < 0


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two full nodes."""
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


def test_what_is_refused_does_not_travel_and_stays_cached_where_it_was_written(full: Cluster) -> None:
    keys = placed(full, 1, 0, 2, "not_admitted")
    for key in keys:
        REFUSALS[key] = 99
    before = len(said(full, 1, StartFetch))
    store(full, full.engines[0], keys)
    assert len(said(full, 1, StartFetch)) == before
    for key in keys:
        assert kinds(full, key) == {0: Kind.CACHED}
        assert copies(full, key)[0].source is None
    refused = sum(full.core(node).counters[NOT_ADMITTED_RULE_NAME] for node in (0, 1))
    assert refused == 2
    offered = [code for reply in said(full, 1, peer.OfferReply) for code in reply.codes]
    assert full.core(1).counters[NOT_ADMITTED_RULE_NAME] == offered.count(Code.NOT_ADMITTED)


def test_others_find_what_was_refused_until_it_is_evicted(full: Cluster) -> None:
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


def test_what_was_refused_comes_back_to_whoever_remembers_it(full: Cluster) -> None:
    keys = placed(full, 1, 0, 4, "not_admitted") + placed(full, 0, 1, 4, "unworthy as well")
    for index, key in enumerate(keys):
        REFUSALS[key] = 1
        store(full, full.engines[index % 2], [key])
    for turn in range(12):
        store(full, full.engines[0], placed(full, 0, 1, 2, f"later {turn}"))
        store(full, full.engines[1], placed(full, 1, 0, 2, f"later too {turn}"))
    refusers: list[int] = []
    for key in keys:
        assert kinds(full, key) == {}
        directory_node = full.core(0)._context.ring.candidates(key)[0][0]
        previous_owner = full.core(int(directory_node[1:]))._directory_node._directory.previous_owner(
            TenantId("red"), key
        )
        assert previous_owner is not None
        refusers.append(int(previous_owner[1:]))
        store(full, full.engines[0], [key])
        owners = [node for node, kind in kinds(full, key).items() if kind is Kind.PRIMARY]
        assert owners == refusers[-1:]
    assert set(refusers) == {0, 1}


def test_what_was_refused_is_placed_again_when_it_is_read(full: Cluster) -> None:
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


def test_a_read_by_another_node_counts_as_well(full: Cluster) -> None:
    key = placed(full, 1, 0, 1, "not_admitted")[0]
    REFUSALS[key] = 1
    store(full, full.engines[0], [key])
    found = match(full, full.engines[1], [key])
    fetch(full, full.engines[1], found.lease, 1)
    tell(full, full.engines[1].processes[0], engine.Release(((found.lease, 0, 1),)))
    full.run_for(1.0)
    assert list(kinds(full, key).values()).count(Kind.PRIMARY) == 1
    full.check()


def test_a_pool_with_a_free_slot_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    cluster = calm(2, regions=4, eviction="choosy")
    writer = cluster.join(0)
    keys = placed(cluster, 1, 0, 4)
    for key in keys:
        REFUSALS[key] = 99
    store(cluster, writer, keys)
    assert all(Kind.PRIMARY in kinds(cluster, key).values() for key in keys)
    assert sum(cluster.core(node).counters[NOT_ADMITTED_RULE_NAME] for node in (0, 1)) == 0


def test_a_node_alone_keeps_what_is_worth_more_and_reads_the_rest_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    REFUSALS.clear()
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    cluster = calm(1, regions=1, eviction="choosy")
    writer = cluster.join(0)
    for turn in range(12):
        store(cluster, writer, [SegmentKey(bytes([turn + 1]) * 32)])
    directory_nodes = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    key = SegmentKey(bytes(32))
    REFUSALS[key] = 99
    store(cluster, writer, [key])
    assert kinds(cluster, key) == {0: Kind.CACHED}
    asked = answer(cluster, writer.processes[0], engine.Match, join_keys([key]), 0.0)
    assert asked.hits == 1
    # It cost one of the others at most, and the next to be refused takes its place.
    tell(cluster, writer.processes[0], engine.Release(((asked.lease, 0, 1),)))
    other = SegmentKey(b"\xff" * 32)
    REFUSALS[other] = 99
    store(cluster, writer, [other])
    kept = [s.key for s in cluster.core(0).store.segments() if s.kind is Kind.PRIMARY]
    assert len(kept) >= len(directory_nodes) - 1
    assert kinds(cluster, key) == {}
