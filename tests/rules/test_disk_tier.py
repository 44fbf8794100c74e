"""The disk tier: places, holds, quotas, devices; and the memory that it takes."""

from __future__ import annotations

import gc
import sys
import tracemalloc

from tests.rules.disk_scene import SLOT, TENANT, evictions, key_of, segment_of, tier_of, written
from tokenlake.disk import NO_ENTRY, Place, pack_places, slab_bytes, stride, unpack_places
from tokenlake.disk.admission import MAX_CREDIT, Admission, DailyBudget, Refusal
from tokenlake.disk.notes import Note, Notes
from tokenlake.disk.places import footprint
from tokenlake.disk.reads import READS, ReadQueue
from tokenlake.disk.space import MAX_TENANT_SLABS
from tokenlake.disk.tier import DiskTier
from tokenlake.hints import AccessRecord, Hints, Outlook
from tokenlake.identity import TenantId
from tokenlake.memory import Kind, State
from tokenlake.memory.eviction.odds import Odds


def test_a_place_is_aligned_and_places_are_packed() -> None:
    assert stride(1) == stride(4096) == 8192
    assert stride(4097) == 12288
    places = [Place(3, 7), Place(2**32 - 1, 1)]
    assert unpack_places(pack_places(places)) == places


def test_a_note_comes_back_as_it_was_packed() -> None:
    access = AccessRecord(40, 30, 2, 12.5, -1.0, 3, 5)
    note = Note(17, 9, Hints(Outlook.GOES_ON, "chat", "stop", 1, 60.0, 345, access))
    notes = Notes()
    assert notes.unpack(notes.pack(note)) == note
    # Another process does not know the names.
    assert Notes().unpack(notes.pack(note)).hints.category == ""
    assert notes.unpack(notes.pack(Note(0, 1, Hints()))) == Note(0, 1, Hints())


def test_a_full_slab_gives_up_what_was_not_accessed_longest() -> None:
    """The first segment in the queue that was not accessed leaves, and its place gets the next generation."""
    tier = tier_of(3)
    for number in range(3):
        written(tier, segment_of(number))
    tier.touch(tier.find(TENANT, key_of(0)), None, 50.0)
    assert written(tier, segment_of(8)) == Place(1, 2)
    assert tier.find(TENANT, key_of(1)) == NO_ENTRY
    assert evictions(tier) == 1
    # The second chance is over; segments in memory stay, and so do those that are held.
    tier.arrived(segment_of(2))
    tier.hold(tier.find(TENANT, key_of(8)), 200.0)
    assert written(tier, segment_of(9)) == Place(0, 2)
    tier.check_integrity()


def test_an_entry_that_is_held_often() -> None:
    """An entry that is held often takes no more memory and stays until the last time."""
    tier = tier_of(2)
    written(tier, segment_of(1))
    written(tier, segment_of(2))
    often, once = (tier.find(TENANT, key_of(number)) for number in (1, 2))
    tier.hold(once, 9.0)
    tracemalloc.start()
    try:
        for number in range(20_000):
            tier.hold(often, 10.0 + number / 1000)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 100_000
    tier.expire(29.9)
    tier.check_integrity()
    assert written(tier, segment_of(3), 29.9) == Place(1, 2)
    assert tier.find(TENANT, key_of(1)) == often
    tier.expire(30.0)
    written(tier, segment_of(4), 30.0)
    assert len(tier) == 2
    tier.check_integrity()


def test_memory_evicts_first_what_is_on_disk() -> None:
    """Memory evicts first what is on disk too and was accessed longest ago."""
    tier = tier_of(4)
    segments = [segment_of(number, float(number)) for number in range(4)]
    for segment in segments:
        written(tier, segment, 5.0, leaves=False)
    assert tier.spare(TENANT, SLOT) is segments[0]
    segments[0].touched = 6.0
    segments[1].pins = 1
    segments[2].kind = Kind.CACHED
    assert tier.spare(TENANT, SLOT) is segments[3]
    segments[3].hints = Hints(priority=1)
    assert tier.spare(TENANT, SLOT) is segments[0]
    assert tier.spare(TENANT, 2 * SLOT) is tier.spare(TenantId("blue"), SLOT) is None
    for segment in segments:
        segment.pins = 1
    assert tier.spare(TENANT, SLOT) is None
    tier.check_integrity()


def test_a_quota_bounds_the_places_of_a_tenant() -> None:
    tier = tier_of(4, {"red": 0.5}, slabs=2)
    for number in range(4):
        written(tier, segment_of(number, float(number)), 10.0)
    assert evictions(tier) == 2
    blue = TenantId("blue")
    for number in range(2):
        written(tier, segment_of(number, 1.0, blue), 10.0)
    assert {each.tenant: each.segments for each in tier.usage()} == {TENANT: 2, blue: 2}
    assert {each.nbytes for each in tier.usage()} == {2 * footprint(SLOT)}


