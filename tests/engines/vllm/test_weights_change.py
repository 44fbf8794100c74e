"""Weights that change in place: no older segment is loaded afterwards, and other engines keep their segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests.engines.vllm.conftest import DEADLINES, TINY, again, pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HIT = 768
"""Tokens of a stored prompt of 800 that can be loaded."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after some training."""
    return save_tiny_model(tmp_path_factory.mktemp("trained"), replace(TINY, seed=1))


@pytest.fixture(scope="module")
def fresh(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM without a pool, started with the new weights: the reference after the change."""
    engine = ForkedEngine(trained, tmp_path_factory.mktemp("fresh") / "log", None)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def changing(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    return start(pool_of(cluster.nodes[0]))


@pytest.fixture(scope="module")
def steady(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    """An engine that keeps the initial weights."""
    return start(pool_of(cluster.nodes[0]))


def test_new_weights_while_the_engine_sleeps(
    model: Path, trained: Path, changing: Engine, steady: Engine, fresh: Engine
) -> None:
    changing.call("reset", how="reset")
    changing.call("reload", directory=str(model), version=None)
    tokens = prompt(800, 15)
    (old,), new = changing.generate([tokens]), fresh.generate([tokens])[0]
    assert new != old
    steady.generate([tokens])
    assert changing.call("flush")
    assert changing.call("reset", how="sleep")
    changing.call("reload", directory=str(trained), version=None)
    answer = changing.timed([tokens])
    assert (answer.tokens[0], answer.cached) == (new, 0), "a segment of the old weights was loaded"
    assert again(changing, tokens) == (new, HIT)
    assert again(steady, tokens) == (old, HIT), "other engines keep the segments of the old weights"
    assert changing.call("counts")["failures"] == 0


def test_engines_with_the_same_version_share(
    model: Path, trained: Path, changing: Engine, steady: Engine, fresh: Engine, cluster: Cluster
) -> None:
    tokens = prompt(800, 50)
    expected = fresh.generate([tokens])[0]
    for engine, hit in ((changing, 0), (steady, HIT)):
        assert engine.call("reset", how="reset")
        engine.call("reload", directory=str(trained), version="step 100")
        assert again(engine, tokens) == (expected, hit)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with TokenLakeEngine(loaded, cluster.nodes[0].socket, EngineOptions(deadlines=DEADLINES)) as other:
        weights = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).state_dict()
        loaded.load_state_dict(weights)
        other.new_weights("step 100")
        ids = torch.tensor([tokens])
        assert other.generate(ids, max_new_tokens=8, do_sample=False)[0, 800:].tolist() == expected
        assert other.counts.tokens_hit == HIT
    assert changing.call("reset", how="reset")
    assert again(changing, tokens) == (expected, 0), "a version holds until the next reset"


def test_a_version_without_a_reset_is_not_shared(trained: Path, changing: Engine, steady: Engine) -> None:
    tokens = prompt(800, 60)
    for engine in (changing, steady):
        assert engine.call("reset", how="reset")
        engine.generate([prompt(300, 61)])
        # vLLM's own cache may hold results of other weights.
        engine.call("reload", directory=str(trained), version="step 200")
        assert engine.timed([tokens]).cached == 0
        assert engine.call("flush")
    assert "step 200" in steady.log.read_text()


@pytest.mark.parametrize("preempt", [True, False])
def test_a_running_request_stores_nothing_wrong(
    model: Path, trained: Path, changing: Engine, fresh: Engine, preempt: bool
) -> None:
    assert changing.call("reset", how="reset")
    changing.call("reload", directory=str(model), version=None)
    question = prompt(500, 70 + preempt)
    answer = changing.call("interrupted", prompt=question, tokens=300, directory=str(trained), preempt=preempt)
    assert len(answer["tokens"]) == 300
    assert answer["reset"] is preempt, "vLLM keeps its own cache while a request has blocks"
    # The last token has no cache; the stored segments of the others are loaded.
    longer = question + answer["tokens"] + prompt(20, 72)
    assert again(changing, longer) == (fresh.generate([longer])[0], HIT if preempt else 0)
