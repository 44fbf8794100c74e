"""The pool under simulated instances: memory, time and hits must add up."""

from __future__ import annotations

import msgspec
import pytest

from tests.bench.test_simulation import conversations
from tokenlake.errors import ConfigurationError
from tokenlake.wire.engine import MAX_KEYS
from tokenlake_bench.baselines import Accesses, Prompt, infinite_cache
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.routing import SYSTEMS, FleetOptions, run_system
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.planned import PlannedRoute
from tokenlake_bench.simulation.pooled import PooledRun, engine_layout, pool_options

ENGINE = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"])
TOKENS = 512


def pooled(
    accesses: Accesses, nodes: int, node_segments: int, *, real: bool = False, planned: bool = False, seed: int = 0
) -> PooledRun:
    """The finished run: each request has its answer, and the cluster is idle and consistent."""
    options = pool_options(
        ENGINE,
        nodes=nodes,
        capacity_tokens=nodes * node_segments * TOKENS,
        segment_tokens=TOKENS,
        seed=seed,
    )
    run = PooledRun(options, ENGINE, counts_memory=real)
    route = PlannedRoute(run) if planned else None
    run.route = route or run.route
    run.run(arrivals_of(accesses))
    if route is not None:
        route.router.check_integrity()
        assert not any(route.router.under_way(name) for name in route.router.instances)
    assert run.simulation.cluster.idle()
    assert len(run.answers) == run.simulation.done == len(accesses.prompts)
    run.simulation.cluster.check_integrity()
    return run


def with_answers(accesses: Accesses, output_tokens: int) -> Accesses:
    prompts = [Prompt(p.tokens, p.chain, p.at_s, output_tokens) for p in accesses.prompts]
    return Accesses(accesses.segment_tokens, prompts)


def test_a_request_alone_takes_what_the_engine_model_says() -> None:
    accesses = Accesses(TOKENS, [Prompt(1000, (0,), 0.0, 101)])
    (answer,) = pooled(accesses, 1, 100).answers
    # A match within one node takes microseconds.
    assert answer.ttft_s == pytest.approx(ENGINE.prefill_s(1000), abs=1e-3)
    assert answer.tpot_s == pytest.approx(ENGINE.decode_s(1, 1050), rel=0.01)


@pytest.mark.parametrize("chunk_tokens", [256, 1024])
def test_a_pool_s_engine_computes_in_chunks_as_the_others(chunk_tokens: int) -> None:
    accesses = Accesses(TOKENS, [Prompt(1000, (0,), 0.0, 11)])
    options = pool_options(ENGINE, nodes=1, capacity_tokens=100 * TOKENS, segment_tokens=TOKENS, seed=0)
    run = PooledRun(options, ENGINE, counts_memory=True, chunk_tokens=chunk_tokens)
    run.run(arrivals_of(accesses))
    fleet = FleetOptions(instances=1, capacity_tokens=100 * TOKENS, engine=ENGINE, chunk_tokens=chunk_tokens)
    row = run_system(accesses, SYSTEMS["round-robin-real"], fleet)
    assert run.answers[0].ttft_s * 1e3 == pytest.approx(row.ttft_p50_ms, abs=1.0)
    assert (row.ttft_p50_ms > 1.05 * ENGINE.prefill_s(1000) * 1e3) == (chunk_tokens == 256)


def test_a_fetched_prefix_is_not_computed_again() -> None:
    chain = tuple(range(8))
    accesses = Accesses(TOKENS, [Prompt(8 * TOKENS + 10, chain, 30.0 * at, 2) for at in range(6)])
    run = pooled(accesses, 2, 100)
    first, *others = run.answers
    assert first.hit_tokens == 0
    assert all(answer.hit_tokens == 8 * TOKENS for answer in others)
    assert all(answer.ttft_s < first.ttft_s / 2 for answer in others)
    assert run.simulation.cluster.network.nbytes > 0