def test_another_tenant_gets_its_part_of_a_full_device() -> None:
    tier, blue = tier_of(4, slabs=2), TenantId("blue")
    for number in range(4):
        written(tier, segment_of(number), 0.0)
    written(tier, segment_of(9, 0.0, blue), 0.0)
    assert len(tier.take_trimmed()) == 1
    tier.check_integrity()
    assert {each.tenant: each.segments for each in tier.usage()}[blue] == 1


def test_a_second_slab_grows_to_an_equal_part() -> None:
    """A second slab grows to an equal part of a full device and no further."""
    tier, blue = tier_of(160, slabs=2), TenantId("blue")

    def write(numbers: range, *tenants: TenantId) -> None:
        for number in numbers:
            for tenant in tenants:
                # Half as many segments may be written as memory evicts.
                tier.evicted(tenant, SLOT, 2, float(number))
                written(tier, segment_of(number, float(number), tenant), float(number))

    write(range(160), TENANT)
    write(range(160, 260), TENANT, blue)
    tier.check_integrity()
    assert {each.tenant: each.segments for each in tier.usage()} == {TENANT: 80, blue: 80}
    evictions(tier)
    write(range(260, 280), TENANT, blue)
    # Each segment takes the place of one of its own slab.
    assert evictions(tier) == 40
    tier.check_integrity()


def test_a_slab_at_the_quota_of_its_tenant() -> None:
    """A slab at the quota of its tenant takes nothing from another."""
    tier, blue = tier_of(160, {"blue": 0.25}, slabs=2), TenantId("blue")
    for number in range(160):
        written(tier, segment_of(number), 0.0)
    for number in range(160, 210):
        written(tier, segment_of(number, 1.0, blue), 1.0)
    evictions(tier)
    for number in range(210, 250):
        written(tier, segment_of(number, 1.0, blue), 1.0)
    assert evictions(tier) == 40
    assert {each.tenant: each.segments for each in tier.usage()}[blue] == 39


def test_what_was_found_is_taken_once_and_generations_go_on() -> None:
    tier = tier_of(4)
    written(tier, segment_of(1))
    note = tier.packed_note(tier.find(TENANT, key_of(1)))
    again = DiskTier(lambda pool: Odds(), 0.0)
    again.ready(0, slab_bytes(SLOT, 4), 1e9, 1e9, 0.0)
    entry = again.found(0, TENANT, SLOT, (key_of(1), Place(2, 7), 1, note), 0.0)
    assert entry is not None
    refused = (
        again.found(0, TENANT, SLOT, (key_of(1), Place(3, 8), 1, note), 0.0),
        again.found(0, TENANT, SLOT, (key_of(2), Place(2, 8), 1, note), 0.0),
        again.found(0, TENANT, SLOT, (key_of(3), Place(9, 8), 1, note), 0.0),
        again.found(0, TENANT, SLOT, (key_of(4), Place(1, 8), 1, note[:-4]), 0.0),
    )
    assert refused == (None,) * 4
    again.recovered(0)
    again.check_integrity()
    assert written(again, segment_of(5)).generation == 9


def test_a_device_that_has_gone_is_swept_and_may_come_back() -> None:
    tier = tier_of(4)
    written(tier, segment_of(1))
    kept, late = segment_of(2), segment_of(3)
    written(tier, kept, leaves=False)
    entry = tier.admit(late, 1, 1.0, 0.0)
    assert not isinstance(entry, Refusal)
    slab, slot = tier.begin_read(tier.find(TENANT, key_of(1)))
    tier.gone(0)
    assert kept.disk == NO_ENTRY
    assert tier.find(TENANT, key_of(1)) == NO_ENTRY
    assert {key for _, key in tier.sweep(10)} == {key_of(1), key_of(2)}
    tier.ready(0, slab_bytes(SLOT, 4), 1e9, 1e9, 0.0)
    tier.recovered(0)
    assert written(tier, segment_of(1)) == Place(0, 1)
    tier.written(entry, late, True)
    assert late.disk == NO_ENTRY
    tier.end_read(slab, slot, 0.0)
    tier.check_integrity()
    assert len(tier) == 1


