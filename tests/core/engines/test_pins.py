"""Pins: what keeps a segment, for how long, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

from tests.core.scenes import ROOMY, answer, calm, copies, prepare, said, store, stored, tell
from tests.sim.arena import SHARDS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.engines.pins import PINS_REFUSED
from tokenlake.core.instructions import UnpinDone
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import join_keys


def pinned(cluster: Cluster, node: int = 0) -> int:
    """The pinned segments of a node, whose rules are whole."""
    cluster.check()
    return cluster.core(node).census()["pinned segments"]


def pin(cluster: Cluster, asker: Engine, keys: Sequence[SegmentKey], seconds: float) -> None:
    tell(cluster, asker.processes[0], engine.Hint(join_keys(list(keys)), Hints(pin_s=seconds)))


def unpin(cluster: Cluster, keys: Sequence[SegmentKey], tenant: str = "red") -> int:
    """The number of pins that an order of an operator ended."""
    before = len(said(cluster, 0, UnpinDone))
    cluster.node(0).deliver(events.UnpinRequested(before, tenant, join_keys(list(keys))))
    cluster.run_for(0.5)
    (done,) = said(cluster, 0, UnpinDone)[before:]
    return done.unpinned


def flood(cluster: Cluster, writer: Engine, prompts: int) -> None:
    """Store more than the memory of a node."""
    for number in range(prompts):
        store(cluster, writer, prompt(f"flood-{number}", 4))


def test_a_pinned_segment_outlasts_pressure_for_its_time() -> None:
    cluster = calm(1, pinned_share=0.5, **ROOMY)
    writer = cluster.join(0)
    kept, other = prompt("kept", 4), prompt("other", 4)
    store(cluster, writer, kept)
    store(cluster, writer, other)
    pin(cluster, writer, kept, 60.0)
    flood(cluster, writer, 10)
    assert pinned(cluster) == 4
    assert all(copies(cluster, key) for key in kept)
    assert not any(copies(cluster, key) for key in other)
    cluster.run_for(60.0)
    assert pinned(cluster) == 0
    flood(cluster, writer, 14)
    assert not all(copies(cluster, key) for key in kept)


def test_hints_of_a_write_and_of_a_read_pin() -> None:
    """The segments that a request computes are pinned when they are committed, those that it reads when they are given
    back; other nodes do not hear of it."""
    cluster = calm(2, pinned_share=0.5)
    writer = cluster.join(0)
    keys = prompt("asked", 2)
    hints = Hints(priority=1, pin_s=30.0)
    prepared = prepare(cluster, writer, keys)
    assert pinned(cluster) == 0
    tell(cluster, writer.processes[0], engine.Abort(prepared.write))
    reserved: list[engine.Prepared] = []
    process = writer.processes[0]
    process.request(lambda number: engine.Prepare(number, join_keys(keys), 0, "", hints), reserved.append)
    cluster.run_for(0.01)
    write = reserved[0].write
    answer(cluster, process, engine.Commit, write, (0, 1), (1 << SHARDS) - 1, bytes(8 * SHARDS * 2))
    assert pinned(cluster) == 2
    assert all(each.hints and not each.hints.pin_s for each in said(cluster, 0, peer.Offer))
    assert {copies(cluster, key)[0].hints.priority for key in keys} == {1}
    assert not any(copies(cluster, key)[0].hints.pin_s for key in keys)
    assert unpin(cluster, keys[:1]) == 1
    lease: list[engine.Matched] = []
    process.request(lambda number: engine.Match(number, join_keys(keys), 0.0, False, "", hints), lease.append)
    cluster.run_for(0.01)
    tell(cluster, process, engine.Release(((lease[0].lease, 0, 2),), True))
    assert pinned(cluster) == 2
    tell(cluster, process, engine.Unpin(join_keys(keys)))
    assert pinned(cluster) == 0


def test_the_bounds_of_pins() -> None:
    """A share of the slots of a pool, and a number for each tenant; refused pins are counted and change nothing."""
    cluster, _, keys = stored(4, reader=0, regions=2, pinned_share=0.1)
    core, asker = cluster.core(0), cluster.join(0)
    (pool,) = core.store.pools()
    limit = max(1, int(0.1 * core.store.capacity(pool.id)))
    pin(cluster, asker, keys, 9.0)
    assert pinned(cluster) == limit < len(keys)
    assert core.counters[PINS_REFUSED] == sum(0 in copies(cluster, key) for key in keys) - limit
    pin(cluster, asker, keys[:1], 99.0)
    cluster.run_for(10.0)
    assert pinned(cluster) == 1, "a segment that is pinned already needs no further room"


def test_a_pin_ends_with_its_segment() -> None:
    """An operator evicts a pinned segment: it leaves at once, and its slot is free."""
    cluster, _, keys = stored(2, reader=0, pinned_share=0.5)
    asker = cluster.join(0)
    pin(cluster, asker, keys, 600.0)
    assert pinned(cluster) == 2
    cluster.node(0).deliver(events.EvictRequested(1, "red", keys[0]))
    cluster.run_for(0.5)
    assert pinned(cluster) == 1
    (pool,) = cluster.core(0).store.pools()
    assert pool.quarantined == 0


def test_pins_of_other_tenants_stay() -> None:
    cluster, _, keys = stored(3, reader=0, pinned_share=0.5)
    pin(cluster, cluster.join(0), keys, 600.0)
    pin(cluster, cluster.join(0, "blue"), keys, 600.0)
    assert pinned(cluster) == 3
    assert unpin(cluster, [], "blue") == 0
    assert unpin(cluster, [], "red") == 3
    assert unpin(cluster, keys) == 0


def test_pins_do_not_keep_memory_from_another_tenant() -> None:
    """A tenant without engines has pinned segments in all regions. Another tenant gets its memory all the same."""
    cluster = calm(1, regions=2, pinned_share=1.0, **ROOMY)
    writer = cluster.join(0)
    for number in range(12):
        keys = prompt(f"pinned-{number}", 4)
        store(cluster, writer, keys)
        pin(cluster, writer, keys, 3600.0)
    assert pinned(cluster) > 4
    writer.die()
    cluster.run_for(40.0)
    other = cluster.join(0, "blue")
    for _ in range(20):
        other.store(prompt("blue", 4), 0, Storing())
        cluster.run_for(1.0)
    assert any(pool.tenant == "blue" for pool in cluster.core(0).store.pools())
    cluster.check()
