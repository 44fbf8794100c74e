"""The owner of a segment: duplicates and admission."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.scenes import calm, copies, fetch, kinds, match, placed, release, said, store, stored, tell
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.core import context, events
from tokenlake.core.cluster.owner import DUPLICATES
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind
from tokenlake.memory.eviction import LeastRecentlyUsed
from tokenlake.memory.store import NOT_ADMITTED
from tokenlake.wire import Code, engine, peer

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
        release(cluster, reader, found.lease, 1)
    cluster.run_for(1.0)
    return Code(found.codes[0])


def test_a_redundant_cached_copy_stays() -> None:
    """A `Redundant` message that comes again, or about a copy that a fetch brought, changes nothing."""
    cluster, reader, (key,) = stored(pair=(1, 2), nodes=4, reader=3)
    assert read(cluster, reader, key) is Code.REMOTE
    cluster.node(3).deliver(events.PeerSent("n1", peer.Redundant("red", key, ("n2",))))
    cached = copies(cluster, key)[3]
    assert (cached.kind, cached.source) == (Kind.CACHED, "n0")
    assert cluster.core(3).counters[DUPLICATES] == 0


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
        assert cluster.core(0).counters[NOT_ADMITTED] == 1, "a read of a refused copy is no further refusal"
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
    store(cluster, engines[0], keys)
    assert [kinds(cluster, key)[0] for key in keys] == [Kind.PRIMARY, Kind.PRIMARY, Kind.CACHED]
    assert match(cluster, engines[1], keys).hits == 3
