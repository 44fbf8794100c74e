"""Quotas and fair shares, and the refusals and reclaimed regions that follow from them."""

from __future__ import annotations

from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore
from tokenlake.memory.region_allocator import RegionAllocator
from tokenlake.metrics import Counters
from tokenlake.wire.codes import Code

RED, BLUE, GREY = TenantId("red"), TenantId("blue"), TenantId("grey")
SLOT_BYTES, PER_REGION = 1024, 4


def store_of(regions: int, quotas: dict[str, float]) -> SegmentStore:
    return SegmentStore(regions, PER_REGION * SLOT_BYTES, 0.45, Counters(), quotas=quotas)


def fill(store: SegmentStore, tenant: TenantId, count: int, kind: Kind = Kind.PRIMARY, size: int = SLOT_BYTES) -> Code:
    """Store at most `count` segments until one is refused; the last outcome."""
    for number in range(count):
        segment = store.reserve(tenant, size, SegmentKey(number.to_bytes(32, "little")), kind, 0, float(number))
        store.check_integrity()
        if not isinstance(segment, Segment):
            return segment
        store.publish(segment, b"", float(number))
        store.unpin(segment)
    return Code.RESERVED


def regions(store: SegmentStore, tenant: TenantId) -> int:
    return sum(len(pool.regions) for pool in store.pools() if pool.tenant == tenant)


def test_a_quota_is_at_least_one_whole_region() -> None:
    quotas = RegionAllocator(10, 100, {"red": 0.7, "blue": 0.01, "grey": 0.19})
    assert [quotas.quota(tenant) for tenant in (RED, BLUE, GREY, TenantId("new"))] == [700, 100, 190, 1000]


def test_fair_shares_fit_into_the_memory() -> None:
    quotas = RegionAllocator(8, 100, {"red": 0.25})
    assert quotas.fair_share(RED, [RED]) == 200
    assert quotas.fair_share(BLUE, [BLUE]) == 800
    assert [quotas.fair_share(tenant, [RED, BLUE]) for tenant in (RED, BLUE)] == [100, 600]
    assert [quotas.fair_share(tenant, [BLUE, GREY]) for tenant in (BLUE, GREY)] == [400, 400]
    assert RegionAllocator(2, 100, {}).fair_share(RED, [RED, BLUE, GREY]) == 100


def test_a_tenant_at_its_quota_evicts_its_own() -> None:
    store = store_of(4, {"red": 0.5})
    assert fill(store, BLUE, PER_REGION) is Code.RESERVED
    assert fill(store, RED, 100) is Code.RESERVED
    assert (regions(store, RED), len(store.regions.spare)) == (2, 1)
    assert len(store.index(RED)) == 2 * PER_REGION
    assert len(store.index(BLUE)) == PER_REGION


def test_a_refusal_names_the_quota() -> None:
    store = store_of(4, {"red": 0.5})
    for number in range(2 * PER_REGION):
        store.reserve(RED, SLOT_BYTES, SegmentKey(number.to_bytes(32, "little")), Kind.PRIMARY, 0, 0.0)
    assert store.reserve(RED, SLOT_BYTES, SegmentKey(b"x" * 32), Kind.PRIMARY, 0, 0.0) is Code.QUOTA
    # Another slot size gets no region either: spare regions beyond the quota do not count as capacity.
    assert store.reserve(RED, 2 * SLOT_BYTES, SegmentKey(b"y" * 32), Kind.PRIMARY, 0, 0.0) is Code.QUOTA
    pool = store.pool(RED, SLOT_BYTES)
    assert pool is not None
    assert store.capacity(pool.id) == 2 * PER_REGION
    assert store.take_pressed() == [(RED, 2 * SLOT_BYTES)]
    assert store.take_pressed() == []


def test_a_region_is_taken_when_its_last_pin_goes() -> None:
    store = store_of(1, {})
    fill(store, RED, PER_REGION)
    pool = store.pool(RED, SLOT_BYTES)
    assert pool is not None
    leased = next(iter(store.index(RED).values()))
    store.pin(leased)
    assert store.drain(pool, 10.0) == (0, 1)
    assert list(store.index(RED).values()) == [leased]
    assert store.reserve(RED, SLOT_BYTES, SegmentKey(b"x" * 32), Kind.PRIMARY, 0, 10.0) is Code.NO_SLOT
    store.check_integrity()
    store.unpin(leased)
    assert store.drain(pool, 11.0) == (0, 0)
    assert not list(store.pools())