def test_a_key_is_written_again_once_its_wrong_bytes_are_erased() -> None:
    tier = tier_of(4)
    wrong, right = segment_of(1), segment_of(1)
    entry = tier.admit(wrong, 1, 1.0, 0.0)
    assert not isinstance(entry, Refusal)
    tier.left(wrong, 1, keep=False, erase=True)
    assert tier.admit(right, 1, 1.0, 0.0) is Refusal.VALUE
    assert tier.save(right, 1, 1.0, 0.0) is Refusal.VALUE
    tier.written(entry, wrong, True)
    ((slab, _, place, *_),) = tier.take_void()
    assert tier.find(TENANT, key_of(1)) == NO_ENTRY
    tier.end_read(slab, place.slot, 0.0)
    written(tier, right)
    assert tier.key(tier.find(TENANT, key_of(1))) == key_of(1)
    tier.check_integrity()


def test_a_slab_is_dropped_once() -> None:
    """The last write to a device that has gone ends, and the next slab gets the number, before the sweep comes."""
    tier, late = tier_of(4), segment_of(1)
    entry = tier.admit(late, 1, 1.0, 0.0)
    assert not isinstance(entry, Refusal)
    tier.gone(0)
    tier.written(entry, late, True)
    assert late.disk == NO_ENTRY
    tier.ready(0, slab_bytes(SLOT, 4), 1e9, 1e9, 0.0)
    tier.recovered(0)
    kept = segment_of(2)
    written(tier, kept, leaves=False)
    assert tier.sweep(10) == []
    assert tier.left(kept, 1, keep=True)
    tier.check_integrity()


def test_the_budget_of_a_day_is_a_rate_with_an_hour_of_burst() -> None:
    budget = DailyBudget(24_000.0, 0.0)
    assert budget.left(0.0) == 1000.0
    budget.spend(1000, 0.0)
    assert budget.left(1800.0) == 500.0
    assert budget.left(1e6) == 1000.0
    tier = tier_of(24, writes_per_day=1.0)
    written(tier, segment_of(1))
    assert 0 <= tier.budgets(0.0)[0] < footprint(SLOT)
    assert tier_of(24).budgets(0.0) == {}
    assert tier.admit(segment_of(2), 1, 1.0, 0.0) is Refusal.DAY
    assert tier.admit(segment_of(2), 1, 1.0, 3600.0) is not Refusal.DAY


def test_the_best_half_of_evictions_is_written() -> None:
    """At most half of what memory evicts is written and the best of it."""
    admission, passed = Admission(), []
    for number in range(20_000):
        value = (number * 7919 % 1000) / 1000
        if admission.asks(number, 1, value) is None:
            admission.wrote(1)
            passed.append(value)
        admission.evicted(1)
    assert len(passed) <= 10_000 + MAX_CREDIT
    assert len(passed) > 9_000
    late = passed[2000:]
    assert sum(late) / len(late) > 0.70
    assert sum(value < 0.4 for value in late) / len(late) < 0.05


def test_the_segments_of_one_request_are_admitted_together() -> None:
    admission = Admission()
    for number in range(2000):
        value = (number * 7919 % 1000) / 1000
        if admission.asks(number, 1, value) is None:
            admission.wrote(1)
        admission.evicted(1)
    assert admission.asks("good", 2, 0.99) is None
    # Its value falls with its age.
    assert {admission.asks("good", accesses, 0.01) for accesses in (2, 3, 9)} == {None}
    assert admission.asks("good", 1, 0.01) is Refusal.VALUE
    assert admission.asks("bad", 2, 0.01) is Refusal.VALUE
    assert {admission.asks("bad", 2, 0.99) for _ in range(3)} == {Refusal.VALUE}
    assert admission.asks("bad", 3, 0.99) is None


def test_reads_of_a_device_wait_for_each_other() -> None:
    tier = tier_of(4)
    queue: ReadQueue[int] = ReadQueue(tier.devices)
    for number in range(READS + 2):
        queue.add(0, number, 1 << 20)
    assert [queue.take(0) for _ in range(READS + 1)] == [*range(READS), None]
    queue.check_integrity()
    assert abs(queue.predict_s(0) - (READS + 2) * (1 << 20) / 1e9) < 1e-9
    queue.drop(0, READS)
    queue.ended(0, 1 << 20, 0.1, 1 << 20)
    assert queue.take(0) == READS + 1
    assert tier.devices[0].read_rate < 1e9
    assert len(queue) == 0


def test_a_new_capacity_keeps_the_measured_rate() -> None:
    """A device whose capacity changes keeps the rate that was measured."""
    tier = tier_of(4)
    queue: ReadQueue[int] = ReadQueue(tier.devices)
    queue.add(0, 1, 1 << 20)
    assert queue.take(0) == 1
    queue.ended(0, 1 << 20, 0.1, 1 << 20)
    measured = queue.predict_s(1 << 20)
    tier.ready(0, slab_bytes(SLOT, 3), 1e9, 1e9, 0.0)
    assert queue.predict_s(1 << 20) == measured
    tier.gone(0)
    tier.ready(0, slab_bytes(SLOT, 3), 1e9, 1e9, 0.0)
    assert queue.predict_s(1 << 20) < measured


