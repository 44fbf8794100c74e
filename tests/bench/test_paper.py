"""The study of the TokenLake paper: its workloads, the model of its system, and its command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, Prompt, infinite_cache
from tokenlake_bench.cli import bench
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.paper.command import PaperArguments, PaperResult, Study
from tokenlake_bench.paper.fleets import FLEETS, RUNS, runs_named
from tokenlake_bench.paper.in_place import LATENCY_S, InPlaceRun
from tokenlake_bench.paper.workloads import QUESTIONS, SCBENCH, SYSTEM_TOKENS, TURNS, WORKLOADS
from tokenlake_bench.routing import FleetOptions

SEGMENT = 512
ENGINE = EngineModel(MODELS["llama-2-7b"], GPUS["a100-80g"], 2)


def fleet(instances: int = 4, segments: int = 400) -> FleetOptions:
    capacity = instances * segments * SEGMENT
    return FleetOptions(instances=instances, capacity_tokens=capacity, engine=ENGINE, nvlink=True)


def in_place(options: FleetOptions, *prompts: Prompt) -> InPlaceRun:
    run = InPlaceRun(Accesses(SEGMENT, list(prompts)), options)
    run.run(lambda done: None)
    assert len(run.answers) == len(prompts)
    assert (run._open, run._new, run._shipping) == ([0] * options.instances,) * 3
    assert not any(run._prefills)
    assert run._under_way.tokens == run._held[0] == 0
    return run


# -- workloads


def test_lengths_and_sharing_are_the_published_ones() -> None:
    loogle, scbench, sharegpt = (WORKLOADS[name](1000, 3) for name in ("loogle", "scbench", "sharegpt"))
    assert 24_000 < loogle.prompt_tokens / 1000 < 24_300
    documents = {prompt.chain[0] for prompt in loogle.prompts}
    assert len(documents) == 1000 // QUESTIONS
    assert infinite_cache(loogle).rate == pytest.approx(1 - 1 / QUESTIONS, abs=0.01)
    mean = sum(tokens * sessions for tokens, sessions in SCBENCH) / sum(sessions for _, sessions in SCBENCH)
    assert scbench.prompt_tokens / len(scbench.prompts) == pytest.approx(mean, rel=0.06)
    assert infinite_cache(scbench).rate == pytest.approx(1 - 1 / TURNS, abs=0.01)
    assert infinite_cache(sharegpt).rate == pytest.approx(SYSTEM_TOKENS / (SYSTEM_TOKENS + 161), abs=0.03)
    assert {prompt.chain[:8] for prompt in sharegpt.prompts} == {sharegpt.prompts[0].chain[:8]}


def test_a_turn_follows_the_one_before_it() -> None:
    prompts = WORKLOADS["scbench"](20, 0).prompts
    for number, prompt in enumerate(prompts):
        assert prompt.follows == (number - 1 if number % TURNS else None)
        if prompt.follows is not None:
            before = prompts[prompt.follows]
            assert prompt.at_s == before.at_s
            assert len(set(prompt.chain) & set(before.chain)) >= len(before.chain) - 1


# -- the model of the paper's system


def test_one_instance_is_an_engine() -> None:
    (answer,) = in_place(fleet(1), Prompt(1000, (0,), 0.0, 101)).answers
    assert answer.ttft_s == pytest.approx(ENGINE.prefill_s(1000))
    assert answer.tpot_s == pytest.approx(ENGINE.decode_s(1, 1050), rel=0.01)


def test_a_group_shares_a_prefill() -> None:
    """Of four instances three are idle: a prefill takes a quarter of the time that depends on its tokens. Each decode
    step waits for two messages per layer, and for its part of the attention."""
    chain = tuple(range(3))
    prompt = Prompt(4 * SEGMENT, (*chain, 3), 0.0, 101)
    run = in_place(fleet(4), prompt)
    (answer,) = run.answers
    fixed_s = ENGINE.gpu.layer_s * ENGINE.model.layers
    alone_s, messages_s = ENGINE.prefill_s(prompt.tokens) - fixed_s, 2 * ENGINE.model.layers * LATENCY_S
    assert alone_s / 4 < answer.ttft_s - fixed_s < 0.45 * alone_s
    own_s, all_s = ENGINE.decode_s(1, 0), ENGINE.decode_s(1, prompt.tokens + 50)
    holders = 3 * (1 - 0.75 ** (prompt.tokens / run._run_tokens))
    assert answer.tpot_s == pytest.approx(own_s + messages_s + (all_s - own_s) / (1 + holders), rel=0.05)
    queries = 2 * ENGINE.model.layers * ENGINE.model.hidden * 2 * holders * 101
    put = prompt.tokens * ENGINE.model.cache_bytes * 3 // 4
    assert sum(run._sent.totals()) == pytest.approx(queries + put, abs=2)


def test_the_pool_is_one_memory() -> None:
    """A prompt longer than an instance's memory is found whole, wherever the next request goes."""
    chain = tuple(range(30))
    prompts = [Prompt(30 * SEGMENT + 10, chain, at_s, 2) for at_s in (0.0, 100.0)]
    first, second = in_place(fleet(4, segments=10), *prompts).answers
    assert (first.hit_tokens, second.hit_tokens) == (0, 30 * SEGMENT)


