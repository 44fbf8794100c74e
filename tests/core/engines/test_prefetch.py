"""Prefetches: segments that come before their request."""

from __future__ import annotations

from collections.abc import Sequence

from tests.core.scenes import answer, calm, copies, match, placed, said, store, stored
from tests.core.test_disk import on_disk
from tests.sim.arena import SHARDS, SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.engines.prefetch import MAX_PREFETCHES, PREFETCH_SHARE, PREFETCHED
from tokenlake.core.instructions import PrefetchDone, StartFetch
from tokenlake.identity import SegmentKey
from tokenlake.memory import Kind
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys


def prefetch(
    cluster: Cluster, node: int, keys: Sequence[SegmentKey], *, source: str = "", pin_s: float = 0.0, wait: float = 0.5
) -> list[Code]:
    """The codes of a prefetch at a node."""
    before = len(said(cluster, node, PrefetchDone))
    packed = join_keys(list(keys))
    event = events.PrefetchRequested(before, "red", packed, SLOT_BYTES, SHARDS, source=source, pin_s=pin_s)
    cluster.node(node).deliver(event)
    cluster.run_for(wait)
    (done,) = said(cluster, node, PrefetchDone)[before:]
    assert done.request == before
    assert cluster.core(node).census()["prefetches"] == 0
    cluster.check()
    return [Code(code) for code in done.codes]


def outcomes(cluster: Cluster, node: int) -> dict[str, int]:
    counted = cluster.core(node).counters.by_labels(PREFETCHED)
    return {outcome: count for (_, outcome), count in counted.items() if count}


def test_segments_come_before_the_request() -> None:
    cluster, reader, keys = stored(3, pair=(1, 2))
    nowhere = prompt("nowhere", 1)
    assert prefetch(cluster, 2, [*keys, *nowhere]) == [Code.LOCAL] * 3 + [Code.MISSING]
    assert {copies(cluster, key)[2].kind for key in keys} == {Kind.CACHED}
    assert outcomes(cluster, 2) == {"brought": 3, "missing": 1}
    fetches = len(said(cluster, 2, StartFetch))
    assert [Code(code) for code in match(cluster, reader, keys).codes] == [Code.LOCAL] * 3
    assert len(said(cluster, 2, StartFetch)) == fetches
    assert prefetch(cluster, 2, keys) == [Code.LOCAL] * 3
    assert outcomes(cluster, 2)["here"] == 3
    assert cluster.core(0).census()["leases to peers"] == 0


def test_an_engine_asks() -> None:
    cluster, reader, keys = stored(2, pair=(1, 2))
    told = answer(cluster, reader.processes[0], engine.Prefetch, join_keys(keys))
    assert told.codes == bytes([Code.LOCAL] * 2)
    assert all(2 in copies(cluster, key) for key in keys)
    reader.processes[0].request(lambda number: engine.Prefetch(number, join_keys(keys)), lambda reply: None)
    reader.die()
    cluster.run_for(0.2)
    cluster.check()


def test_a_named_source_is_asked_without_a_lookup() -> None:
    """A node that a router names has the segments, although no directory node answers. A wrong name costs a lookup."""
    cluster, _, keys = stored(2, pair=(1, 2), nodes=4, reader=3)
    cluster.node(1).freeze()
    cluster.node(2).freeze()
    assert prefetch(cluster, 3, keys[:1], source="n0") == [Code.LOCAL]
    cluster.node(1).thaw()
    cluster.node(2).thaw()
    cluster.run_for(1.0)
    for wrong in ("n1", "n3", "nobody"):
        assert prefetch(cluster, 3, keys[1:], source=wrong) == [Code.LOCAL]
        cluster.node(3).deliver(events.EvictRequested(9, "red", keys[1]))


def test_pinned_as_far_as_there_is_room() -> None:
    """What could not be pinned is not brought."""
    cluster, _, keys = stored(4, pair=(1, 2), regions=1, pinned_share=0.15)
    codes = prefetch(cluster, 2, keys, pin_s=60.0)
    count = codes.count(Code.LOCAL)
    assert 0 < count < 4
    assert codes == [Code.LOCAL] * count + [Code.QUOTA] * (4 - count)
    assert cluster.core(2).census()["pinned segments"] == count
    assert [2 in copies(cluster, key) for key in keys] == [True] * count + [False] * (4 - count)
    assert prefetch(cluster, 2, keys[:count], pin_s=60.0) == [Code.LOCAL] * count


def test_a_prefetch_displaces_little() -> None:
    cluster = calm(2, regions=1)
    far, near = cluster.join(0), cluster.join(1)
    keys = prompt("far", 7)
    store(cluster, far, keys)
    for number in range(6):
        store(cluster, near, prompt(f"near-{number}", 4))
    store_, (pool,) = cluster.core(1).store, cluster.core(1).store.pools()
    before = store_.pool(*pool.id).counts[Kind.PRIMARY]  # type: ignore[union-attr]
    codes = prefetch(cluster, 1, keys)
    assert Code.NO_SLOT in codes
    assert pool.counts[Kind.PRIMARY] >= before - max(2, int(PREFETCH_SHARE * pool.slots))


def test_a_silent_owner_and_a_dead_one_end_it() -> None:
    cluster, _, keys = stored(2, pair=(1, 2))
    cluster.node(0).freeze()
    assert Code.LOCAL not in prefetch(cluster, 2, keys, wait=3.0)
    assert set(outcomes(cluster, 2)) <= {"lost", "missing"}


def test_too_many_prefetches_are_refused() -> None:
    cluster, _, keys = stored(1, pair=(1, 2))
    cluster.node(0).freeze()
    for number in range(MAX_PREFETCHES + 1):
        cluster.node(2).deliver(events.PrefetchRequested(number, "red", keys[0], SLOT_BYTES, SHARDS))
    refused = said(cluster, 2, PrefetchDone)
    assert [each.codes for each in refused] == [bytes([Code.SESSION_LIMIT])]
    cluster.node(0).thaw()
    cluster.run_for(3.0)
    assert cluster.core(2).census()["prefetches"] == 0
    cluster.check()


def test_segments_on_disk_are_read() -> None:
    cluster = calm(1, disk_places=60)
    writer = cluster.join(0)
    stored_ = [prompt(f"fill-{number}", 4) for number in range(12)]
    for keys in stored_:
        store(cluster, writer, keys)
        cluster.run_for(1.0)
    alone = [key for keys in stored_ for key in keys if on_disk(cluster, 0, [key]) and 0 not in copies(cluster, key)]
    assert prefetch(cluster, 0, alone[:1]) == [Code.LOCAL]
    assert 0 in copies(cluster, alone[0])


def test_a_tenant_without_memory_is_refused() -> None:
    cluster = calm(1)
    keys = placed(cluster, 0, 0, 1) or prompt("p", 1)
    event = events.PrefetchRequested(7, "blue", join_keys(keys), 1 << 40, SHARDS)
    cluster.node(0).deliver(event)
    cluster.run_for(0.2)
    (done,) = said(cluster, 0, PrefetchDone)
    assert done.codes == bytes([Code.NO_REGION])
