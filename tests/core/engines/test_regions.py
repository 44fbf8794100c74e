"""Memory moves between tenants: fair shares, quotas, idle pools."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tests.core.scenes import ROOMY, calm, kinds, match, offer, release, said, store, tell
from tests.sim.arena import SLOTS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tests.sim.prompts import prompt
from tokenlake.core import CoreConfig, NodeCore, events
from tokenlake.core.instructions import CloseRegion, MakeRegion
from tokenlake.core.regions import DRAIN_ALONE_S, PATIENCE_S, UNUSED_S
from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import TenantId
from tokenlake.memory import Kind
from tokenlake.memory import store as store_module
from tokenlake.memory.region import PAGE
from tokenlake.wire import Code, engine, peer


def regions(cluster: Cluster, tenant: str, node: int = 0) -> int:
    return sum(len(pool.regions) for pool in cluster.core(node).store.pools() if pool.tenant == tenant)


def write(cluster: Cluster, writer: Engine, name: str, segments: int) -> None:
    """One prompt of so many segments, a slot's worth at a time."""
    keys = prompt(name, segments)
    for first in range(0, segments, SLOTS):
        writer.store(keys[first : first + SLOTS], first, Storing())
        cluster.run_for(0.05)


def hits(cluster: Cluster, reader: Engine, name: str, segments: int) -> int:
    reply = match(cluster, reader, prompt(name, segments))
    release(cluster, reader, reply.lease, segments)
    return reply.hits


@pytest.mark.parametrize("quotas", [{"red": 0.5}, {}], ids=["quota", "none"])
def test_an_endless_writer_takes_no_memory_of_others(quotas: dict[str, float]) -> None:
    cluster = calm(1, regions=4, quotas=quotas, **ROOMY)
    red, blue = cluster.join(0), cluster.join(0, tenant="blue")
    write(cluster, blue, "kept", 2 * SLOTS)
    for turn in range(20):
        write(cluster, red, f"endless {turn}", SLOTS)
        if turn % 5 == 0:
            assert hits(cluster, blue, "kept", 2 * SLOTS) == 2 * SLOTS
        cluster.check()
    assert hits(cluster, blue, "kept", 2 * SLOTS) == 2 * SLOTS
    assert regions(cluster, "red") == 2


def test_a_later_tenant_gets_its_fair_share() -> None:
    cluster = calm(1, regions=4, **ROOMY)
    red = cluster.join(0)
    write(cluster, red, "all", 4 * SLOTS)
    assert regions(cluster, "red") == 4
    blue = cluster.join(0, tenant="blue")
    for turn in range(12):
        write(cluster, red, f"endless {turn}", SLOTS)
        write(cluster, blue, f"mine {turn}", SLOTS)
        cluster.run_for(0.3)
        cluster.check()
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (2, 2)
    # A tenant with its fair share takes no more.
    assert len(said(cluster, 0, CloseRegion)) == 2
    assert hits(cluster, blue, "mine 11", SLOTS) == SLOTS


def test_the_only_region_of_a_tenant_stays() -> None:
    cluster = calm(1, regions=1, **ROOMY)
    red = cluster.join(0)
    write(cluster, red, "read", SLOTS)
    lease = match(cluster, red, prompt("read", SLOTS))
    assert lease.hits == SLOTS
    cluster.join(0, tenant="blue")
    cluster.run_for(2.0)
    # One region is the fair share of a tenant that is connected.
    assert regions(cluster, "red") == 1
    assert not said(cluster, 0, CloseRegion)
    cluster.check()


def test_idle_memory_is_given_out_while_another_pool_drains() -> None:
    cluster = calm(1, regions=4, **ROOMY)
    green = cluster.join(0, tenant="green")
    write(cluster, green, "kept", SLOTS)
    green.die()
    red = cluster.join(0)
    for region in range(3):
        write(cluster, red, f"leased {region}", SLOTS)
        assert match(cluster, red, prompt(f"leased {region}", SLOTS)).hits == SLOTS
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(2 * DRAIN_ALONE_S)
    assert (regions(cluster, "red"), regions(cluster, "blue"), regions(cluster, "green")) == (3, 1, 0)
    cluster.check()
    # Regions of the tenant that has left follow as they are needed.
    red.die()
    for turn in range(8):
        write(cluster, blue, f"mine {turn}", SLOTS)
        cluster.run_for(0.5)
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (0, 4)
    cluster.check()


