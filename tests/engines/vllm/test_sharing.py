"""vLLM and transformers share segments when layout and weights are the same, and never otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.vllm.conftest import DEADLINES, TINY, again, pool_of, prompt
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def vllm(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    return start(pool_of(cluster.nodes[0]))


def beside(model: Path, cluster: Cluster, options: EngineOptions | None = None) -> TokenLakeEngine:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    options = replace(options or EngineOptions(), deadlines=DEADLINES)
    return TokenLakeEngine(loaded, cluster.nodes[0].socket, options)


def greedy(engine: TokenLakeEngine, tokens: Sequence[int]) -> list[int]:
    ids: Any = torch.tensor([list(tokens)])
    output: list[int] = engine.generate(ids, max_new_tokens=8, do_sample=False)[0, len(tokens) :].tolist()
    return output


def test_transformers_reads_what_vllm_wrote(model: Path, vllm: Engine, cluster: Cluster) -> None:
    tokens = prompt(800, 1)
    expected = vllm.generate([tokens])[0]
    assert vllm.call("flush")
    with beside(model, cluster) as other:
        assert greedy(other, tokens) == expected
        assert (other.counts.tokens_hit, other.counts.failures) == (768, 0)


def test_vllm_reads_what_transformers_wrote(model: Path, vllm: Engine, cluster: Cluster) -> None:
    tokens = prompt(800, 2)
    with beside(model, cluster) as other:
        expected = greedy(other, tokens)
        assert other.flush(20)
    assert again(vllm, tokens) == (expected, 768)


def test_other_weights_or_another_segment_length_share_nothing(
    model: Path, vllm: Engine, cluster: Cluster, tmp_path: Path
) -> None:
    tokens = prompt(800, 3)
    vllm.generate([tokens])
    assert vllm.call("flush")
    same_shape = save_tiny_model(tmp_path, replace(TINY, seed=1))
    for other in (beside(same_shape, cluster), beside(model, cluster, EngineOptions(segment_tokens=128))):
        with other:
            greedy(other, tokens)
            assert (other.counts.tokens_asked, other.counts.tokens_hit, other.counts.failures) == (800, 0, 0)
