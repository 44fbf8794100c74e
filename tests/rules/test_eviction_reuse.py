"""The learned re-use index: statistics, ghosts, classes."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.rules.eviction_scene import Memory, key_of, size_of
from tokenlake.hints import NO_HINTS, Hints, Outlook
from tokenlake.store.eviction import LeastRecentlyUsed, hazard
from tokenlake.store.eviction.hazard import ACCESSES, AGES, EDGES, LABELS, Hazards, retention_values
from tokenlake.store.eviction.reuse import LearnedReuse

GOES_ON, OVER = Hints(outlook=Outlook.GOES_ON), Hints(outlook=Outlook.OVER)


def conversations(memory: Memory, seed: int, requests: int = 1500, hinted: bool = False) -> int:
    """One request a second. Half of the prompts come once; the others come again three times, each after half a minute.
    Returns the hits."""
    draw = random.Random(seed)
    hits = 0
    due: list[tuple[float, int, int]] = []
    for second in range(requests):
        if due and due[0][0] <= second:
            _, conversation, turn = due.pop(0)
        else:
            conversation, turn = second, 0
        goes_on = turn < 3 and (turn > 0 or draw.random() < 0.5)
        if goes_on:
            due.append((second + 30.0, conversation, turn + 1))
        hints = (GOES_ON if goes_on else OVER) if hinted else NO_HINTS
        hits += memory.request([(conversation, depth) for depth in range(turn + 1)], float(second), hints)
        if second % 100 == 0 and isinstance(memory.policy, LearnedReuse):
            memory.policy.check_integrity()
    return hits


def test_it_hits_more_than_lru() -> None:
    """So many prompts come once that under LRU every segment is evicted before it comes again half a minute later."""
    lru, learned = Memory(LeastRecentlyUsed(), 24), Memory(LearnedReuse(), 24)
    assert conversations(learned, seed=1) > 2 * conversations(lru, seed=1)


def test_an_access_while_out_of_order_is_learned_at_its_age() -> None:
    """A search for a victim takes pinned segments out of the order. An access there does not make them younger."""
    policies = LearnedReuse(), LearnedReuse()
    for policy in policies:
        memory = Memory(policy, 50)
        for second in range(0, 2000, 20):
            memory.request([second // 20 % 2], float(second))
            if policy is policies[0]:
                pinned = memory.here[(second // 20 + 1) % 2] if second else memory.here[0]
                policy.remove(pinned, second + 19.0, evicted=False)
                policy.insert(pinned, second + 19.5)
        policy.check_integrity()
    assert policies[0].save() == policies[1].save()


def test_hints_distinguish_requests() -> None:
    memory = Memory(LearnedReuse(), 40)
    conversations(memory, seed=2, hinted=True)
    policy = memory.policy
    assert policy.retention_value_of_new(key_of("new"), GOES_ON, 1500.0) > 2 * policy.retention_value_of_new(
        key_of("new"), OVER, 1500.0
    )


def test_later_hints_move_a_segment_to_another_class() -> None:
    memory = Memory(LearnedReuse(), 40)
    conversations(memory, seed=3, hinted=True)
    memory.store("late", 0, 1500.0, GOES_ON)
    segment = memory.here["late"]
    retention_value = memory.policy.retention_value(segment, 1500.0)
    segment.hints = OVER
    memory.policy.hints_changed(segment, 1501.0)
    assert memory.policy.retention_value(segment, 1501.0) < retention_value / 2
    memory.policy.check_integrity()  # type: ignore[attr-defined]


def test_a_refused_segment_is_valued_more_at_its_next_try() -> None:
    """Eight segments are accessed over and over beside a scan. The policy refuses the scanned segments; it values one
    of them more when it comes again."""
    policy = LearnedReuse()
    memory = Memory(policy, 8)
    for second in range(2000):
        memory.request([("kept", second % 8)], float(second))
        memory.store(("passing", second), 0, float(second))
    assert {name[0] for name in memory.here if isinstance(name, tuple)} == {"kept"}
    policy.check_integrity()
    again, new = key_of(memory.refused[-1]), key_of("new")
    values = [policy.retention_value_of_new(key, NO_HINTS, 1999.5) for key in (again, new)]
    assert values[0] > values[1]
    assert not policy.admits(new, NO_HINTS, 1999.5)
    policy.check_integrity()
    assert policy.retention_value_of_new(new, NO_HINTS, 2001.0) > values[1]


def test_the_state_is_bounded() -> None:
    policy = LearnedReuse()
    memory = Memory(policy, 10)
    sizes = []
    for second in range(10_000):
        memory.request([second % 10], 7.0 * second)
        if second in (1000, 9999):
            sizes.append(size_of(policy))
    assert sizes[1] < 1.2 * sizes[0]


@settings(max_examples=examples(50))
@given(st.lists(st.lists(st.floats(0, 1), min_size=AGES, max_size=AGES), min_size=ACCESSES, max_size=ACCESSES))
def test_values_never_rise_with_age_nor_fall_with_accesses(hazards: list[list[float]]) -> None:
    table = retention_values(np.array(hazards).reshape(1, ACCESSES, AGES))
    assert np.isfinite(table).all()
    assert (table >= 0).all()
    assert (np.diff(table, axis=1) <= 0).all()
    assert (np.diff(table, axis=0) >= 0).all()


def test_values_are_the_best_rates_of_accesses() -> None:
    """All segments are accessed in the third bucket, on average in its middle. The value never rises with age."""
    hazards = np.zeros((1, ACCESSES, AGES))
    hazards[:, :, 2] = 1.0
    table = retention_values(hazards)
    middle = (EDGES[2] + EDGES[3]) / 2
    assert table[0][:3] == pytest.approx([1 / middle] * 3, rel=0.01)
    assert (table[0][3:] == 0).all()


def test_labels_without_room_count_by_outlook() -> None:
    hazards = Hazards()
    room = LABELS - 2
    labels = [hazards.label(Hints(category=f"kind {number}")) for number in range(2 * LABELS)]
    assert labels[: room - 1] == list(range(1, room))
    assert set(labels[room - 1 :]) == {hazard.UNLABELLED}
    outlooks = [hazards.label(Hints(outlook, "late", "stop")) for outlook in Outlook]
    assert outlooks == [hazards.label(Hints(outlook)) for outlook in Outlook] == [0, room, room + 1]
    assert len(hazards.retention_value) == LABELS * ACCESSES


def test_merged_labels_without_room_are_left_out() -> None:
    here, there = Hazards(), Hazards()
    for number in range(LABELS):
        here.label(Hints(category=f"kind {number}"))
    there.count_unused(there.class_of(1, there.label(Hints(Outlook.GOES_ON, "other"))), 3, 1000.0)
    there.learn()
    here.merge(there.save())
    retention_value = [here.retention_value[here.class_of(1, here.label(hints))] for hints in (GOES_ON, OVER)]
    assert retention_value[0] == retention_value[1]


def test_equal_statistics_lead_to_equal_decisions() -> None:
    """A policy that restores the statistics of another decides like that one."""
    experienced = Memory(LearnedReuse(), 20)
    conversations(experienced, seed=5, hinted=True)
    saved = experienced.policy.save()
    lives = [Memory(LearnedReuse(), 20), Memory(LearnedReuse(), 20)]
    for life in lives:
        life.policy.restore(saved)
        assert life.policy.save() == saved
        conversations(life, seed=6, requests=300, hinted=True)
    assert lives[0].evicted == lives[1].evicted
    fresh = Memory(LearnedReuse(), 20)
    conversations(fresh, seed=6, requests=300, hinted=True)
    assert fresh.evicted != lives[0].evicted


def test_saving_changes_nothing() -> None:
    memories = [Memory(LearnedReuse(), 20), Memory(LearnedReuse(), 20)]
    for second in range(300):
        for memory in memories:
            memory.request([second % 37], float(second))
        memories[0].policy.save()
    assert memories[0].evicted == memories[1].evicted


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved[:-1],
        lambda saved: saved + b"x",
        lambda saved: b"\xc1" + saved,
        lambda saved: _changed(saved, version=9),
        lambda saved: _changed(saved, labels=()),
        lambda saved: _changed(saved, labels=((0, "", ""), (0, "", ""))),
        lambda saved: _changed(saved, ended=b""),
        lambda saved: _changed(saved, used=np.full(ACCESSES * AGES, np.nan).tobytes()),
        lambda saved: _changed(saved, ended=np.full(ACCESSES * AGES, -1.0).tobytes()),
        lambda saved: _changed(saved, ended=np.full(ACCESSES * AGES, 1e308).tobytes()),
        lambda saved: _changed(
            saved, labels=((0, "", ""), (1, "", ""), (1, "", "")), ended=_counts(2), used=_counts(2)
        ),
    ],
)
def test_damaged_statistics_change_nothing(damage: object) -> None:
    saved = LearnedReuse().save()
    policy = LearnedReuse()
    with pytest.raises(ValueError, match="statistics of re-use"):
        policy.restore(damage(saved))  # type: ignore[operator]
    assert policy.save() == saved


def _counts(labels: int) -> bytes:
    return np.zeros(labels * ACCESSES * AGES).tobytes()


def _changed(saved: bytes, **changes: object) -> bytes:
    fields = dict(zip(("version", "labels", "ended", "used"), msgspec.msgpack.decode(saved), strict=True))
    return msgspec.msgpack.encode(list((fields | changes).values()))
