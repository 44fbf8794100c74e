"""The contract that every policy of eviction keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.rules.eviction_scene import Memory, key_of
from tokenlake.hints import NO_HINTS
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed

Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", [Forecast, LeastRecentlyUsed])


def busy(memory: Memory, seed: int, requests: int = 400) -> list[int]:
    """Conversations on a common prefix, one request a second; the hits of each request."""
    draw = random.Random(seed)
    hits, turns = [], [1] * 12
    for second in range(requests):
        conversation = draw.randrange(len(turns))
        turns[conversation] += 1
        prompt = ["common", *((conversation, turn) for turn in range(turns[conversation]))]
        hits.append(memory.request(prompt, float(second)))
        if turns[conversation] > 8:
            turns[conversation] = 1
    return hits


@every_policy
def test_an_empty_order_has_no_victim(make: Make) -> None:
    policy = make()
    assert len(policy) == 0
    with pytest.raises(KeyError):
        policy.victim(0.0)
    assert policy.admits(key_of("a"), NO_HINTS, 0.0)


@every_policy
def test_each_segment_is_evicted_once(make: Make) -> None:
    memory = Memory(make(), 20)
    busy(memory, seed=1)
    assert len(memory.policy) == len(memory.here) == 20
    assert {id(segment) for segment in memory.policy} == {id(segment) for segment in memory.here.values()}
    memory.order(now=1000.0)
    assert len(memory.policy) == 0


@every_policy
def test_asking_for_the_victim_changes_nothing(make: Make) -> None:
    memory = Memory(make(), 20)
    busy(memory, seed=2)
    for _ in range(20):
        coldest = memory.policy.victim(1000.0)
        assert memory.policy.victim(1000.0) is coldest
        memory.policy.remove(coldest, 1000.0, evicted=True)


@every_policy
def test_the_same_calls_lead_to_the_same_evictions(make: Make) -> None:
    memories = [Memory(make(), 20), Memory(make(), 20)]
    for memory in memories:
        busy(memory, seed=3)
    assert memories[0].evicted == memories[1].evicted
    assert memories[0].refused == memories[1].refused


@every_policy
def test_a_hot_segment_outlives_a_scan(make: Make) -> None:
    memory = Memory(make(), 10)
    for second in range(0, 600, 3):
        memory.request(["hot"], float(second))
        memory.store(("passing", second), 0, float(second))
    assert "hot" in memory.here
    assert "hot" not in memory.evicted


@every_policy
def test_iteration_begins_with_the_victim(make: Make) -> None:
    memory = Memory(make(), 20)
    busy(memory, seed=6)
    coldest = memory.policy.victim(400.0)
    assert next(iter(memory.policy)) is coldest
    assert len(list(memory.policy)) == len(memory.policy)
