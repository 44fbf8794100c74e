"""Families whose cache only vLLM understands: the same greedy tokens with the pool as without it, whatever happens to
daemons and segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, TINY, pool_of, prompt, until_hit
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import spoil_all, tracebacks
from tests.robustness.live import wait_until
from tokenlake_server.start.models import ModelCache
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_hybrid, save_latent, save_mistral, save_sliding_window
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SIZES = TinyModel(vocabulary=TINY.vocabulary, hidden=128, intermediate=256, layers=4, heads=4, kv_heads=2)
WIDE = TinyModel(vocabulary=TINY.vocabulary, hidden=256, intermediate=256, layers=4, heads=4, kv_heads=2)
"""Head dim 64: the attention of the hybrid model has blocks as large as its recurrent states."""
DRAFT = TinyModel(1, TINY.vocabulary, hidden=128, intermediate=256, layers=1, heads=4, kv_heads=2)


@dataclass(frozen=True, slots=True)
class Case:
    """A family: how its model is made, and vLLM's arguments."""

    save: Callable[[str | Path, TinyModel | None], Path]
    cached: int | None
    """The tokens of a prompt that can be loaded; None: as many as vLLM's own cache keeps of a prompt of `length`, whose
    blocks depend on the processor. The prompts then have four more."""
    sizes: TinyModel = SIZES
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft: bool = False
    length: int = 1000
    """The tokens of a prompt. Few are left behind the cached ones, so that a wrong cache changes the answer."""


GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FAMILIES = {
    "window": Case(save_mistral, 768),
    "hybrid": Case(save_hybrid, None, WIDE, {"dtype": "bfloat16"}, length=800),
    "mixed": Case(save_sliding_window, 768),
    # vLLM's CPU build computes other keys for some of the first 32 tokens behind a cached prefix of this family: a long
    # rest would change the tokens. Its kernels for AMX take no float32.
    "latent": Case(
        save_latent,
        992,
        arguments={"attention_backend": "CPU_MLA"},
        settings={"segment_tokens": 16, "serve_inexact": True},
    ),
    "n-gram": Case(save_tiny_model, 768, arguments={"speculative_config": GUESSING}),
    "draft model": Case(save_tiny_model, 768, draft=True),
}

ONE_FAMILY = pytest.mark.parametrize("run", ["window"], indirect=True)
"""The first family, for the parts that do not depend on what a segment holds."""


