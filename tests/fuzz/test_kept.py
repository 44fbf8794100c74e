"""Survivors that name anything: the rules of kept memory stay whole, and nothing is left when they are gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_kept import KEYS, kept_region, raw, record_of
from tests.fuzz.hostile import hostile
from tests.profiles import examples
from tests.sim.arena import SHARDS, SLOT_BYTES, SLOTS
from tokenlake.core import events, instructions
from tokenlake.wire import engine
from tokenlake.wire.slots import SlotRef

LEASES = st.integers(1, 3)
places = st.builds(SlotRef, st.integers(0, 2), st.integers(0, SLOTS), st.integers(0, 2))
slots = st.lists(places, max_size=4).map(lambda some: b"".join(place.pack() for place in some))
leases = st.lists(st.tuples(LEASES, st.sampled_from([4, 4, 4, 5]), st.integers(0, 1), slots), max_size=3).map(tuple)
writes = st.lists(st.tuples(LEASES, slots), max_size=2).map(tuple)
connections = st.integers(1, 3)
requests = st.one_of(
    st.builds(engine.Regrant, st.just(1), leases, writes, st.booleans()),
    st.builds(engine.Regrant, st.just(1), leases, writes, st.booleans()),
    hostile(engine.Regrant),
    st.builds(lambda lease, stop: engine.Release(((lease, 0, stop),)), LEASES, st.integers(0, 5)),
    st.builds(engine.Abort, LEASES),
    st.builds(lambda write, at: engine.Commit(1, write, (at,), 1, bytes(8)), LEASES, st.integers(0, 3)),
    st.builds(engine.Attach, st.just(1), LEASES),
    st.just(engine.Prepare(1, KEYS[0] + KEYS[1], 0)),
)
steps = st.one_of(
    st.builds(events.Requested, connections, requests),
    st.builds(events.Requested, connections, requests),
    st.builds(
        lambda at: events.SegmentsKept(
            "red", SLOT_BYTES, SlotRef(at // SLOTS, at % SLOTS, 1).pack(), (record_of(KEYS[at % 4]),)
        ),
        st.integers(0, 2 * SLOTS - 1),
    ),
    st.builds(events.SurvivorGone, st.integers(7, 9)),
    st.builds(events.EvictRequested, st.just(1), st.just("red"), st.sampled_from([b"", bytes(KEYS[0])])),
    st.just(events.SegmentsKeptDone()),
    st.just(events.Tick()),
)


@settings(max_examples=examples(300))
@given(st.lists(steps, max_size=30))
def test_survivors_that_name_anything(story: list[Any]) -> None:
    core, now = raw(), 0.0
    kept_region(core, 0)
    kept_region(core, 1)
    core.handle(events.MemoryKept(1, 2, ((7, "red"), (8, "red"), (9, "red")), unchecked=True), 0.0)
    for connection in (1, 2, 3):
        joined = events.Joined(connection, 1, "red", SLOT_BYTES, SHARDS, 16, 5 + connection // 3, 0, 6 + connection)
        core.handle(joined, 0.0)
    done = False
    for event in [*story, events.SegmentsKeptDone()]:
        if isinstance(event, events.SegmentsKept | events.SegmentsKeptDone) and done:
            continue
        done = done or isinstance(event, events.SegmentsKeptDone)
        if isinstance(event, events.Tick):
            now = max(now, core.next_wake() or now)
        try:
            core.handle(event, now)
        except ValueError:
            assert isinstance(event, events.Requested)
        core.check_integrity()
    for connection in (1, 2, 3):
        core.handle(events.ProcessGone(connection), now)
    for _ in range(100):
        now = max(now, core.next_wake() or now)
        for order in core.handle(events.Tick(), now):
            if isinstance(order, instructions.MakeRegion):
                core.handle(events.RegionReady(order.region), now)
        core.check_integrity()
    assert core.idle(), core.census()
    assert not core.levels()
