"""Statistics of the eviction policy, exchanged between nodes."""

from __future__ import annotations

from tests.core.scenes import calm
from tests.sim import arena
from tokenlake.core import NodeCore, events, instructions
from tokenlake.core.cluster.learned import SEND_S, Learned
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, CoreConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import NO_HINTS
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId, Segment
from tokenlake.wire import peer

RED = TenantId("red")
SLOT_BYTES = 1024


def test_nodes_exchange_their_statistics() -> None:
    """One node sees a segment used again and again. The other has seen no re-use, and learns it from the statistics of
    the first."""
    cluster = calm(2)
    stores = [cluster.core(node).store for node in (0, 1)]
    pools = [store.pool(RED, arena.SLOT_BYTES) for store in stores]
    assert pools[0] is not None
    assert pools[1] is not None
    segment = stores[0].reserve(RED, arena.SLOT_BYTES, SegmentKey(bytes(32)), Kind.PRIMARY, 0, 0.0)
    assert isinstance(segment, Segment)
    stores[0].publish(segment, b"", 0.0)
    for number in range(400):
        stores[0].touch([segment], 30.0 * number)
    stores[0].unpin(segment)
    key = SegmentKey(b"n" * 32)
    before = pools[1].primary.retention_value_of_new(key, NO_HINTS, 1e5)
    cluster.run_for(3 * SEND_S)
    assert [pool.primary.odds.nodes for pool in pools if pool is not None and pool.primary.odds] == [2, 2]
    seen = pools[0].primary.retention_value_of_new(key, NO_HINTS, 1e5)
    heard = pools[1].primary.retention_value_of_new(key, NO_HINTS, 1e5)
    assert heard != before
    assert abs(heard - seen) < abs(before - seen)


def test_malformed_statistics_of_another_node_are_not_used() -> None:
    core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1}), 2, 8 * SLOT_BYTES))
    core.start(0.0)
    segment = core.store.reserve(RED, SLOT_BYTES, SegmentKey(bytes(32)), Kind.PRIMARY, 0, 0.0)
    assert isinstance(segment, Segment)
    core.store.publish(segment, b"", 0.0)
    for number in range(120):
        core.store.touch([segment], 30.0 * number)
    learned = core.store.models.save()
    for tenant in ("red", "blue"):
        core.handle(events.PeerSent("b", peer.EvictionStatistics(((tenant, SLOT_BYTES, b"x"),))), 1e6)
        assert core.store.models.save() == learned


def test_every_peer_is_sent_every_pool() -> None:
    context = Context(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1, "c": 1}), 2, 8 * SLOT_BYTES))
    peers = Peers(context, *4 * [lambda peer_: None])
    tenants = [TenantId(f"tenant {number}") for number in range(8)]
    for tenant in tenants:
        context.store.models.of(PoolId(tenant, SLOT_BYTES))
    sent: dict[str, set[str]] = {"b": set(), "c": set()}
    for node in sent:
        peers.came_up(NodeId(node), Incarnation(1))
    Learned(context, peers).start()
    for turn in range(1, 7):
        context.now = turn * SEND_S
        context.timers.fire(context.now)
    for each in context.out:
        if isinstance(each, instructions.SendToPeer) and isinstance(each.message, peer.EvictionStatistics):
            sent[each.node].update(tenant for tenant, _, _ in each.message.pools)
    assert sent == {"b": set(tenants), "c": set(tenants)}
