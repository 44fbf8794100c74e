"""Orders of an operator: eviction by key, by size and of a whole tenant."""

from __future__ import annotations

from tests.core.scenes import calm, fetch, match, placed, prepare, said, store, stored
from tests.sim.cluster import Cluster
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.instructions import EvictionDone
from tokenlake.memory.removals import OPERATOR_RULE
from tokenlake.wire import Code, peer
from tokenlake.wire.slots import join_keys, split_keys


def evict(cluster: Cluster, keys: bytes, slot_bytes: int = 0, tenant: str = "red") -> tuple[int, int]:
    before = len(said(cluster, 0, EvictionDone))
    cluster.node(0).deliver(events.EvictRequested(before, tenant, keys, slot_bytes))
    cluster.run_for(1.0)
    (done,) = said(cluster, 0, EvictionDone)[before:]
    cluster.check()
    return done.evicted, done.kept


def test_named_segments_leave_and_their_directory_node_is_told() -> None:
    cluster, _, keys = stored(3, pair=(1, 2))
    assert evict(cluster, join_keys([*keys[1:], keys[1]])) == (2, 0), "a segment that is named twice leaves once"
    told = [each for each in said(cluster, 0, peer.Evicted) if each.rule == OPERATOR_RULE]
    assert {key for each in told for key in split_keys(each.keys)} == set(keys[1:])
    assert match(cluster, cluster.join(2), keys).hits == 1


def test_a_whole_tenant_or_one_size_leaves() -> None:
    cluster, _, _ = stored(4, pair=(1, 2))
    (size,) = {segment.slot_bytes for segment in cluster.core(0).store.segments()}
    assert evict(cluster, b"", size + 1) == (0, 0)
    assert evict(cluster, b"", tenant="blue") == (0, 0)
    assert evict(cluster, b"", size) == (4, 0)
    assert cluster.core(0).census()["ordered evictions"] == 0


def test_segments_in_use_are_not_evicted() -> None:
    """A segment that is read keeps its bytes, and one being written stays."""
    cluster = calm()
    known, fresh = placed(cluster, 1, 2, 2)[:1], placed(cluster, 1, 2, 2)[1:]
    store(cluster, cluster.join(0), known)
    reader = cluster.join(0)
    reply = match(cluster, reader, known)
    assert prepare(cluster, cluster.join(0), fresh).codes[0] == Code.RESERVED
    assert evict(cluster, b"") == (1, 1)
    (pool,) = cluster.core(0).store.pools()
    assert pool.quarantined >= 1
    assert fetch(cluster, reader, reply.lease, 1).codes[0] in (Code.LOCAL, Code.LOST)


def test_a_segment_in_memory_and_on_disk_counts_once() -> None:
    cluster = calm(1, disk_places=40)
    writer = cluster.join(0)
    for number in range(4):
        store(cluster, writer, prompt(f"fill-{number}", 4))
        cluster.run_for(1.0)
    twice = [segment.key for segment in cluster.core(0).store.segments() if segment.disk >= 0]
    assert twice
    assert evict(cluster, join_keys(twice)) == (len(twice), 0)
    assert match(cluster, writer, twice[:1]).hits == 0
