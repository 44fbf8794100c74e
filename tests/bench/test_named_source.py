"""A router that names the source of each prefix: its rule by hand, and whole runs whose pulls are known."""

from __future__ import annotations

import random

import pytest

from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.routing import SYSTEMS, FleetOptions
from tokenlake_bench.routing.base import Fleet, RoutedRequest
from tokenlake_bench.routing.fleet_run import FleetRun
from tokenlake_bench.routing.knowledge import TrackedCaches
from tokenlake_bench.routing.kv_router import KvRouter, Source
from tokenlake_bench.routing.named_source import NamedSourceRun
from tokenlake_bench.routing.run import prepared

ENGINE = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"])
SEGMENT = 512


def ask(number: int, *chain: int, beyond: int = 0) -> RoutedRequest:
    return RoutedRequest(number, len(chain) * SEGMENT + beyond, chain)


def router(*held: tuple[int, ...]) -> KvRouter:
    """A router of one instance for each cache that it sees."""
    view = TrackedCaches([0] * len(held))
    for instance, chain in enumerate(held):
        view.promise(chain, instance)
    return KvRouter(Fleet(len(held), 100, SEGMENT, ENGINE, view, random.Random(0)))


# -- the rule


def test_the_least_cost_and_the_longest_prefix() -> None:
    kv = router((1, 2, 3), (1, 2), ())
    # 1 + 4 blocks at instance 0, 2 + 4 at 1, 4 + 4 at 2.
    assert kv.choose(ask(0, 1, 2, 3, 4), 0.0) == 0
    assert kv.sources == {}, "the chosen instance has the longest prefix"
    # 1 + 1 to compute and 4 + 1 different blocks at 0, 2 + 4 at 1: instance 1 would lack the third segment.
    assert kv.choose(ask(1, 1, 2, 3, 5), 0.0) == 1
    assert kv.sources == {1: Source(0, 3)}


def test_tokens_count_to_the_first_and_blocks_to_the_last() -> None:
    kv = router((), ())
    first = kv.choose(ask(0, 1, 2, beyond=1), 0.0)
    other = kv.choose(ask(1, 3, 4, 5, beyond=1), 0.0)
    assert {first, other} == {0, 1}
    assert kv.choose(ask(2, 8), 0.0) == first, "2 + 3 blocks and one token against 3 + 4"
    kv.first_token(1)
    assert kv.choose(ask(3, 9), 0.0) == other, "3 + 4 blocks against 4"
    for number in (0, 2, 3):
        kv.first_token(number)
    for number in range(4):
        kv.last_token(number)
    assert all((load.prefill, load.tails, len(load.users)) == (0, 0, 0) for load in kv._loads)


# -- runs


PREFIX = tuple(range(40))
BYTES = len(PREFIX) * SEGMENT * ENGINE.model.cache_bytes


def run_of(system: str, engine_cache: bool, later: float = 20.0) -> FleetRun:
    """Two instances. A prompt is computed at once, and the same prefix comes `later`, when a much longer prompt came to
    the instance that has it: the other instance is chosen."""
    prompts = [
        Prompt(len(PREFIX) * SEGMENT, PREFIX, 0.0, 1),
        Prompt(101 * SEGMENT, (*PREFIX, *range(100, 161)), later - 0.01, 100),
        Prompt(len(PREFIX) * SEGMENT + 7, PREFIX, later, 4),
    ]
    options = FleetOptions(
        instances=2,
        capacity_tokens=2 * 400 * SEGMENT,
        engine=ENGINE,
        engine_cache_tokens=300 * SEGMENT if engine_cache else None,
    )
    return prepared(Accesses(SEGMENT, prompts), SYSTEMS[system], options)


@pytest.mark.parametrize("engine_cache", [False, True])
def test_a_prefix_is_pulled_from_the_named_source(engine_cache: bool) -> None:
    run = run_of("named-source-1s-real", engine_cache)
    row = run.run(lambda done: None)
    *_, last = sorted(run.answers, key=lambda answer: answer.at_s)
    assert last.hit_tokens == last.remote_tokens == len(PREFIX) * SEGMENT
    assert row.bytes_moved == BYTES
    gpu = ENGINE.gpu
    pulled_s = BYTES / (gpu.network_rate * gpu.network_efficiency)
    copied_s = ENGINE.host_copy_s(len(PREFIX) * SEGMENT) if engine_cache else 0.0
    assert last.ttft_s == pytest.approx(pulled_s + copied_s + ENGINE.prefill_s(7, len(PREFIX) * SEGMENT), rel=0.01)
    assert row.duplication > 1.0, "the instance keeps what it pulled"


def test_a_router_alone_moves_nothing() -> None:
    run = run_of("kv-router-1s-real", engine_cache=True)
    assert run.run(lambda done: None).bytes_moved == 0
    assert max(run.answers, key=lambda answer: answer.at_s).hit_tokens == 0


@pytest.mark.parametrize("engine_cache", [False, True])
def test_a_view_that_is_too_old_names_no_source(engine_cache: bool) -> None:
    run = run_of("named-source-10s-real", engine_cache, later=9.0)
    row = run.run(lambda done: None)
    assert row.bytes_moved == 0
    assert [answer.remote_tokens for answer in run.answers] == [0, 0, 0]


@pytest.mark.parametrize("engine_cache", [False, True])
@pytest.mark.parametrize(("restart_s", "believed"), [(19.5, len(PREFIX)), (12.0, 0)])
def test_a_stale_view_names_what_a_restart_took(engine_cache: bool, restart_s: float, believed: int) -> None:
    run = run_of("named-source-1s-real", engine_cache)
    assert isinstance(run, NamedSourceRun)
    seen: list[int] = []
    for instance in range(2):
        run._clock.at(restart_s, run.restart, instance)
    run._clock.at(19.98, lambda: seen.append(max(run._view.depths(PREFIX))))
    assert run.run(lambda done: None).bytes_moved == 0
    assert seen == [believed]
    assert all(answer.hit_tokens == 0 for answer in run.answers)
    assert run._view.depths(PREFIX) == [run._caches.match(PREFIX, instance) for instance in range(2)]
