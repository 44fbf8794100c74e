"""Statistics of the eviction policy: saved across restarts, and exchanged between nodes."""

from __future__ import annotations

import msgspec
import pytest

from tests.core.scenes import calm
from tests.sim import arena
from tokenlake.core import NodeCore, events, instructions
from tokenlake.core.cluster.learned import MAX_LEARNED_BYTES, SEND_S, Learned
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, CoreConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import NO_HINTS
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId, Segment
from tokenlake.memory.eviction.odds import Odds
from tokenlake.memory.models import Models
from tokenlake.wire import peer

RED = TenantId("red")
SLOT_BYTES = 1024


def core_of(learned: bytes | None = None) -> NodeCore:
    core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1}), 2, 8 * SLOT_BYTES))
    core.start(0.0)
    if learned is not None:
        core.handle(events.StatisticsLoaded(learned), 0.0)
    return core


def used(core: NodeCore, times: int) -> None:
    """Store a segment and use it again every half minute."""
    store = core.store
    segment = store.reserve(RED, SLOT_BYTES, SegmentKey(bytes(32)), Kind.PRIMARY, 0, 0.0)
    assert isinstance(segment, Segment)
    store.publish(segment, b"", 0.0)
    for number in range(times):
        store.touch([segment], 30.0 * number)


def retention_value(core: NodeCore) -> float:
    """The retention value of a segment that was used once."""
    pool = core.store.pool(RED, SLOT_BYTES)
    assert pool is not None
    return pool.primary.retention_value_of_new(SegmentKey(b"n" * 32), NO_HINTS, 1e6)


def test_a_restart_begins_with_the_saved_statistics() -> None:
    first = core_of()
    used(first, 500)
    saved = first.learned()
    second = core_of(learned=saved)
    assert retention_value(second) == retention_value(first) != retention_value(core_of())
    assert second.learned() == saved


def test_saving_changes_nothing() -> None:
    cores = [core_of(), core_of()]
    for core in cores:
        used(core, 120)
    assert cores[0].learned() == cores[0].learned() == cores[1].learned()


def test_statistics_stay_known_without_segments() -> None:
    first = core_of()
    used(first, 500)
    assert core_of(learned=first.learned()).learned() == first.learned()


@pytest.mark.parametrize("data", [b"", b"junk", msgspec.msgpack.encode([[["red", 1024, b"junk"]]])])
def test_malformed_statistics_are_refused(data: bytes) -> None:
    core = core_of()
    with pytest.raises(ValueError, match="statistics"):
        core.handle(events.StatisticsLoaded(data), 0.0)
    assert core.learned() == core_of().learned()


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        core_of().handle(events.StatisticsLoaded(bytes(MAX_LEARNED_BYTES + 1)), 0.0)


def test_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenlake.memory.models.MAX_MODELS", 3)
    models = Models()
    models.restore({PoolId(TenantId(f"t{number}"), SLOT_BYTES): Odds().save() for number in range(10)})
    assert [tenant for tenant, _ in models.save()] == ["t7", "t8", "t9"]


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
    core = core_of()
    used(core, 120)
    saved = core.learned()
    for message in (
        peer.EvictionStatistics((("red", SLOT_BYTES, b"x"),)),
        peer.EvictionStatistics((("blue", SLOT_BYTES, b"x"),)),
    ):
        core.handle(events.PeerSent("b", message), 1e6)
        assert core.learned() == saved


def test_every_peer_is_sent_every_pool() -> None:
    context = Context(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1, "c": 1}), 2, 8 * SLOT_BYTES))
    peers = Peers(context, *4 * [lambda peer_: None])
    tenants = [TenantId(f"tenant {number}") for number in range(8)]
    context.store.models.restore({PoolId(tenant, SLOT_BYTES): Odds().save() for tenant in tenants})
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
