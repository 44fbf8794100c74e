"""Priority and time to live of primary copies."""

from __future__ import annotations

import random

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore
from tokenlake.memory.eviction import Forecast
from tokenlake.memory.eviction.forecast import HIGH_SHARE
from tokenlake.memory.eviction.records import HIGH_S, Tier
from tokenlake.metrics import Counters

TENANT = TenantId("t")
SLOT_BYTES = 1024
SLOTS = 20
HIGHS = int(HIGH_SHARE * SLOTS)
HIGH, LOW = Hints(priority=1), Hints(priority=-1)


class Scene:
    """A store of one region, and primary copies by number."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.store = SegmentStore(1, slots * SLOT_BYTES, 0.45, Counters(), Forecast)
        self.segments: dict[int, Segment] = {}

    def add(self, number: int, now: float, hints: Hints = NO_HINTS, kind: Kind = Kind.PRIMARY) -> Segment:
        key = SegmentKey(number.to_bytes(32, "little"))
        segment = self.store.reserve(TENANT, SLOT_BYTES, key, kind, 0, now, hints)
        assert isinstance(segment, Segment), segment
        self.store.publish(segment, b"", now)
        self.store.unpin(segment)
        self.segments[number] = segment
        self.store.check_integrity()
        return segment

    def here(self) -> list[int]:
        present = {segment.key for segment in self.store.segments()}
        return [number for number, segment in self.segments.items() if segment.key in present]

    def gone(self) -> list[int]:
        here = self.here()
        return [number for number in self.segments if number not in here]


def test_high_priority_leaves_last_and_low_first() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, float(number), {0: HIGH, 1: HIGH, SLOTS - 1: LOW, SLOTS - 2: LOW}.get(number, NO_HINTS))
    for number in range(SLOTS, SLOTS + 4):
        scene.add(number, 100.0 + number)
    assert set(scene.gone()) >= {SLOTS - 1, SLOTS - 2}
    assert not set(scene.gone()) & {0, 1}


def test_low_priority_leaves_in_the_order_of_access() -> None:
    """Also where all accesses lie within one second."""
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, number / 1000, LOW)
    scene.store.touch([scene.segments[0]], 0.1)
    for number in range(SLOTS, 2 * SLOTS - 1):
        scene.add(number, 0.1 + number / 1000, LOW)
    assert scene.gone() == list(range(1, SLOTS))


def test_expired_segments_leave_first_and_an_access_renews() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, float(number), Hints(ttl_s=60.0) if number in (17, 18) else NO_HINTS)
    scene.store.touch([scene.segments[18]], 70.0)
    scene.add(100, 90.0)
    assert scene.gone() == [17]
    # The last access was at 70, so the time to live has not passed at 129, and has at 131.
    scene.add(101, 129.0)
    assert 18 in scene.here()
    scene.add(102, 131.0)
    assert 18 in scene.gone()


def test_expired_segments_leave_before_cached_copies() -> None:
    scene = Scene()
    for number in range(SLOTS):
        cached = number < 2
        scene.add(number, float(number), Hints(ttl_s=5.0) if number == 10 else NO_HINTS, Kind(1 + (not cached)))
    scene.add(100, 100.0, kind=Kind.DIRTY)
    assert scene.gone() == [10]


def test_high_priority_is_bounded_to_the_newest() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, float(number), HIGH)
    for number in range(100, 100 + SLOTS - HIGHS):
        scene.add(number, float(number))
    order = next(iter(scene.store.pools())).primary
    high = [number for number in scene.here() if order.rank(scene.segments[number], 200.0)[0] == Tier.HIGH]
    assert high == list(range(SLOTS - HIGHS, SLOTS))
    assert list(order)[-HIGHS:] == [scene.segments[number] for number in high]


def test_a_prompt_beyond_the_bound_keeps_its_beginning() -> None:
    scene = Scene()
    prompt = [scene.add(number, 0.0, HIGH) for number in range(HIGHS + 3)]
    scene.store.touch(prompt, 1.0, HIGH)
    for number in range(100, 100 + SLOTS - HIGHS):
        scene.add(number, float(number))
    assert scene.gone() == [HIGHS, HIGHS + 1, HIGHS + 2]


def test_high_priority_ends_without_an_access() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, float(number), HIGH if number < 2 else NO_HINTS)
    scene.store.touch([scene.segments[number] for number in range(1, SLOTS)], 10.0 + HIGH_S)
    for number in range(100, 100 + SLOTS):
        scene.add(number, 20.0 + HIGH_S)
    assert 0 in scene.gone()
    assert 1 in scene.here()


def test_a_time_to_live_goes_on_when_high_priority_ends() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, 0.0, Hints(priority=1, ttl_s=1.5 * HIGH_S) if number == 0 else NO_HINTS)
    others = [scene.segments[number] for number in range(1, SLOTS)]
    for now in (0.9 * HIGH_S, 1.4 * HIGH_S):
        # No segment is stored, but the policy is told the time.
        scene.store.touch(others, now)
        next(iter(scene.store.pools())).primary.expired(now)
    scene.add(100, 1.5 * HIGH_S + 1.0)
    assert scene.gone() == [0]


def test_a_time_to_live_has_passed_at_its_end() -> None:
    """In floating point, this access + time to live - access is less than the time to live."""
    used, ttl = 90.1, 0.3
    assert used + ttl - used < ttl
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, used if number == 7 else 0.0, Hints(ttl_s=ttl) if number == 7 else NO_HINTS)
    scene.add(100, used + ttl)
    assert scene.gone() == [7]


def test_later_hints_change_the_tier_and_are_no_access() -> None:
    scene = Scene()
    for number in range(SLOTS):
        scene.add(number, float(number))
    first, last = scene.segments[0], scene.segments[SLOTS - 1]
    scene.store.hint([last], LOW, 50.0)
    scene.store.hint([first], HIGH, 50.0)
    scene.store.hint([scene.segments[7]], Hints(ttl_s=1.0), 50.0)
    scene.add(100, 60.0)
    scene.add(101, 61.0)
    assert scene.gone() == [7, SLOTS - 1]
    assert 0 in scene.here()


def test_any_mixture_keeps_integrity() -> None:
    draw = random.Random(5)
    scene = Scene()
    now = 0.0
    choices = [NO_HINTS, HIGH, LOW, Hints(ttl_s=3.0), Hints(priority=1, ttl_s=7.0), Hints(priority=-1, ttl_s=2.0)]
    for number in range(600):
        now += draw.choice((0.0, 0.3, 2.0))
        here = scene.here()
        if here and draw.random() < 0.5:
            segment = scene.segments[draw.choice(here)]
            if draw.random() < 0.5:
                scene.store.touch([segment], now, draw.choice([None, *choices]))
            else:
                scene.store.hint([segment], draw.choice(choices), now)
            scene.store.check_integrity()
        else:
            scene.add(number, now, draw.choice(choices))
    order = next(iter(scene.store.pools())).primary
    assert len(order) == len(set(order)) == SLOTS