@dataclass(slots=True)
class Run:
    """The engines of one family, and the tokens that vLLM generates without a connector."""

    case: Case
    cluster: Cluster
    expected: dict[int, list[int]]
    first: Engine
    """It verifies its reads."""
    second: Engine
    """It does not."""

    def prompt(self, seed: int) -> list[int]:
        """A prompt; two seeds share no prefix."""
        return prompt(self.case.length, seed)

    def tokens(self, engine: Engine, seed: int) -> int:
        """Generate for the prompt of `seed`, and compare the tokens. Returns the number of cached prompt tokens."""
        answer = engine.timed([self.prompt(seed)])
        assert answer.tokens[0] == self.expected[seed]
        return answer.cached

    def until_hit(self, engine: Engine, seed: int) -> int:
        """Repeat a prompt until the pool supplies all of it that can be cached. Returns the number of tokens."""
        return until_hit(engine, self.prompt(seed), self.expected[seed], self.case.cached or 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "256MiB", "16MiB") as running:
        yield running


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    case = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("opaque")
    model = case.save(directory / "model", case.sizes)
    arguments: dict[str, Any] = dict(case.arguments)
    if case.draft:
        draft = str(save_tiny_model(directory / "draft", DRAFT))
        arguments["speculative_config"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    pool = pool_of(cluster.nodes[0], match_ms=2000, **case.settings)
    plain = ForkedEngine(model, directory / "plain.log", None, **arguments)
    first = ForkedEngine(model, directory / "first.log", {**pool, "verify": True}, **arguments)
    second = ForkedEngine(model, directory / "second.log", pool, **arguments)
    try:
        if case.cached is None:
            cached = max(plain.timed([prompt(case.length, 9)]).cached for _ in range(2))
            case = replace(case, cached=cached, length=cached + 4)
        expected = {seed: plain.generate([prompt(case.length, seed)])[0] for seed in range(6)}
        plain.close()
        yield Run(case, cluster, expected, first, second)
    finally:
        for engine in (plain, first, second):
            engine.close()


def test_cold_and_warm(run: Run) -> None:
    assert run.tokens(run.first, 0) == 0
    assert run.until_hit(run.first, 0) == run.case.cached
    counts = run.first.call("counts")
    assert (counts["failures"], counts["loads_failed"]) == (0, 0)


def test_another_engine(run: Run) -> None:
    assert run.until_hit(run.second, 0) == run.case.cached


@pytest.mark.parametrize("run", ["mixed"], indirect=True)
def test_only_the_last_window_of_a_prompt_is_stored(run: Run) -> None:
    """As the table of known models counts: whole segments of the one layer that sees all tokens, and the last window of
    three groups of one layer each."""
    tokens = 1024
    model = ModelCache("mixed", layers=1, kv_heads=SIZES.kv_heads, head_dim=32, windows=3, window=512)
    expected = tokens // model.layout().segment_tokens + model.prompt_segments

    def stored() -> float:
        return run.cluster.totals()["tokenlake_stored_segments_total"]

    before = stored()
    run.first.generate([prompt(tokens + 1, 90)])
    run.first.call("flush")
    wait_until(lambda: stored() - before >= expected, "the prompt is stored", TIMEOUT_S)
    assert stored() - before == expected


def test_corrupt_segments(run: Run) -> None:
    """The control: the engine that does not verify its reads computes with wrong bytes. Both are asked until they load,
    because a late lookup is a miss."""

    def tokens_are_right(engine: Engine, seed: int) -> bool:
        assert time.monotonic() < until, engine.log.read_text()[-2000:]
        engine.call("flush")
        spoil_all(run.cluster, engine)
        engine.call("forget")
        return engine.generate([run.prompt(seed)])[0] == run.expected[seed]

    for engine, seed in ((run.second, 2), (run.first, 1)):
        assert run.tokens(run.first, seed) == 0
        assert run.until_hit(engine, seed)
    failed = run.first.call("counts")["loads_failed"]
    until = time.monotonic() + TIMEOUT_S
    while tokens_are_right(run.second, 2):
        pass
    while run.first.call("counts")["loads_failed"] == failed:
        assert tokens_are_right(run.first, 1)
    run.second.call("forget")


@pytest.mark.parametrize("run", ["hybrid"], indirect=True)
def test_a_daemon_that_is_killed_during_a_load(run: Run) -> None:
    assert run.until_hit(run.first, 4)
    run.first.call("forget")
    run.first.call("slow_loads", seconds=0.2)
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(run.tokens(run.first, 4)))
    asked = run.cluster.totals()["tokenlake_match_requests_total"]
    thread.start()
    until = time.monotonic() + TIMEOUT_S
    while run.cluster.totals()["tokenlake_match_requests_total"] == asked and time.monotonic() < until:
        time.sleep(0.01)
    run.cluster.nodes[0].kill()
    thread.join(TIMEOUT_S)
    assert len(answers) == 1, "other tokens, or none"
    run.first.call("slow_loads", seconds=0.0)
    run.cluster.nodes[0].start()
    run.cluster.wait_ready()
    assert run.until_hit(run.first, 4)


@ONE_FAMILY
@pytest.mark.parametrize("call", ["ChunkManager.step_ends", "ChunkManager.finished", "ChunkManager.asked"])
def test_an_error_within_a_hook_does_not_reach_vllm(run: Run, call: str) -> None:
    before = run.second.call("counts")["failures"]
    run.second.call("plant", call=call, error="ValueError")
    try:
        run.tokens(run.second, 5)
    finally:
        run.second.call("plant", call="", error="")
    assert run.second.call("counts")["failures"] > before
    assert run.until_hit(run.second, 5) == run.case.cached