def endlessly(cluster: Cluster, writer: Engine, turns: int) -> None:
    """The working set of the writer takes all memory of the node: it stores again what is not found."""
    for turn in range(turns):
        name = f"{writer.tenant} {turn % 8}"
        if hits(cluster, writer, name, SLOTS) < SLOTS:
            write(cluster, writer, name, SLOTS)
        cluster.run_for(0.1)


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "connected"])
def test_a_tenant_that_uses_nothing_keeps_nothing(leaves: bool) -> None:
    cluster = calm(1, regions=8, **ROOMY)
    red = cluster.join(0)
    endlessly(cluster, red, 16)
    assert regions(cluster, "red") == 8
    if leaves:
        red.die()
    else:
        cluster.run_for(UNUSED_S)
    blue = cluster.join(0, tenant="blue")
    endlessly(cluster, blue, 24)
    # A connected engine keeps one region.
    assert (regions(cluster, "red"), regions(cluster, "blue")) == ((0, 8) if leaves else (1, 7))
    before = len(said(cluster, 0, CloseRegion))
    endlessly(cluster, blue, 16)
    assert len(said(cluster, 0, CloseRegion)) == before
    cluster.check()


def leased_in_each_region(cluster: Cluster, reader: Engine, count: int) -> dict[int, list[int]]:
    """Fill `count` regions with prompts of one segment, and lease them all. Returns the leases by region."""
    leases: dict[int, list[int]] = collections.defaultdict(list)
    for number in range(count * SLOTS):
        keys = prompt(f"alone {number}", 1)
        reader.store(keys, 0, Storing())
        cluster.run_for(0.05)
        segment = cluster.core(0).store.get(TenantId("red"), keys[0])
        assert segment is not None
        leases[segment.place.region].append(match(cluster, reader, keys).lease)
    return leases


def draining(cluster: Cluster) -> int:
    (region,) = [pool.draining for pool in cluster.core(0).store.pools() if pool.draining is not None]
    return region


def give_back(cluster: Cluster, reader: Engine, leases: list[int]) -> None:
    tell(cluster, reader.processes[0], engine.Release(tuple((lease, 0, 1) for lease in leases)))


def test_one_unreleased_lease_stops_no_handover() -> None:
    """The region that was chosen stays leased for ever, and others have no lease any more."""
    cluster = calm(1, regions=4, **ROOMY)
    red = cluster.join(0)
    leases = leased_in_each_region(cluster, red, 4)
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(1.0)
    stuck = draining(cluster)
    for region in leases:
        give_back(cluster, red, leases[region][region == stuck :])
    cluster.run_for(DRAIN_ALONE_S)
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (3, 1)
    for turn in range(8):
        write(cluster, blue, f"needs more {turn}", SLOTS)
        cluster.run_for(0.3)
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (2, 2)
    assert hits(cluster, blue, "needs more 7", SLOTS) == SLOTS
    # The region that is not needed any more is used again by its tenant.
    assert all(pool.draining is None for pool in cluster.core(0).store.pools())
    cluster.check()


def test_regions_of_two_tenants_are_tried() -> None:
    cluster = calm(1, regions=7, **ROOMY)
    red, green = cluster.join(0), cluster.join(0, tenant="green")
    write(cluster, green, "not leased", 3 * SLOTS)
    leased_in_each_region(cluster, red, 4)
    assert (regions(cluster, "red"), regions(cluster, "green")) == (4, 3)
    cluster.join(0, tenant="blue")
    cluster.run_for(2 * DRAIN_ALONE_S)
    # The fair share of each tenant is two regions. All regions of red are leased.
    assert (regions(cluster, "red"), regions(cluster, "green"), regions(cluster, "blue")) == (4, 2, 1)
    cluster.check()


