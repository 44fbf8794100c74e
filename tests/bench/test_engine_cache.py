"""GPU caches of instances: alone, in front of private memory, and in front of the pool."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.test_pooled import ENGINE, TOKENS, with_answers
from tests.bench.test_simulation import conversations
from tokenlake_bench.baselines import Accesses, Prompt, infinite_cache
from tokenlake_bench.routing import SYSTEMS, FleetOptions, run_system
from tokenlake_bench.routing.engine_cache import EngineCache
from tokenlake_bench.routing.outcome import Answered, SystemRow
from tokenlake_bench.routing.run import prepared
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.cached import CachedEngine
from tokenlake_bench.simulation.pooled import PooledRun, pool_options
from tokenlake_bench.simulation.pools import POOLS

CHAIN = tuple(range(8))
OTHER = tuple(range(100, 130))


def offloaded(
    accesses: Accesses, system: str, nodes: int, node_segments: int, engine_segments: int
) -> tuple[SystemRow, list[Answered]]:
    options = FleetOptions(
        instances=nodes,
        capacity_tokens=nodes * node_segments * TOKENS,
        engine=ENGINE,
        engine_cache_tokens=engine_segments * TOKENS,
    )
    run = prepared(accesses, SYSTEMS[system], options)
    return run.run(lambda done: None), run.answers


def pooled(
    accesses: Accesses, nodes: int, node_segments: int, engine_segments: int, *, real: bool = True
) -> tuple[SystemRow, PooledRun]:
    options = pool_options(
        ENGINE, nodes=nodes, capacity_tokens=nodes * node_segments * TOKENS, segment_tokens=TOKENS, seed=0
    )
    engines: list[CachedEngine] = []

    def instance(*arguments: object) -> CachedEngine:
        engines.append(CachedEngine(*arguments, engine_cache_tokens=engine_segments * TOKENS))  # type: ignore[arg-type]
        return engines[-1]

    run = PooledRun(options, ENGINE, counts_memory=real, instance=instance)
    run.run(arrivals_of(accesses))
    assert run.simulation.cluster.idle()
    assert len(run.answers) == len(accesses.prompts)
    run.simulation.cluster.check_integrity()
    for engine in engines:
        engine.cache.check_integrity()
    return run.row(), run


def prompts(*chains: tuple[int, ...], gap_s: float = 60.0) -> Accesses:
    return Accesses(TOKENS, [Prompt(len(c) * TOKENS + 10, c, gap_s * at, 2) for at, c in enumerate(chains)])


# -- the cache


def test_finished_requests_leave_an_lru_cache() -> None:
    """Finished requests leave an LRU cache whose first segments stay longest."""
    cache = EngineCache(6)
    cache.begin(0, (1, 2, 3), 1)
    assert cache.match((1, 2, 3, 4)) == 3
    cache.begin(1, (7,), 1)
    cache.end(0)
    cache.end(1)
    assert cache.begin(2, (8, 9), 1).evicted == [3]
    assert cache.match((1, 2, 3)) == 2
    assert cache.match((7,)) == 1


def test_segments_under_way_are_not_evicted() -> None:
    """Segments under way are not evicted, and answers are not kept."""
    cache = EngineCache(4)
    assert cache.begin(0, (1, 2), 1).added == [1, 2]
    assert cache.begin(1, (1, 3), 4) == ([3], [])
    assert cache.match((1, 2)) == 2
    cache.end(0)
    assert cache.match((1, 2)) == 1
    cache.end(1)
    assert cache.match((1, 3)) == 2


STEPS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=6, unique=True).map(tuple), st.integers(0, 4)),
    max_size=40,
)


@given(STEPS, st.integers(1, 12))
def test_one_request_at_a_time_is_an_lru(steps: list[tuple[bool, tuple[int, ...], int]], capacity: int) -> None:
    """Without requests side by side and without answers, the cache is an LRU of whole prompts."""
    cache, plain = EngineCache(capacity), OrderedDict[int, None]()
    for number, (_, chain, _) in enumerate(steps):
        cache.begin(number, chain, 0)
        cache.check_integrity()
        cache.end(number)
        cache.check_integrity()
        for segment in reversed(chain):
            plain[segment] = None
            plain.move_to_end(segment)
        while len(plain) > capacity:
            plain.popitem(last=False)
        assert all((segment in cache) == (segment in plain) for segment in range(10))


@given(STEPS, st.integers(1, 12))
def test_counts_hold_with_requests_side_by_side(steps: list[tuple[bool, tuple[int, ...], int]], capacity: int) -> None:
    cache, under_way, held = EngineCache(capacity), list[int](), set[int]()
    for number, (ends, chain, further) in enumerate(steps):
        if ends and under_way:
            change = cache.end(under_way.pop(0))
        else:
            change = cache.begin(number, chain, further)
            under_way.append(number)
        held = (held | set(change.added)) - set(change.evicted)
        cache.check_integrity()
        assert held == {segment for segment in range(10) if segment in cache}


# -- what a hit costs


def test_the_cost_of_a_hit() -> None:
    """The third prompt is found in the GPU cache, or, if the second one filled that, in the memory behind it:
    private memory and the pool agree."""
    accesses = prompts(CHAIN, OTHER, CHAIN)
    gpu_s = ENGINE.prefill_s(10, 8 * TOKENS)
    copy_s = ENGINE.host_copy_s(8 * TOKENS)
    for engine_segments, hit_s, engine_share in ((100, gpu_s, 1.0), (31, gpu_s + copy_s, 0.0)):
        private, answers = offloaded(accesses, "round-robin-real", 1, 100, engine_segments)
        row, run = pooled(accesses, 1, 100, engine_segments)
        for each, last in ((private, answers[-1]), (row, run.answers[-1])):
            assert last.hit_tokens == 8 * TOKENS
            assert last.ttft_s == pytest.approx(hit_s, abs=1e-3)
            assert each.engine_share == engine_share
            assert each.remote_share == 0.0


def test_a_hit_at_another_node_costs_network_and_copy() -> None:
    """Two equal prompts at once: the second goes to the other node, which waits for the first and fetches its
    segments."""
    accesses = prompts(CHAIN, CHAIN, gap_s=0.0)
    row, run = pooled(accesses, 2, 100, 100)
    assert row.remote_share == 1.0
    assert row.engine_share == 0.0
    first, second = run.answers
    rate = ENGINE.gpu.network_rate * ENGINE.gpu.network_efficiency
    moved_s = 8 * TOKENS * ENGINE.model.cache_bytes / rate + 2 * ENGINE.host_copy_s(8 * TOKENS)
    expected = first.ttft_s + moved_s + ENGINE.prefill_s(10, 8 * TOKENS)
    # The second request hears of the stored segments up to 50 ms late.
    assert expected <= second.ttft_s <= expected + 0.05
    again = prompts(CHAIN, CHAIN, CHAIN, CHAIN, CHAIN, CHAIN)
    _, run = pooled(again, 2, 100, 100)
    assert all(answer.hit_tokens == 8 * TOKENS for answer in run.answers[1:])
    # Each node computes or fetches the prompt once; afterwards its GPU cache has it.
    assert sum(answer.remote_tokens for answer in run.answers) == 8 * TOKENS


def test_ample_gpu_caches_find_everything_without_the_pool() -> None:
    accesses = with_answers(conversations(80, gap_s=4.0), 20)
    ideal = infinite_cache(accesses)
    row, _ = pooled(accesses, 1, 200, 5000)
    private, _ = offloaded(accesses, "round-robin-real", 1, 200, 5000)
    for each in (row, private):
        assert each.token_hit_rate == pytest.approx(ideal.rate, rel=0.02)
        assert each.engine_share == 1.0


def test_requests_under_way_take_gpu_memory_and_not_the_pools() -> None:
    accesses = with_answers(conversations(200, gap_s=0.3), 400)
    (small, _), (free, _) = (pooled(accesses, 2, 2000, 120, real=real) for real in (True, False))
    assert small.engine_share < free.engine_share
    assert small.token_hit_rate == pytest.approx(free.token_hit_rate, abs=0.03)


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.split is None])
def test_every_router_runs_in_front_of_private_memory(name: str) -> None:
    accesses = with_answers(conversations(120, gap_s=0.5), 50)
    row, answers = offloaded(accesses, name, 4, 300, 40)
    assert len(answers) == 120
    assert 0 < row.engine_share < 1
    options = FleetOptions(
        instances=4, capacity_tokens=4 * 300 * TOKENS, engine=ENGINE, engine_cache_tokens=40 * TOKENS
    )
    assert run_system(accesses, SYSTEMS[name], options) == row


def test_a_restart_takes_what_the_engine_owns() -> None:
    """One instance gets the same prompt every minute and restarts after each 90 s: private offload then computes it
    again, the pool reads it from the memory of its node."""
    accesses = prompts(*[CHAIN] * 4)
    options = FleetOptions(
        instances=1,
        capacity_tokens=100 * TOKENS,
        engine=ENGINE,
        engine_cache_tokens=50 * TOKENS,
        restart_every_s=90.0,
    )
    run = prepared(accesses, SYSTEMS["round-robin-real"], options)
    run.run(lambda done: None)
    assert [answer.hit_tokens // TOKENS for answer in run.answers] == [0, 8, 0, 0]
    shape = pool_options(ENGINE, nodes=1, capacity_tokens=100 * TOKENS, segment_tokens=TOKENS, seed=0)
    pool = POOLS["pool-real"].prepare(shape, ENGINE, 50 * TOKENS)
    pool.restart_every_s = 90.0
    pool.run(arrivals_of(accesses))
    assert [answer.hit_tokens // TOKENS for answer in pool.answers] == [0, 8, 8, 8]
    assert [answer.engine_tokens // TOKENS for answer in pool.answers] == [0, 8, 0, 0]


def test_a_perfect_router_sees_gpu_caches() -> None:
    """The memory behind the GPU cache holds less than half of the prompt, and would not attract it."""
    row, answers = offloaded(prompts(*[CHAIN] * 6), "cache-aware-perfect", 4, 4, 100)
    assert all(answer.hit_tokens == 8 * TOKENS for answer in answers[1:])
    assert row.engine_share == 1.0