def test_a_segment_on_disk_takes_little_memory() -> None:
    count = 10_000
    tier = tier_of(count)
    segments = [segment_of(number, number / 16) for number in range(count)]
    for number, segment in enumerate(segments):
        # Requests of 16 segments, each with a history of its own.
        segment.hints = Hints(access=AccessRecord(number // 16, 0, number // 16 % 7, float(number // 16)))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for segment in segments:
            entry = tier.save(segment, 1, 1.0, 1e4)
            assert not isinstance(entry, Refusal)
            tier.written(entry, segment, True)
            tier.left(segment, 1, keep=True)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{taken / count:.0f} bytes per segment", file=sys.stderr)
    assert taken / count < 160


# -- slabs of several sizes


def filled(tier: DiskTier, slot_bytes: int, numbers: range, now: float, tenant: TenantId = TENANT) -> int:
    """Write segments of one size as memory evicts them. Returns how many were written."""
    done = 0
    for number in numbers:
        segment = segment_of(number, now, tenant, slot_bytes)
        tier.evicted(tenant, slot_bytes, 2, now)
        entry = tier.admit(segment, 1, 1.0, now)
        if not isinstance(entry, Refusal):
            tier.written(entry, segment, True)
            assert segment.disk == entry
            segment.state = State.GONE
            tier.left(segment, 1, keep=True)
            done += 1
        now += 1.0
    tier.check_integrity()
    return done


def sizes_of(tier: DiskTier) -> dict[int, int]:
    return {each.slot_bytes: each.segments for each in tier.usage()}


def test_places_follow_use() -> None:
    """A size that is not used any more gives its places to one that is, whatever the sizes are."""
    tier = tier_of(300)
    small, large = SLOT, 40 * SLOT
    assert filled(tier, small, range(300), 0.0) == 300
    filled(tier, large, range(1000, 1100), 20_000.0)
    found = sizes_of(tier)
    assert found[large] * large > 0.9 * 300 * small
    filled(tier, small, range(2000, 2400), 60_000.0)
    found = sizes_of(tier)
    assert found[small] > 250
    assert tier.devices[0].used <= tier.devices[0].capacity


def test_sizes_in_use_share_by_their_use() -> None:
    tier = tier_of(400, slabs=2)
    other = 2 * SLOT
    filled(tier, SLOT, range(400), 0.0)
    for turn in range(100):
        filled(tier, SLOT, range(1000 + 4 * turn, 1004 + 4 * turn), 1000.0 + 10 * turn)
        filled(tier, other, range(9000 + 2 * turn, 9002 + 2 * turn), 1005.0 + 10 * turn)
    found = sizes_of(tier)
    # Memory evicted as many bytes of both per second.
    assert 0.4 < found[other] * other / (found[SLOT] * SLOT) < 2.5


def test_a_segment_that_no_slab_makes_room_for_evicts_nothing() -> None:
    tier = tier_of(100)
    filled(tier, SLOT, range(100), 0.0)
    evictions(tier)
    filled(tier, 300 * SLOT, range(1000, 1010), 100.0)
    assert (evictions(tier), sizes_of(tier)) == (0, {SLOT: 100})
    assert len(tier.devices[0].slabs) == 1


def test_many_sizes_of_one_tenant_take_its_part_only() -> None:
    tier, blue = tier_of(200, slabs=30), TenantId("blue")
    for size in range(20):
        filled(tier, SLOT + 4096 * size, range(100 * size, 100 * size + 10), 100.0 * size)
    assert filled(tier, SLOT, range(100), 3000.0, blue) == 100
    used = {each.tenant: 0 for each in tier.usage()}
    for slab in tier.devices[0].slabs.values():
        used[slab.tenant] += slab.nbytes
    assert used[blue] > 0.4 * tier.devices[0].capacity


def test_the_slabs_of_a_tenant_have_a_limit() -> None:
    tier, now = tier_of(10_000), 0.0
    for size in range(MAX_TENANT_SLABS):
        now += 1.0
        assert filled(tier, 4096 * (size + 1), range(size, size + 1), now) == 1
    more = 4096 * (MAX_TENANT_SLABS + 1)
    segment = segment_of(100, now, TENANT, more)
    assert tier.admit(segment, 1, 1.0, now) is Refusal.SLABS
    assert len(tier.devices[0].slabs) == MAX_TENANT_SLABS
    # Another tenant has slabs of its own.
    assert filled(tier, more, range(1), now, TenantId("blue")) == 1
    # The slab that is used least leaves for a size that is used.
    assert filled(tier, more, range(100, 120), now + 50_000.0) > 10
    tier.check_integrity()
