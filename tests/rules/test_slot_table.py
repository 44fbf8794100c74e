"""The walk over all slots, and regions that are taken away."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Cursor, Kind, Segment, SegmentStore
from tokenlake.memory.store import RECLAIM_EVICTIONS
from tokenlake.metrics import Counters

TENANT = TenantId("t")
SLOT_BYTES = 1024
REGIONS, PER_REGION = 3, 7


def store_of(regions: int, per_region: int) -> SegmentStore:
    return SegmentStore(regions, per_region * SLOT_BYTES, 0.45, Counters())


def add(store: SegmentStore, number: int, kind: Kind = Kind.PRIMARY) -> Segment:
    segment = store.reserve(TENANT, SLOT_BYTES, SegmentKey(number.to_bytes(32, "little")), kind, 0, 0.0)
    assert isinstance(segment, Segment)
    store.publish(segment, b"", 0.0)
    store.unpin(segment)
    return segment


@given(
    held=st.integers(0, REGIONS * PER_REGION),
    steps=st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["add", "discard", "nothing"])), min_size=40),
)
@settings(max_examples=examples(200))
def test_a_walk_passes_each_segment_that_stays_once(held: int, steps: list[tuple[int, str]]) -> None:
    store = store_of(REGIONS, PER_REGION)
    there = [add(store, number) for number in range(held)]
    staying, number = list(there), held
    passed: list[Segment] = []
    cursor: Cursor | None = Cursor()
    for slots, change in steps:
        if cursor is None:
            break
        found, cursor = store.walk(cursor, slots)
        assert len(found) <= slots
        passed += found
        if change == "add":
            number += 1
            there.append(add(store, number))
        elif change == "discard" and there:
            leaving = there.pop(number % len(there))
            if leaving in store.segments():
                store.discard(leaving, 0.0)
        present = set(store.segments())
        staying = [segment for segment in staying if segment in present]
        store.check_integrity()
    assert cursor is None
    assert len(passed) == len(set(passed))
    assert set(staying) <= set(passed)


def test_a_walk_skips_a_region_given_away() -> None:
    store = store_of(REGIONS, PER_REGION)
    for number in range(REGIONS * PER_REGION):
        add(store, number)
    found, cursor = store.walk(Cursor(), PER_REGION)
    assert [segment.place.region for segment in found] == [0] * PER_REGION
    assert cursor is not None
    (pool,) = store.pools()
    assert store.drain(pool, 0.0, 2) == (2, 0)
    found, cursor = store.walk(cursor, PER_REGION + 1)
    assert [segment.place.region for segment in found] == [1] * PER_REGION
    assert cursor is None


def test_a_large_region_is_emptied_in_several_calls() -> None:
    count = 2 * RECLAIM_EVICTIONS + 1
    store = store_of(1, count)
    for number in range(count):
        add(store, number)
    (pool,) = store.pools()
    left = []
    for _ in range(2):
        left.append(store.drain(pool, 0.0)[1])
        store.check_integrity()
        assert left[-1] == len(list(store.segments()))
    assert left == [count - RECLAIM_EVICTIONS, count - 2 * RECLAIM_EVICTIONS]
    assert store.drain(pool, 0.0) == (0, 0)
    assert not list(store.pools())


def test_a_region_without_pins_is_found_behind_others() -> None:
    per_region, last = 500, 3
    store = store_of(last + 1, per_region)
    segments = [add(store, number) for number in range((last + 1) * per_region)]
    (pool,) = store.pools()
    for region in range(last):
        store.pin(next(segment for segment in segments if segment.place.region == region))
    # The first call looks at three regions, which is its bound; the next call begins after them.
    found = store.least_used(pool)
    assert found is not None
    assert found[0] == 1
    assert store.least_used(pool) == (0, last)