@ONE_FAMILY
@pytest.mark.parametrize("call", ["EngineCalls.attach", "Lease.fetch", "Pool.opaque_keys", "EngineCalls.begin_match"])
def test_a_call_of_the_pool_that_fails(run: Run, call: str) -> None:
    assert run.until_hit(run.second, 5)
    run.second.call("forget")
    before = run.second.call("counts")
    run.second.call("plant", call=call, error="Unreachable")
    try:
        assert run.tokens(run.second, 5) == 0
    finally:
        run.second.call("plant", call="", error="")
    counts = run.second.call("counts")
    assert counts["failures"] > before["failures"]
    # The scheduler's side counts a failed load, and so does the rank.
    assert counts["loads_failed"] - before["loads_failed"] == 2 * (call in ("EngineCalls.attach", "Lease.fetch"))
    assert run.until_hit(run.second, 5) == run.case.cached


def test_no_hook_raised(run: Run) -> None:
    for engine in (run.first, run.second):
        assert tracebacks(engine) == []


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mistral(tmp_path_factory.mktemp("window"), SIZES)


def tokens_and_hit(engine: Engine, *engines: Engine) -> tuple[list[list[int]], list[bool]]:
    """The tokens of two prompts, and whether each engine took a part of the first one from the pool."""
    tokens, hits = engine.generate([prompt(1000, 1), prompt(600, 2)]), []
    for one in (engine, *engines):
        until, cached = time.monotonic() + TIMEOUT_S, 0
        while not cached and time.monotonic() < until:
            one.call("forget")
            answer = one.timed([prompt(1000, 1)])
            assert answer.tokens == tokens[:1]
            cached = answer.cached
        hits.append(cached > 0)
    return tokens, hits


def test_within_other_connectors(window: Path, cluster: Cluster, tmp_path: Path) -> None:
    """It shares with an engine that has one connector: they find the same layout."""
    pool: dict[str, Any] = pool_of(cluster.nodes[0], salt="within")
    within = ForkedEngine(window, tmp_path / "within.log", [pool], transfer={"kv_load_failure_policy": "recompute"})
    alone = ForkedEngine(window, tmp_path / "alone.log", pool)
    plain = ForkedEngine(window, tmp_path / "plain.log", None)
    try:
        expected = plain.generate([prompt(1000, 1), prompt(600, 2)])
        assert tokens_and_hit(within, alone) == (expected, [True, True])
        for engine in (within, alone):
            assert tracebacks(engine) == []
    finally:
        for engine in (within, alone, plain):
            engine.close()


@pytest.mark.alone
def test_two_ranks(window: Path, cluster: Cluster, tmp_path: Path) -> None:
    """Each fills its shard of a segment. The ranks spin on all processors, so that lookups take long."""
    pool: dict[str, Any] = pool_of(cluster.nodes[0], salt="ranks")
    ranks = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    before = cluster.totals()["tokenlake_stored_segments_total"]
    engine = ForkedEngine(window, tmp_path / "log", pool, nice=10, environment=ranks, tensor_parallel_size=2)
    try:
        for seed, spoiled in ((1, False), (2, True)):
            if spoiled:
                engine.call("spoil_writes")
            until, cached, expected = time.monotonic() + 3 * TIMEOUT_S, 0, engine.generate([prompt(1000, seed)])
            while not cached and time.monotonic() < until:
                engine.call("forget")
                answer = engine.timed([prompt(1000, seed)])
                cached = answer.cached
                # The control: zeros in place of the cache change the tokens.
                assert (answer.tokens == expected) is not (spoiled and cached > 0)
            assert cached == 768
        assert cluster.totals()["tokenlake_stored_segments_total"] > before
        assert tracebacks(engine) == []
    finally:
        engine.close()
