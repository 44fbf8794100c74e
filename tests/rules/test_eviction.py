"""What every policy of eviction keeps to, and what is the idea of each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.eviction_scene import Memory, key_of
from tokenlake.hints import NO_HINTS
from tokenlake.store.eviction import POLICIES, EvictionPolicy, LeastRecentlyUsed, policy_named

Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=list(POLICIES))
MINUTE = 60.0


def busy(memory: Memory, seed: int, requests: int = 400) -> list[int]:
    """Conversations on a common prefix, one request a second; hits of each."""
    draw = random.Random(seed)
    hits, turns = [], [1] * 12
    for second in range(requests):
        who = draw.randrange(len(turns))
        turns[who] += 1
        prompt = ["common", *((who, turn) for turn in range(turns[who]))]
        hits.append(memory.request(prompt, float(second)))
        if turns[who] > 8:
            turns[who] = 1
    return hits


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fifo' is no policy of eviction; there are reuse, forecast, lru$"):
        policy_named("fifo")


@every_policy
def test_nothing_is_cold_where_nothing_is(make: Make) -> None:
    policy = make()
    assert len(policy) == 0
    with pytest.raises(KeyError):
        policy.victim(0.0)
    assert policy.admits(key_of("a"), NO_HINTS, 0.0)


@every_policy
def test_what_is_evicted_was_there_and_goes_once(make: Make) -> None:
    memory = Memory(make(), 20)
    busy(memory, seed=1)
    assert len(memory.policy) == len(memory.here) == 20
    assert {id(segment) for segment in memory.policy} == {id(segment) for segment in memory.here.values()}
    memory.order(now=1000.0)
    assert len(memory.policy) == 0


@every_policy
def test_looking_at_the_coldest_changes_nothing(make: Make) -> None:
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


knowing = pytest.mark.parametrize("make", [make for name, make in POLICIES.items() if name not in ("lru", "forecast")])
"""They take a use for better than none before they have learned anything."""


@knowing
def test_a_pin_in_between_is_no_use(make: Make) -> None:
    """A segment is taken out of the order and comes back: it is worth no more than one that was used once, just now."""
    memory = Memory(make(), 100)
    for number in range(10):
        memory.store(number, 0, float(10 * number))
    pinned = memory.here[0]
    memory.policy.remove(pinned, 100.0, evicted=False)
    memory.policy.insert(pinned, 110.0)
    retention_value = memory.policy.retention_value(pinned, 110.0)
    memory.store("new", 0, 110.0)
    assert retention_value <= memory.policy.retention_value(memory.here["new"], 110.0)


@knowing
def test_touches_within_a_second_are_one_use(make: Make) -> None:
    """Once used, and touched a thousand times in the same second: it goes no later than what was used twice."""
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
def test_what_was_used_often_and_lately_outlives_what_passes_once(make: Make) -> None:
    memory = Memory(make(), 10)
    for second in range(0, 600, 3):
        memory.request(["hot"], float(second))
        memory.store(("passing", second), 0, float(second))
    assert "hot" in memory.here
    assert "hot" not in memory.evicted


Requests = list[tuple[int, int, int, float]]
"""Stem, branch, length, seconds since the one before."""


def requests(most: int) -> st.SearchStrategy[Requests]:
    pauses = st.sampled_from([0.1, 1.0, 7.0, 90.0, 700.0])
    return st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6), pauses), max_size=most)


def paths_of(asked: Requests) -> list[tuple[float, list[object]]]:
    """When each prompt of a tree is asked for, and its segments."""
    now = 0.0
    prompts: list[tuple[float, list[object]]] = []
    for stem, branch, length, pause in asked:
        now += pause
        prompts.append((now, [(stem, depth) if depth < 2 else (stem, branch, depth) for depth in range(length)]))
    return prompts


ordered = pytest.mark.parametrize("name", ["lru", "reuse"])


@ordered
@settings(max_examples=60)
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
@settings(max_examples=60)
@given(asked=requests(40), nodes=st.integers(2, 3), later=st.sampled_from([0.0, 20.0, 3000.0]))
def test_a_parent_is_worth_no_less_than_its_child_on_another_node(
    name: str, asked: Requests, nodes: int, later: float
) -> None:
    """Each node sees only its own segments; all have learned the same before."""
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
def test_what_learns_nothing_saves_nothing(make: Make) -> None:
    policy = make()
    assert policy.save() == b""
    policy.restore(b"")
    with pytest.raises(ValueError, match="learns nothing"):
        policy.restore(b"x")


@pytest.mark.parametrize("name", ["reuse", "forecast"])
def test_what_others_learned_is_met_half_way_and_the_two_become_alike(name: str) -> None:
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
def test_what_is_no_statistics_is_not_taken_over(make: Make) -> None:
    policy = make()
    saved = policy.save()
    with pytest.raises(ValueError, match="statistics"):
        policy.merge(b"junk")
    assert policy.save() == saved


@pytest.mark.parametrize("name", ["lru", "reuse", "forecast"])
def test_a_look_at_all_begins_with_the_coldest(name: str) -> None:
    memory = Memory(POLICIES[name](), 20)
    busy(memory, seed=6)
    coldest = memory.policy.victim(400.0)
    assert next(iter(memory.policy)) is coldest
    assert len(list(memory.policy)) == len(memory.policy)
