"""The contract that every policy of eviction keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.rules.eviction_scene import Memory, key_of
from tokenlake.hints import NO_HINTS
from tokenlake.store.eviction import POLICIES, EvictionPolicy, LeastRecentlyUsed, policy_named

Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=list(POLICIES))
MINUTE = 60.0


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


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fifo' is no policy of eviction; there are reuse, forecast, lru$"):
        policy_named("fifo")


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


valuing = pytest.mark.parametrize("make", [make for name, make in POLICIES.items() if name not in ("lru", "forecast")])
"""Policies that value an access before they have learned anything."""


@valuing
def test_a_return_to_the_order_is_no_access(make: Make) -> None:
    """A segment leaves the order and returns: its value is at most that of a segment accessed once, just now."""
    memory = Memory(make(), 100)
    for number in range(10):
        memory.store(number, 0, float(10 * number))
    pinned = memory.here[0]
    memory.policy.remove(pinned, 100.0, evicted=False)
    memory.policy.insert(pinned, 110.0)
    retention_value = memory.policy.retention_value(pinned, 110.0)
    memory.store("new", 0, 110.0)
    assert retention_value <= memory.policy.retention_value(memory.here["new"], 110.0)


@valuing
def test_touches_within_a_second_are_one_access(make: Make) -> None:
    """A segment touched a thousand times in one second leaves before one that was accessed twice."""
    memory = Memory(make(), 3)
    memory.store("twice", 0, 0.0)
    memory.request(["twice"], 20.0)
    memory.store("once", 0, 20.0)
    for step in range(1000):
        memory.request(["once"], 20.0 + step / 1001)
    for number in range(8):
        memory.store(number, 0, 30.0 + number)
    gone = [*memory.evicted, *memory.order(40.0)]
    assert gone.index("once") < gone.index("twice")


@every_policy
def test_a_hot_segment_outlives_a_scan(make: Make) -> None:
    memory = Memory(make(), 10)
    for second in range(0, 600, 3):
        memory.request(["hot"], float(second))
        memory.store(("passing", second), 0, float(second))
    assert "hot" in memory.here
    assert "hot" not in memory.evicted


Requests = list[tuple[int, int, int, float]]
"""Of each request: stem, branch, length, and the seconds since the previous request."""


def requests(most: int) -> st.SearchStrategy[Requests]:
    pauses = st.sampled_from([0.1, 1.0, 7.0, 90.0, 700.0])
    return st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6), pauses), max_size=most)


def paths_of(asked: Requests) -> list[tuple[float, list[object]]]:
    """Times and segments of requests for prompts of a tree."""
    now = 0.0
    prompts: list[tuple[float, list[object]]] = []
    for stem, branch, length, pause in asked:
        now += pause
        prompts.append((now, [(stem, depth) if depth < 2 else (stem, branch, depth) for depth in range(length)]))
    return prompts


ordered = pytest.mark.parametrize("name", ["lru", "reuse"])


@ordered
@settings(max_examples=examples(60))
@given(asked=requests(120))
def test_children_are_evicted_before_their_parents(name: str, asked: Requests) -> None:
    memory = Memory(POLICIES[name](), 1000)
    prompts = paths_of(asked)
    for now, prompt in prompts:
        memory.request(prompt, now)
    gone = memory.order(prompts[-1][0] if prompts else 0.0)
    for _, prompt in prompts:
        places = [gone.index(segment) for segment in prompt]
        assert places == sorted(places, reverse=True)


@ordered
@settings(max_examples=examples(60))
@given(asked=requests(40), nodes=st.integers(2, 3), later=st.sampled_from([0.0, 20.0, 3000.0]))
def test_a_parent_is_valued_no_less_than_a_child_elsewhere(
    name: str, asked: Requests, nodes: int, later: float
) -> None:
    """Each node has only some of the segments; all nodes restored the same statistics."""
    experienced = Memory(POLICIES[name](), 20)
    busy(experienced, seed=4)
    memories = [Memory(POLICIES[name](), 1000) for _ in range(nodes)]
    for memory in memories:
        memory.policy.restore(experienced.policy.save())
    prompts = paths_of(asked)
    for now, prompt in prompts:
        for depth in reversed(range(len(prompt))):
            memories[depth % nodes].store(prompt[depth], depth, now)
    for _, prompt in prompts:
        end = prompts[-1][0] + later
        held = [memories[depth % nodes] for depth in range(len(prompt))]
        retention_value = [
            memory.policy.retention_value(memory.here[name], end) for memory, name in zip(held, prompt, strict=True)
        ]
        assert retention_value == sorted(retention_value, reverse=True)


@pytest.mark.parametrize("make", [LeastRecentlyUsed])
def test_a_policy_without_statistics_saves_nothing(make: Make) -> None:
    policy = make()
    assert policy.save() == b""
    policy.restore(b"")
    with pytest.raises(ValueError, match="learns nothing"):
        policy.restore(b"x")


@pytest.mark.parametrize("name", ["reuse", "forecast"])
def test_policies_that_merge_become_alike(name: str) -> None:
    experienced, fresh = Memory(POLICIES[name](), 20), Memory(POLICIES[name](), 20)
    busy(experienced, seed=5)
    key = key_of("new")
    apart = []
    for _ in range(6):
        retention_value = [
            memory.policy.retention_value_of_new(key, NO_HINTS, 400.0) for memory in (experienced, fresh)
        ]
        apart.append(abs(retention_value[0] - retention_value[1]))
        saved = [memory.policy.save() for memory in (experienced, fresh)]
        fresh.policy.merge(saved[0])
        experienced.policy.merge(saved[1])
    assert apart[0] > 0
    assert apart[-1] <= apart[0] / 100


@every_policy
def test_other_data_is_not_merged(make: Make) -> None:
    policy = make()
    saved = policy.save()
    with pytest.raises(ValueError, match="statistics"):
        policy.merge(b"junk")
    assert policy.save() == saved


@pytest.mark.parametrize("name", ["lru", "reuse", "forecast"])
def test_iteration_begins_with_the_victim(name: str) -> None:
    memory = Memory(POLICIES[name](), 20)
    busy(memory, seed=6)
    coldest = memory.policy.victim(400.0)
    assert next(iter(memory.policy)) is coldest
    assert len(list(memory.policy)) == len(memory.policy)