def test_a_planned_request_goes_where_its_prefix_is() -> None:
    chains = [tuple(range(20 * at, 20 * at + 8)) for at in range(6)] * 8
    accesses = Accesses(TOKENS, [Prompt(8 * TOKENS + 10, chain, 5.0 * at, 2) for at, chain in enumerate(chains)])
    elsewhere, planned = (pooled(accesses, 3, 200, planned=planned) for planned in (False, True))
    for run in (elsewhere, planned):
        assert [answer.hit_tokens for answer in run.answers] == [0] * 6 + [8 * TOKENS] * 42
    assert planned.row().bytes_moved < 0.75 * elsewhere.row().bytes_moved


def test_planned_requests_do_not_queue_where_their_prefix_is() -> None:
    """Computing 16 segments takes longer than bringing one."""
    prompts = [Prompt(TOKENS + 10, (0,), 0.0, 2)]
    prompts += [Prompt(17 * TOKENS, (0, *range(20 * at, 20 * at + 16)), 30.0, 2) for at in range(1, 5)]
    run = pooled(Accesses(TOKENS, prompts), 4, 200, planned=True)
    assert max(answer.ttft_s for answer in run.answers) < 1.5 * ENGINE.prefill_s(16 * TOKENS)
    assert all(answer.hit_tokens == TOKENS for answer in run.answers[1:])


def test_a_prompt_longer_than_a_node_is_found_in_part() -> None:
    """Several nodes have the segments: a match finds more of them than one node has slots at best, and half as many at
    worst."""
    chain = tuple(range(60))
    accesses = Accesses(TOKENS, [Prompt(60 * TOKENS + 10, chain, 60.0 * at, 2) for at in range(8)])
    first, *others = pooled(accesses, 4, 48).answers
    assert first.hit_tokens == 0
    found = [answer.hit_tokens // TOKENS for answer in others]
    assert 48 < max(found) < 60
    assert min(found) >= 24


def test_a_prompt_of_more_keys_than_a_match_is_found() -> None:
    """A match has at most `MAX_KEYS` keys; the engine asks for the ones behind them in a further match."""
    count = MAX_KEYS + 30
    accesses = Accesses(TOKENS, [Prompt(count * TOKENS + 1, tuple(range(count)), 1e3 * at, 2) for at in range(2)])
    assert [answer.hit_tokens for answer in pooled(accesses, 1, 2 * count).answers] == [0, count * TOKENS]


def test_an_ample_pool_finds_every_prefix_and_is_deterministic() -> None:
    accesses = with_answers(conversations(60, gap_s=4.0), 20)
    run = pooled(accesses, 4, 2000)
    ideal = infinite_cache(accesses)
    assert run.row().token_hit_rate == pytest.approx(ideal.rate, rel=0.02)
    assert msgspec.structs.asdict(pooled(accesses, 4, 2000).row()) == msgspec.structs.asdict(run.row())
    assert pooled(accesses, 4, 2000, seed=1).row() != run.row()


def test_requests_under_way_take_memory_and_give_it_back() -> None:
    accesses = with_answers(conversations(200, gap_s=0.3), 400)
    free, real = (pooled(accesses, 2, 120, real=real) for real in (False, True))
    assert real.row().token_hit_rate < free.row().token_hit_rate - 0.02
    for node in real.simulation.cluster.nodes:
        assert all(pool.quarantined == 0 for pool in node.store.pools())


def test_without_shared_prefixes_the_pool_equals_round_robin() -> None:
    prompts = [Prompt(4096, tuple(range(8 * at, 8 * at + 8)), 1.0 * at, 50) for at in range(80)]
    accesses = Accesses(TOKENS, prompts)
    fleet = FleetOptions(instances=4, capacity_tokens=4 * 500 * TOKENS, engine=ENGINE)
    other = run_system(accesses, SYSTEMS["round-robin-perfect"], fleet)
    row = pooled(accesses, 4, 500).row()
    assert row.token_hit_rate == other.token_hit_rate == 0
    assert row.ttft_p50_ms == pytest.approx(other.ttft_p50_ms, rel=0.02)
    assert row.tpot_p50_ms == pytest.approx(other.tpot_p50_ms, rel=0.02)


def test_segments_weigh_what_the_model_says() -> None:
    for model in MODELS.values():
        engine = EngineModel.fitting(model, GPUS["h200"])
        assert engine_layout(engine, TOKENS).segment_bytes == TOKENS * model.cache_bytes


def test_no_requests_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="requests"):
        pooled(Accesses(TOKENS, []), 2, 100)