def test_what_is_hot_is_copied_and_ships_nothing() -> None:
    prompts = [Prompt(4 * SEGMENT + 10, tuple(range(4)), 100.0 * number, 50) for number in range(24)]
    run = in_place(fleet(4), *prompts)
    assert run._hot == {0, 1, 2, 3}
    *_, cold, hot = [run.answers[18], run.answers[23]]
    assert cold.tpot_s - hot.tpot_s == pytest.approx(2 * ENGINE.model.layers * LATENCY_S, rel=0.5)
    copies = 3 * len(run._hot)
    run._hold(0, 0)
    assert run._caches._caches[0]._capacity == 4 * 400 - copies


def test_requests_wait_for_room_in_the_pool() -> None:
    prompts = [Prompt(9 * SEGMENT, tuple(range(9 * n, 9 * n + 9)), 0.0, 100) for n in range(6)]
    run = in_place(fleet(2, segments=12), *prompts)
    ends = sorted(answer.finished_s for answer in run.answers)
    begins = sorted(answer.first_s for answer in run.answers)
    assert all(begins[place] > ends[place - 2] for place in range(2, 6)), "two fit at a time"


# -- the command


def test_every_system_serves_every_workload() -> None:
    shape = FLEETS["paper"]
    for workload in ("loogle", "scbench"):
        accesses = WORKLOADS[workload](40, 0)
        rows = {name: run(accesses, shape.options(None, 0)) for name, run in RUNS.items()}
        assert all(0 < row.token_hit_rate < 0.9 for row in rows.values())
        assert rows["cache-aware"].bytes_moved == 0 < rows["pool"].bytes_moved
    options = shape.options(None, 0)
    assert options.capacity_tokens == 4 * ENGINE.cache_tokens
    assert RUNS["in-place"](accesses, options) == rows["in-place"]


def test_rates_are_searched_and_one_rate_is_shared(tmp_path: Path) -> None:
    file = tmp_path / "paper.json"
    arguments = PaperArguments(systems="cache-aware,in-place", requests=60, json_file=file)
    result = Study(arguments, Console(quiet=True)).run()
    assert msgspec.json.decode(file.read_bytes(), type=PaperResult) == result
    assert result.complete
    router, modelled = result.rows.values()
    assert result.rate == router.goodput <= router.throughput
    assert router.same.slo_attainment >= 0.9
    assert min(modelled.goodput, modelled.throughput) > 0


def test_one_rate_needs_no_search() -> None:
    outcome = CliRunner().invoke(bench, ["paper", "--requests", "30", "--rate", "2", "--systems", "pd-3p1d,pool"])
    assert outcome.exit_code == 0, outcome.output
    assert "at 2.00 requests/s" in " ".join(outcome.output.split())


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("workload", {"workload": "mmlu"}),
        ("fleet", {"fleet": "tomorrow"}),
        ("requests", {"requests": 1}),
        ("systems", {"systems": "vllm"}),
        ("systems", {"systems": "one-instance", "fleet": "today"}),
    ],
)
def test_a_wrong_argument_is_named(field: str, arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{field}'"):
        Study(PaperArguments(**arguments), Console(quiet=True))  # type: ignore[arg-type]


def test_no_tensor_parallelism_without_nvlink() -> None:
    assert set(RUNS) - set(runs_named("all", replace(FLEETS["paper"], nvlink=False))) == {"one-instance"}
