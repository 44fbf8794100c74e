"""Routers on cases made by hand, their knowledge, and whole systems against counts of independent code."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenlake.errors import ConfigurationError
from tokenlake_bench.balance import BusyLog, SendLog
from tokenlake_bench.baselines import Accesses, Lru, Prompt, infinite_cache, private_round_robin
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.hits import LongPrompts, long_prompts
from tokenlake_bench.routing import (
    SYSTEMS,
    Answered,
    FleetOptions,
    SystemRow,
    at_rate,
    row_of,
    run_system,
    systems_named,
)
from tokenlake_bench.routing.base import SGLANG, CacheAwareSettings, Fleet, RoutedRequest, least
from tokenlake_bench.routing.knowledge import OwnRecord, TrackedCaches
from tokenlake_bench.routing.preble import Preble
from tokenlake_bench.routing.split import SplitRun
from tokenlake_bench.routing.systems import CacheAware, RoundRobin

ENGINE = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"])
SEGMENT = 512


def fleet(
    knowledge: TrackedCaches,
    settings: CacheAwareSettings = SGLANG,
    instances: int = 4,
    seed: int = 0,
    capacity: int = 100,
) -> Fleet:
    return Fleet(instances, capacity, SEGMENT, ENGINE, knowledge, random.Random(seed), settings)


def ask(number: int, *chain: int, beyond: int = 0) -> RoutedRequest:
    return RoutedRequest(number, len(chain) * SEGMENT + beyond, chain)


def caches(*held: tuple[int, ...], capacity: int = 100) -> TrackedCaches:
    tracked = TrackedCaches([capacity] * len(held))
    for instance, chain in enumerate(held):
        tracked.touch(chain, instance)
    return tracked


# -- knowledge


CHAINS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 8), max_size=6, unique=True).map(tuple), st.integers(0, 6)),
    max_size=30,
)


@given(CHAINS, st.lists(st.integers(0, 8), max_size=6, unique=True).map(tuple))
def test_depths_are_what_each_cache_finds(
    steps: list[tuple[int, tuple[int, ...], int]], chain: tuple[int, ...]
) -> None:
    tracked, plain = TrackedCaches([5] * 4), [Lru(5) for _ in range(4)]
    for instance, touched, capacity in steps:
        tracked.touch(touched, instance)
        plain[instance].touch(touched)
        tracked.resize(instance, capacity)
        plain[instance].resize(capacity)
    assert tracked.depths(chain) == [cache.match(chain) for cache in plain]
    assert tracked.sizes() == [len(cache) for cache in plain]
    distinct = {segment for cache in plain for segment in cache}
    held = sum(len(cache) for cache in plain)
    assert tracked.copies_per_segment() == (held / len(distinct) if distinct else 0.0)


def test_only_perfect_knowledge_sees_evictions() -> None:
    true, record = caches((), (), capacity=3), OwnRecord(2, 100)
    for chain in ((1, 2), (3, 4)):
        true.sent(chain, 0)
        true.touch(chain, 0)
        record.sent(chain, 0)
    assert true.depths((1, 2)) == [1, 0]
    assert record.depths((1, 2)) == [2, 0]


def test_what_is_being_computed_counts_as_held() -> None:
    """A segment that two prompts compute at one instance counts as held there until both are done, also while its
    cached copy is evicted."""
    tracked = caches((), (), capacity=2)
    tracked.promise((1, 2, 3), 0)
    tracked.promise((1, 2), 0)
    assert tracked.depths((1, 2, 3)) == [3, 0]
    assert tracked.match((1, 2, 3), 0) == 0
    tracked.keep((1, 2), 0)
    tracked.touch((8, 9), 0)
    assert tracked.depths((1, 2, 3)) == [3, 0]
    tracked.keep((1, 2, 3), 0)
    assert tracked.depths((1, 2, 3)) == [2, 0]
    tracked.touch((8, 9), 0)
    assert tracked.depths((1, 2, 3)) == [0, 0]
    assert tracked.copies_per_segment() == 1.0


def test_ties_are_drawn() -> None:
    drawn = Counter(least([1.0, 0.0, 0.0, 2.0], range(4), random.Random(seed)) for seed in range(200))
    assert set(drawn) == {1, 2}
    assert min(drawn.values()) > 50
    assert least([1.0, 0.0, 0.0], [0], random.Random(0)) == 0


# -- round robin


def test_round_robin() -> None:
    router = RoundRobin(fleet(OwnRecord(4, 10)))
    assert [router.choose(ask(number, 1), 0.0) for number in range(6)] == [0, 1, 2, 3, 0, 1]


# -- SGLang's


def test_a_long_match_is_followed() -> None:
    router = CacheAware(fleet(caches((1, 2, 3), (1,), (1, 2), ())))
    assert router.choose(ask(0, 1, 2, 3, 4), 0.0) == 0


def test_a_match_up_to_the_threshold_goes_to_the_smallest_tree() -> None:
    """2 of the prompt's 4 segments are cached, which is not more than the threshold of one half: the prompt goes to
    instance 1, which holds the fewest segments."""
    knowledge = caches((1, 2, 9), (7,), (8, 9), (5, 6))
    router = CacheAware(fleet(knowledge))
    assert router.choose(ask(0, 1, 2, 3, 4), 0.0) == 1
    lower = CacheAware(fleet(knowledge, CacheAwareSettings(cache_threshold=0.49)))
    assert lower.choose(ask(0, 1, 2, 3, 4), 0.0) == 0


def test_an_uneven_load_goes_to_the_shortest_queue() -> None:
    """The prompt leaves the instance with its cache where the loads differ by more than the absolute threshold, and
    their ratio is above the relative one."""
    settings = CacheAwareSettings(balance_abs_threshold=2, balance_rel_threshold=1.5)
    router = CacheAware(fleet(caches((1, 2), ()), settings, instances=2))
    sent = [router.choose(ask(number, 1, 2), 0.0) for number in range(4)]
    assert sent == [0, 0, 0, 1]
    router.finished(sent[0], answered(0.0, 2, 1, 0, 1.0, 0.0))
    assert router.choose(ask(4, 1, 2), 0.0) == 0
    relative = CacheAwareSettings(balance_abs_threshold=0, balance_rel_threshold=2.0)
    router = CacheAware(fleet(caches((1, 2), (3, 4)), relative, instances=2))
    router.choose(ask(0, 3, 4), 0.0)
    assert [router.choose(ask(number, 1, 2), 0.0) for number in range(1, 5)] == [0, 0, 0, 1]


@pytest.mark.parametrize("knowledge", [caches((), (), (), ()), caches((1,), (1,), (1,), (1,))])
def test_equals_are_drawn_by_the_seed(knowledge: TrackedCaches) -> None:
    makers: list[Callable[[Fleet], CacheAware | Preble]] = [CacheAware, Preble]
    for maker in makers:
        chosen = {maker(fleet(knowledge, seed=seed)).choose(ask(0, 1), 0.0) for seed in range(60)}
        assert chosen == {0, 1, 2, 3}


# -- Preble's


def test_more_cached_than_missing_is_exploited() -> None:
    known = tuple(range(20))
    router = Preble(fleet(caches(known, (), (), ())))
    for number in range(2):
        assert router.choose(ask(number, *known, *range(100, 119)), 0.0) == 0
    # Half of the prompt is cached at instance 0, which is not more than half, and computing all of it elsewhere takes
    # less time than the queue of instance 0.
    assert router.choose(ask(2, *known, *range(200, 220)), 0.0) != 0


def test_of_equally_long_matches_the_less_loaded_one() -> None:
    router = Preble(fleet(caches((1, 2), (1, 2)), instances=2))
    first = router.choose(ask(0, 1, 2, 3), 0.0)
    assert router.choose(ask(1, 1, 2, 3), 0.0) == 1 - first


def test_load_is_forgotten_after_the_window() -> None:
    """The first prompt goes to instance 0, for its cache, and a new one to instance 1, which has less load. Long after,
    both loads are forgotten, and either instance is chosen."""
    late = set()
    for seed in range(40):
        router = Preble(fleet(caches((1, 2), ()), instances=2, seed=seed))
        router.choose(ask(0, 1, 2), 0.0)
        assert router.choose(ask(1, 8, 9), 100.0) == 1
        late.add(router.choose(ask(2, 5, 6), 281.0))
    assert late == {0, 1}


def test_what_would_be_evicted_counts() -> None:
    """Both instances are full and equally loaded. A new prompt goes to instance 1: the coldest segments of instance 0
    were requested again, those of 1 never were."""
    knowledge = caches((11, 1, 2, 3), (), capacity=4)
    for chain in ((21,), (22,), (23,), (24,)):
        knowledge.touch(chain, 1)
    router = Preble(fleet(knowledge, instances=2, capacity=4))
    router.choose(ask(0, 11, 1, 2, 3), 0.0)
    router.choose(ask(1, 21, 22), 0.0)
    load = router._load
    load[0] = load[1] = 1.0
    assert list(knowledge.coldest(0))[:2] == [3, 2]
    assert router.choose(ask(2, 31, 32), 0.0) == 1


def test_answers_teach_how_long_answers_take() -> None:
    router = Preble(fleet(caches((), ()), instances=2))
    for output, tpot in [(101, 0.02), (201, 0.04)]:
        router.finished(0, answered(0.0, 10, output, 0, 1.0, tpot))
    assert router._output_tokens == pytest.approx(101 + 0.05 * 100)
    assert router._token_s == pytest.approx(0.02 + 0.05 * 0.02)


# -- figures


def answered(at_s: float, prompt: int, output: int, hits: int, ttft: float, tpot: float) -> Answered:
    return Answered(at_s, prompt, output, hits, hits // 4, at_s + ttft, at_s + ttft + tpot * (output - 1))


def test_a_row_by_hand() -> None:
    alone_s, token_s = ENGINE.prefill_s(1000), ENGINE.decode_s(1, 1005)
    answers = [
        answered(0.0, 1000, 11, 512, 9.9 * alone_s, 9.9 * token_s),
        answered(1.0, 1000, 11, 0, 10.1 * alone_s, token_s),
        answered(3.0, 1000, 11, 0, alone_s, 10.1 * token_s),
        answered(4.0, 1000, 1, 0, alone_s, 0.0),
    ]
    sent, busy = SendLog(2), BusyLog(2)
    sent.add(0.0, 0, 100)
    sent.add(1.0, 0, 200)
    busy.add(0, 0.0, 1.5)
    busy.add(1, 1.0, 1.5)
    row = row_of(answers, sent, busy, ENGINE, duplication=1.5, node_tokens=10_000)
    assert row.token_hit_rate == 512 / 4000
    assert row.slo_attainment == 0.5
    assert row.goodput_rps == 2 / 4.0
    assert row.remote_share == 0.25
    assert row.load_cv == 1.0
    ends_s = max(answer.finished_s for answer in answers)
    assert row.busy_share == pytest.approx(2.0 / 2 / ends_s)
    assert row.busy_cv == pytest.approx(0.5)
    assert (row.duplication, row.bytes_moved) == (1.5, 300)
    assert row.ttft_p50_ms == pytest.approx((9.9 + 1) / 2 * alone_s * 1000)
    assert row.tpot_p50_ms == pytest.approx(9.9 * token_s * 1000)
    assert row.long_prompts is None


def test_prompts_longer_than_a_node_are_counted_apart() -> None:
    assert long_prompts([(1000, 500), (600, 300)], 1000) is None
    apart = long_prompts([(1000, 500), (1001, 700), (600, 300), (2999, 0)], 1000)
    assert apart == LongPrompts(prompts=2, token_share=4000 / 5600, hit_rate=700 / 4000, others_hit_rate=0.5)
    assert long_prompts([(10, 5)], 1) == LongPrompts(prompts=1, token_share=1.0, hit_rate=0.5, others_hit_rate=0.0)


def test_a_node_has_its_part_of_the_capacity() -> None:
    """Of 12 segments on 3 instances each has 4; the prompt of 5 segments is longer."""
    prompts = [Prompt(size * SEGMENT, tuple(range(size)), 1e3 * size, 2) for size in (4, 5)]
    row = run_system(
        Accesses(SEGMENT, prompts),
        SYSTEMS["round-robin-real"],
        dataclasses.replace(options(3), capacity_tokens=12 * SEGMENT),
    )
    assert row.long_prompts is not None
    assert (row.long_prompts.prompts, row.long_prompts.token_share) == (1, 5 / 9)


# -- whole systems


def workload(requests: int, gap_s: float, seed: int = 1) -> Accesses:
    """Prompts of up to 12 segments over shared prefixes."""
    rng = random.Random(seed)
    prompts = []
    for number in range(requests):
        template, depth = rng.randrange(6), rng.randrange(1, 9)
        chain = [template * 100 + k for k in range(depth)]
        chain += [10_000 + number * 10 + k for k in range(rng.randrange(4))]
        prompts.append(Prompt(len(chain) * SEGMENT + rng.randrange(SEGMENT), tuple(chain), number * gap_s, 40))
    return Accesses(SEGMENT, prompts)


def options(instances: int = 4, segments: int = 20, **changed: Any) -> FleetOptions:
    capacity = instances * segments * SEGMENT
    return FleetOptions(instances=instances, capacity_tokens=capacity, engine=ENGINE, **changed)


def test_sequential_round_robin_equals_private_caches() -> None:
    accesses = workload(300, gap_s=1000.0)
    expected = private_round_robin(accesses, 4, 4 * 20 * SEGMENT)
    for name in ("round-robin-perfect", "round-robin-real"):
        row = run_system(accesses, SYSTEMS[name], options(segments=20 if name.endswith("perfect") else 60))
        if name.endswith("perfect"):
            assert row.token_hit_rate == pytest.approx(expected.rate)
        assert row.slo_attainment == 1.0
        assert row.bytes_moved == 0


def test_requests_under_way_take_memory_from_real_caches() -> None:
    accesses = workload(400, gap_s=0.05)
    perfect, real = (
        run_system(accesses, SYSTEMS[f"round-robin-{kind}"], options(segments=40)) for kind in ("perfect", "real")
    )
    assert real.token_hit_rate < perfect.token_hit_rate


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_serves_everything_alike_each_time(name: str) -> None:
    accesses = workload(200, gap_s=0.1)
    seen: list[int] = []
    row = run_system(accesses, SYSTEMS[name], options(), seen.append)
    assert run_system(accesses, SYSTEMS[name], options()) == row
    assert seen[-1] == 200
    assert 0 < row.token_hit_rate <= infinite_cache(accesses).rate
    assert row.duplication >= 1.0
    assert 0 < row.ttft_p50_ms <= row.ttft_p99_ms
    assert 0 < row.tpot_p50_ms <= row.tpot_p99_ms
    assert 0 <= row.remote_share < 1
    assert 0 < row.busy_share <= 1
    if SYSTEMS[name].split is None and not SYSTEMS[name].pulls:
        assert (row.load_cv, row.bytes_moved) == (None, 0), "private caches send nothing"
    # Routers have no disks and no cold tier.
    written = {f"{tier}_written_{of}" for tier in ("disk", "cold") for of in ("bytes_per_day", "share")}
    absent = {*written, "long_prompts"}
    assert all(getattr(row, field) is None for field in absent)
    finite = set(SystemRow.__struct_fields__) - {"load_cv"} - absent
    assert all(math.isfinite(getattr(row, field)) for field in finite)


@pytest.mark.parametrize("name", ["cache-aware-perfect", "preble-perfect"])
def test_routing_by_caches_finds_more_than_round_robin(name: str) -> None:
    accesses = workload(400, gap_s=0.5)
    ours = run_system(accesses, SYSTEMS[name], options())
    assert ours.token_hit_rate > run_system(accesses, SYSTEMS["round-robin-perfect"], options()).token_hit_rate


def test_busy_time_is_that_of_the_steps() -> None:
    prompts = [Prompt(1000, (1,), 0.0, 1), Prompt(1000, (2,), 4.0, 1)]
    row = run_system(Accesses(SEGMENT, prompts), SYSTEMS["round-robin-perfect"], options(instances=2))
    each_s = ENGINE.prefill_s(1000)
    assert row.busy_share == pytest.approx(each_s / (4.0 + each_s))
    assert row.busy_cv == pytest.approx(0.0, abs=1e-9)


# -- prefill and decode apart


@pytest.mark.parametrize(("instances", "one", "three"), [(2, 1, 1), (4, 1, 3), (5, 1, 4), (8, 2, 6)])
def test_instances_are_split_in_proportion(instances: int, one: int, three: int) -> None:
    assert SYSTEMS["pd-1p3d-real"].routed(instances) == one
    assert SYSTEMS["pd-3p1d-real"].routed(instances) == three
    assert SYSTEMS["cache-aware-real"].routed(instances) == instances


@pytest.mark.parametrize("nvlink", [False, True])
def test_the_whole_cache_is_handed_over(nvlink: bool) -> None:
    """The second prompt is cached at its prefill instance, and its whole cache is sent all the same. Over a network
    adapter that takes longer than the prefill."""
    prompts = [Prompt(8 * SEGMENT + 10, tuple(range(8)), at_s, 11) for at_s in (0.0, 50.0)]
    run = SplitRun(Accesses(SEGMENT, prompts), SYSTEMS["pd-1p3d-real"], options(segments=40, nvlink=nvlink))
    row = run.run(lambda done: None)
    first, second = run.answers
    assert (first.hit_tokens, second.hit_tokens) == (0, 8 * SEGMENT)
    assert first.ttft_s > 5 * second.ttft_s
    assert second.ttft_s == pytest.approx(ENGINE.prefill_s(10, 8 * SEGMENT))
    nbytes = prompts[0].tokens * ENGINE.model.cache_bytes
    assert row.bytes_moved == 2 * nbytes
    there_s = max(second.ttft_s, nbytes / ENGINE.network_rate(nvlink=nvlink) + 50e-6)
    token_s = ENGINE.decode_s(1, prompts[0].tokens + 6)
    assert second.finished_s - second.at_s == pytest.approx(there_s + 10 * token_s, rel=0.01)


def test_a_prefill_waits_for_room_at_its_decode_instance() -> None:
    """Two instances of 20 segments: of three prompts of 9 segments at once, two fit into the decode instance. The third
    waits for its first token, not between its tokens."""
    prompts = [Prompt(9 * SEGMENT, tuple(range(9 * n, 9 * n + 9)), 0.0, 200) for n in range(3)]
    run = SplitRun(Accesses(SEGMENT, prompts), SYSTEMS["pd-1p3d-real"], options(instances=2))
    run.run(lambda done: None)
    first, *_, third = sorted(run.answers, key=lambda answer: answer.first_s)
    assert third.first_s > first.finished_s
    alone_s = ENGINE.decode_s(1, 10 * SEGMENT)
    assert all(answer.tpot_s < 2 * alone_s for answer in run.answers)


def test_names_and_arguments_without_meaning_are_named() -> None:
    assert systems_named("all") == list(SYSTEMS.values())
    assert [system.name for system in systems_named("cache-aware-real,round-robin-real")] == [
        "cache-aware-real",
        "round-robin-real",
    ]
    accesses, system = workload(3, 1.0), SYSTEMS["cache-aware-real"]
    bad: list[tuple[str, Callable[[], object]]] = [
        ("baselines", lambda: systems_named("sglang")),
        ("nodes", lambda: run_system(accesses, system, dataclasses.replace(options(), instances=0))),
        ("requests", lambda: run_system(Accesses(SEGMENT, []), system, options())),
        ("capacity_tokens", lambda: run_system(accesses, system, options(segments=0))),
        ("nodes", lambda: run_system(accesses, SYSTEMS["pd-1p3d-real"], options(instances=1))),
        (
            "engine_cache_tokens",
            lambda: run_system(accesses, SYSTEMS["pd-1p3d-real"], options(engine_cache_tokens=1024)),
        ),
        ("rate", lambda: at_rate(accesses, 0.0)),
        ("rate", lambda: at_rate(workload(3, 0.0), 1.0)),
    ]
    for field, call in bad:
        with pytest.raises(ConfigurationError, match=f"'{field}'"):
            call()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(sorted(SYSTEMS)), st.floats(0.001, 2.0))
def test_memory_is_given_back(seed: int, name: str, gap_s: float) -> None:
    """Finished requests free their memory, however they overlapped: of two equal prompts long after them, the second is
    found whole."""
    again, at_s = tuple(range(5_000, 5_010)), 40 * gap_s + 10_000
    last = [Prompt(10 * SEGMENT, again, at_s, 5), Prompt(10 * SEGMENT, again, at_s + 1_000, 5)]
    prompts = workload(40, gap_s, seed).prompts + last
    row, less = (
        run_system(Accesses(SEGMENT, served), SYSTEMS[name], options(instances=2, segments=12))
        for served in (prompts, prompts[:-1])
    )
    tokens = sum(prompt.tokens for prompt in prompts)
    gained = row.token_hit_rate * tokens - less.token_hit_rate * (tokens - 10 * SEGMENT)
    if not name.startswith("round-robin"):
        assert gained == pytest.approx(10 * SEGMENT)