def test_a_region_that_is_always_leased_is_passed_over() -> None:
    """Each region has a lease at any time, one of them always the same. A region becomes empty only if it was chosen
    for longer than its leases last, because it gets no new segments then."""
    cluster = calm(1, regions=4, **ROOMY)
    red = cluster.join(0)
    leases = leased_in_each_region(cluster, red, 4)
    cluster.join(0, tenant="blue")
    cluster.run_for(1.0)
    stuck = draining(cluster)
    give_back(cluster, red, leases.pop(stuck)[1:])
    names = {region: [f"alone {region * SLOTS + at}" for at in range(SLOTS)] for region in leases}
    for turn in range(int(4 * PATIENCE_S)):
        for region, held in leases.items():
            renewed = match(cluster, red, prompt(names[region][turn % SLOTS], 1)).lease
            give_back(cluster, red, held)
            held[:] = [renewed] if renewed else []
        cluster.run_for(1.0)
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (3, 1)
    cluster.check()


def test_a_handover_gets_memory_where_another_tenant_had_all() -> None:
    """No engine of the tenant is connected to the node that takes the segments over."""
    cluster = calm(2, regions=2, **ROOMY)
    reds = [cluster.join(node) for node in (0, 1)]
    for turn in range(4):
        for red in reds:
            write(cluster, red, f"{red.node.name} {turn}", 2 * SLOTS)
    for red in reds:
        red.die()
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(1.0)
    write(cluster, blue, "blue", SLOTS)
    keys = prompt("blue", SLOTS)
    offer(cluster, 0, 1, keys, "blue")
    cluster.run_for(2.0)
    assert {code for reply in said(cluster, 1, peer.OfferReply) for code in reply.codes} == {Code.NO_REGION}
    assert regions(cluster, "blue", 1) == 1
    # A send to one node pins at most half of the slots of the tenant.
    moved = keys[: SLOTS // 2]
    offer(cluster, 0, 1, moved, "blue")
    cluster.run_for(2.0)
    assert all(kinds(cluster, key, "blue") == {0: Kind.CACHED, 1: Kind.PRIMARY} for key in moved)
    cluster.check()


def test_one_region_is_taken_from_one_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is emptied in slices. All slices evict segments of one tenant, though several have no engines."""
    monkeypatch.setattr(store_module, "RECLAIM_EVICTIONS", 1)
    cluster = calm(1, regions=3, dirty_share=1.0, session_reserve_share=1.0)
    former = [cluster.join(0, tenant=tenant) for tenant in ("red", "blue", "grey")]
    for each in former:
        store(cluster, each, prompt("kept", SLOTS))
        each.die()
    cluster.run_for(0.01)
    newcomer = cluster.join(0, tenant="green")
    cluster.run_for(2.0)
    assert len(said(cluster, 0, CloseRegion)) == 1
    left = collections.Counter(segment.tenant for segment in cluster.core(0).store.segments())
    assert list(left.values()) == [SLOTS, SLOTS]
    store(cluster, newcomer, prompt("new", 1))
    assert match(cluster, newcomer, prompt("new", 1)).hits == 1


class Alone:
    """One node whose memory has 8 pages per region; its driver makes regions at once."""

    def __init__(self, regions: int, **config: Any) -> None:
        self.core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1}), regions, 8 * PAGE, **ROOMY, **config))
        self.core.start(0.0)
        self.now, self.last = 0.0, 1
        self.making: list[MakeRegion] = []

    def handle(self, event: events.Event) -> list[Any]:
        out = self.core.handle(event, self.now)
        self.making += [each for each in out if isinstance(each, MakeRegion)]
        self.core.check_integrity()
        return out

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        while (wake := self.core.next_wake()) is not None and wake <= self.now:
            self.handle(events.Tick())

    def make_all(self) -> None:
        while self.making:
            self.handle(events.RegionReady(self.making.pop(0).region))

    def join(self, connection: int, slot_bytes: int, tenant: str = "red") -> None:
        self.handle(events.Joined(connection, 1, tenant, slot_bytes, 1, 16, 0, 0))

    def store(self, connection: int, name: str) -> int:
        """Store a prompt of one segment; its code."""
        self.last += 1
        keys = prompt(name, 1)
        out = self.handle(events.Requested(connection, engine.Prepare(self.last, keys[0], 0)))
        (prepared,) = [each.message for each in out if isinstance(getattr(each, "message", None), engine.Prepared)]
        if prepared.write:
            self.handle(events.Requested(connection, engine.Commit(self.last, prepared.write, (0,), 1, bytes(8))))
        self.tick(0.05)
        self.make_all()
        return int(prepared.codes[0])

    def slots(self) -> dict[int, int]:
        return {pool.slot_bytes: pool.slots for pool in self.core.store.pools()}


def test_two_layouts_of_a_tenant_share_by_use() -> None:
    """Engines of the first layout, which took all memory, go on writing, twice as many bytes as those of the second."""
    node = Alone(4)
    node.join(1, 2 * PAGE)
    for turn in range(40):
        node.store(1, f"first {turn}")
    assert node.slots() == {2 * PAGE: 16}
    node.join(2, PAGE)
    for turn in range(400):
        node.store(1, f"large {turn}")
        node.store(2, f"small {turn}")
    assert node.slots() == {2 * PAGE: 12, PAGE: 8}


def test_memory_is_made_some_regions_at_a_time() -> None:
    """An engine that joins meanwhile gets one of the next regions, which are made of whole slots."""
    node = Alone(4, makers=2, made=False)
    node.tick()
    assert [each.nbytes for each in node.making] == [8 * PAGE] * 2
    node.join(1, 3 * PAGE)
    assert node.store(1, "too early") == Code.NO_REGION
    assert node.core.store.regions.unmade < 3 * PAGE
    assert not node.core.store.regions.making
    assert [node.store(1, f"in time {number}") for number in range(10)] == [Code.RESERVED] * 10
    assert node.slots() == {3 * PAGE: 10}
    assert node.core.store.unusable() == 2 * PAGE


def test_nothing_is_evicted_while_memory_is_coming() -> None:
    node = Alone(2, makers=1, made=False)
    node.tick()
    node.handle(events.RegionReady(node.making.pop().region))
    node.join(1, 4 * PAGE)
    making, node.making = node.making, []
    assert [node.store(1, f"first {number}") for number in range(3)] == [Code.RESERVED] * 2 + [Code.NO_REGION]
    node.making += making
    node.make_all()
    assert [node.store(1, f"later {number}") for number in range(2)] == [Code.RESERVED] * 2
    assert len(list(node.core.store.segments())) == 4


@pytest.mark.parametrize("made", [True, False])
def test_slots_larger_than_a_region(made: bool) -> None:
    node = Alone(8, made=made)
    node.tick()
    node.make_all()
    node.join(1, 20 * PAGE)
    for turn in range(40):
        node.store(1, f"large {turn % 3}")
    assert node.slots() == {20 * PAGE: 3}
    assert len(list(node.core.store.segments())) == 3
    assert node.core.store.unusable() == 4 * PAGE


def test_models_of_other_sizes_follow_each_other() -> None:
    """Engines of one model end, those of another one start. Each gets all memory but less than one slot."""
    node = Alone(16)
    for connection, pages in enumerate((1, 5, 3, 20, 7, 2), 1):
        node.join(connection, pages * PAGE)
        for turn in range(600):
            node.store(connection, f"{pages} {turn % (128 // pages)}")
            if node.slots().get(pages * PAGE) == 128 // pages:
                break
        assert node.slots() == {pages * PAGE: 128 // pages}
        node.handle(events.ProcessGone(connection))


def test_what_an_operator_evicts_is_free_for_others() -> None:
    """The tenant's engine is connected and goes on reading what is left."""
    node = Alone(8)
    node.join(1, PAGE)
    node.join(2, PAGE, "blue")
    for turn in range(56):
        node.store(1, f"red {turn}")
    taken = {pool.tenant: pool.slots for pool in node.core.store.pools()}
    assert taken == {"red": 56, "blue": 8}
    node.handle(events.EvictRequested(9, "red", b""))
    node.tick(1.0)
    for turn in range(80):
        node.store(1, "red again")
        node.store(2, f"blue {turn}")
    blue = node.core.store.pool(TenantId("blue"), PAGE)
    assert blue is not None
    assert blue.slots >= 40
