"""The forecast of re-use: model, ghosts, statistics."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.rules.eviction_scene import Memory, key_of, size_of
from tokenlake.hints import NO_HINTS, AccessRecord, Hints, Outlook
from tokenlake.identity import TenantId
from tokenlake.memory import SegmentStore
from tokenlake.memory.eviction import LeastRecentlyUsed, odds
from tokenlake.memory.eviction.forecast import Forecast
from tokenlake.metrics import Counters

SHORT = Hints(access=AccessRecord(segments=2, hits=1, turn=1, gap_s=30.0, unshared=0))
"""Hints of a prompt that appended one segment: it comes again after half a minute."""
LONG = Hints(access=AccessRecord(segments=40, hits=1, gap_s=30.0, unshared=5))
"""Hints of a prompt that does not come again."""


def conversations(memory: Memory, seed: int, seconds: int = 1500) -> None:
    """One prompt a second. Half of them come again; their access records tell which."""
    draw = random.Random(seed)
    due: list[tuple[float, int]] = []
    for second in range(seconds):
        if due and due[0][0] <= second:
            _, conversation = due.pop(0)
        else:
            conversation = second
        goes_on = draw.random() < 0.5
        if goes_on:
            due.append((second + 30.0, conversation))
        memory.request([(conversation, depth) for depth in range(3)], float(second), SHORT if goes_on else LONG)
        if second % 100 == 0 and isinstance(memory.policy, Forecast):
            memory.policy.check_integrity()


def test_it_hits_more_than_lru() -> None:
    """So many prompts come once that no segment stays half a minute under LRU."""

    def hits(memory: Memory) -> int:
        draw, found = random.Random(1), 0
        due: list[tuple[float, int, int]] = []
        for second in range(1500):
            _, conversation, turn = due.pop(0) if due and due[0][0] <= second else (0.0, second, 0)
            if goes_on := turn < 3 and (turn > 0 or draw.random() < 0.5):
                due.append((second + 30.0, conversation, turn + 1))
            said = Hints(Outlook.GOES_ON if goes_on else Outlook.OVER)
            found += memory.request([(conversation, depth) for depth in range(turn + 1)], float(second), said)
        return found

    assert hits(Memory(Forecast(), 24)) > 2 * hits(Memory(LeastRecentlyUsed(), 24))


def test_a_refused_segment_is_valued_more_at_its_next_try() -> None:
    """Eight segments are accessed over and over, beside a scan: the scan is refused, and known when it comes again."""
    policy = Forecast()
    memory = Memory(policy, 8)
    for second in range(2000):
        memory.request([("kept", second % 8)], float(second))
        memory.store(("passing", second), 0, float(second))
    assert {name[0] for name in memory.here if isinstance(name, tuple)} == {"kept"}
    again, new = key_of(memory.refused[-1]), key_of("new")
    values = [policy.retention_value_of_new(key, NO_HINTS, 1999.5) for key in (again, new)]
    assert values[0] > values[1]
    assert not policy.admits(new, NO_HINTS, 1999.5)
    assert policy.retention_value_of_new(new, NO_HINTS, 2001.0) > values[1]


def test_the_deepest_segment_of_a_request_leaves_first() -> None:
    """Segments behind a gap are touched before those that fill the gap are stored."""
    memory = Memory(Forecast(), 10)
    for depth in (5, 9, 7, 6, 8):
        memory.store(depth, depth, 1.0)
    memory.policy.remove(memory.here[9], 2.0, evicted=False)
    memory.policy.insert(memory.here[9], 2.0)
    assert [segment.depth for segment in memory.policy] == [9, 8, 7, 6, 5]
    assert memory.order(3.0) == [9, 8, 7, 6, 5]


def test_touches_within_a_second_are_one_access() -> None:
    """A segment touched a thousand times in one second has the value of one accessed once."""
    memory = Memory(Forecast(), 60)
    conversations(memory, seed=8)
    memory.store("twice", 0, 1500.0, SHORT)
    memory.store("once", 0, 1520.0, SHORT)
    for step in range(1000):
        memory.request(["once"], 1520.0 + step / 1001, SHORT)
    memory.request(["twice"], 1520.999, SHORT)
    memory.store("other", 0, 1520.999, SHORT)
    once, other, twice = (
        memory.policy.retention_value(memory.here[name], 1521.0) for name in ("once", "other", "twice")
    )
    assert once == other != twice


def test_an_access_while_out_of_order_is_learned_at_its_age() -> None:
    """A search for a victim takes pinned segments out of the order. An access there does not make them younger."""
    policies = Forecast(), Forecast()
    for policy in policies:
        memory = Memory(policy, 50)
        for second in range(0, 2000, 20):
            memory.request([second // 20 % 2], float(second))
            if policy is policies[0]:
                pinned = memory.here[(second // 20 + 1) % 2] if second else memory.here[0]
                policy.remove(pinned, second + 19.0, evicted=False)
                policy.insert(pinned, second + 19.5)
        policy.check_integrity()
    assert policies[0].odds.save() == policies[1].odds.save()


def test_hints_distinguish_requests_and_may_change() -> None:
    memory = Memory(Forecast(), 40)
    goes_on, over = Hints(Outlook.GOES_ON), Hints(Outlook.OVER)
    for second in range(1500):
        # Every other prompt comes again, once, half a minute later.
        memory.request([second], float(second), over if second % 2 else goes_on)
        if second % 2 == 0 and second >= 30:
            memory.request([second - 30], second + 0.5, over)
    policy, new = memory.policy, key_of("new")
    assert policy.retention_value_of_new(new, goes_on, 1500.0) > 2 * policy.retention_value_of_new(new, over, 1500.0)
    memory.store("late", 0, 1500.0, goes_on)
    segment = memory.here["late"]
    retention_value = policy.retention_value(segment, 1500.0)
    segment.hints = over
    policy.hints_changed(segment, 1501.0)
    assert policy.retention_value(segment, 1501.0) < retention_value / 2


def test_nodes_without_samples_do_not_dilute_a_merge() -> None:
    learned, others = odds.Odds(), [odds.Odds() for _ in range(3)]
    features = learned.features(1, SHORT)
    for _ in range(50):
        learned.add(features, 5, 1.0, 1.0)
        learned.learn()
    for other in others:
        other.merge(learned.save())
        learned.merge(odds.Odds().save())
        assert other.retention_value(features)[5] == pytest.approx(learned.retention_value(features)[5], rel=0.01)
    assert others[0].retention_value(features)[5] > 2 * odds.Odds().retention_value(features)[5]


def test_nodes_that_merge_learn_as_fast_as_one_that_sees_all() -> None:
    """Eight nodes see an eighth of the samples each, and each merges with the next ones in turn."""

    def learned(nodes: int, exchanging: int, turns: int) -> float:
        models = [odds.Odds() for _ in range(nodes)]
        for model in models:
            model.nodes = exchanging
        for turn in range(turns):
            for sample in range(16):
                model = models[sample % nodes]
                model.add(model.features(1, SHORT), 5, 0.75, 1.0)
            for model in models:
                model.learn()
            saved = [model.save() for model in models]
            for number in range(nodes if nodes > 1 else 0):
                models[(number + 1 + turn % (nodes - 1)) % nodes].merge(saved[number])
        return models[0].retention_value(models[0].features(1, SHORT))[5]

    goal, unaware, eight = learned(1, 1, 200), learned(8, 1, 3), learned(8, 8, 3)
    assert abs(eight - goal) < 0.1 * goal < abs(unaware - goal)


def test_a_false_report_does_not_stop_the_learning() -> None:
    here, other = odds.Odds(), odds.Odds()
    weights = np.frombuffer(saved_fields(other.save())[WEIGHTS]).copy()
    # In a fresh model only the sums are 1.
    weights[weights == 1.0] = odds.MAX_WEIGHT / 2
    here.merge(changed(other.save(), WEIGHTS, weights.tobytes()))
    features = here.features(1, SHORT)
    before = here.retention_value(features)[5]
    for _ in range(200):
        here.add(features, 5, 1.0, 100.0)
        here.learn()
    assert here.retention_value(features)[5] > 2 * before


def test_values_are_the_best_rates_of_accesses() -> None:
    """Nearly all segments are accessed in the third bucket, on average in its middle."""
    hazard = np.full(odds.AGES, 1e-9)
    hazard[2] = 1.0
    retention_value = odds.gittins(hazard)
    middle = (odds.EDGES[2] + odds.EDGES[3]) / 2
    assert retention_value[0] == pytest.approx(1 / middle, rel=0.01)
    assert retention_value[2] == pytest.approx(2 / (odds.EDGES[3] - odds.EDGES[2]), rel=0.01)
    assert retention_value[3:].max() < 1e-6


def test_more_accesses_are_valued_no_less() -> None:
    """A parent is in every access of its child, so that it is evicted later, also where several nodes hold a prompt."""
    memory = Memory(Forecast(), 60)
    conversations(memory, seed=5)
    learned = memory.odds
    for hints in (SHORT, LONG, NO_HINTS):
        retention_value = np.array(
            [learned.retention_value(learned.features(accesses, hints)) for accesses in range(1, 40)]
        )
        assert (np.diff(retention_value, axis=0) >= -1e-12).all()
        assert (np.diff(retention_value, axis=0) > 1e-6).any()


def test_the_state_is_bounded() -> None:
    policy = Forecast()
    memory = Memory(policy, 10)
    sizes = []
    for second in range(5000):
        memory.request([second % 10], 7.0 * second)
        if second in (500, 4999):
            sizes.append(size_of(policy))
    assert sizes[1] < 1.2 * sizes[0]


def test_labels_without_room_count_by_outlook() -> None:
    known = odds.Odds()
    for number in range(2 * odds.LABELS):
        known.features(1, Hints(category=f"kind {number}"))
    features = [known.features(1, Hints(outlook, "late", "stop")) for outlook in Outlook]
    assert features == [known.features(1, Hints(outlook)) for outlook in Outlook]
    assert len(set(features)) == 3


def test_the_last_access_of_an_evicted_segment() -> None:
    policy = Forecast()
    memory = Memory(policy, 2)
    for name, access in (("a", AccessRecord(1, 0, 1)), ("b", AccessRecord(1, 0, 2))):
        memory.store(name, 0, 5.0, Hints(access=access))
    assert policy.last_access([key_of("a")], 6.0) is None
    gone = str(memory.evict(10.0))
    assert policy.last_access([key_of(gone), key_of("never")], 12.0) == (
        0,
        AccessRecord(1, 0, {"a": 1, "b": 2}[gone]),
        7.0,
    )
    memory.store(gone, 0, 13.0, Hints(access=AccessRecord(1, 0, 3)))
    assert policy.last_access([key_of(gone)], 14.0) is None
    assert policy.last_access([key_of("never")], 14.0) is None


def test_it_learns_without_accesses() -> None:
    policy = Forecast()
    memory = Memory(policy, 3000)
    for number in range(3000):
        memory.store(number, 0, number / 10)
    learned = [policy.odds.save()]
    for second in range(300, 4000):
        policy.retention_value(memory.here[0], float(second))
        if policy.odds.save() != learned[-1]:
            learned.append(policy.odds.save())
    assert len(learned) > 1


LABELS, WEIGHTS = 1, 2
"""Fields of the saved statistics."""


def saved_fields(saved: bytes) -> list[Any]:
    return list(msgspec.msgpack.decode(saved))


def changed(saved: bytes, field: int, value: object) -> bytes:
    fields = saved_fields(saved)
    fields[field] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "damaged",
    [
        b"x",
        b"\xc1",
        odds.Odds().save()[:-1],
        odds.Odds().save() + b"x",
        changed(odds.Odds().save(), LABELS, ((0, "", ""), (1, "", ""), (1, "", ""))),
        changed(
            odds.Odds().save(), WEIGHTS, np.full(len(saved_fields(odds.Odds().save())[WEIGHTS]) // 8, 1e308).tobytes()
        ),
    ],
)
def test_damaged_statistics_change_nothing(damaged: bytes) -> None:
    policy = Forecast()
    with pytest.raises(ValueError, match="statistics of re-use"):
        policy.odds.merge(damaged)
    assert policy.odds.save() == odds.Odds().save()
    assert policy.retention_value_of_new(key_of("a"), NO_HINTS, 0.0) > 0


def test_the_model_of_a_pool_that_lost_its_memory() -> None:
    """The model of a pool that lost its memory twice is the last that it learned."""
    store, red, slot_bytes = SegmentStore(1, 1 << 16, 0.45, Counters(), policy=Forecast), TenantId("red"), 1024
    features = odds.Odds().features(1, SHORT)

    def lives(steps: int) -> float:
        """The pool gets the region, learns, and loses it. Returns the value by its model afterwards."""
        pool = store.pool(red, slot_bytes)
        assert pool is not None
        model = store.models.of(pool.id)
        for _ in range(steps):
            model.add(features, 5, 1.0, 1.0)
            model.learn()
        value = model.retention_value(features)[5]
        assert store.drain(pool, 0.0)[1] == 0
        assert store.models.of(pool.id).retention_value(features)[5] == pytest.approx(value)
        store.regions.made(store.regions.make(store.regions.unmade))
        return value

    assert lives(1) < lives(20)
