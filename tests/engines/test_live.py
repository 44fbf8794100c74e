"""Two engine processes and a real daemon: one computes and stores, the other reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engines.models import SEGMENT, prompt
from tests.robustness.live import PATIENT, daemons
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

PROMPTS = 4

OTHER_ENGINE = """
import json, sys, torch
from tests.engines.test_live import greedy, prompts
from tests.engines.models import family
from tests.robustness.live import PATIENT, daemons
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
torch.set_num_threads(1)
model = family("llama-gqa")
with TokenLakeEngine(model, sys.argv[1], EngineOptions(segment_tokens=16, deadlines=PATIENT)) as engine:
    tokens = [greedy(engine.generate, ids) for ids in prompts()]
    print(json.dumps([tokens, engine.counts.tokens_hit, engine.counts.failures]))
"""


def prompts() -> list[Any]:
    return [torch.tensor([prompt(5 * SEGMENT + seed, seed)]) for seed in range(PROMPTS)]


def greedy(generate: Any, ids: Any) -> list[list[int]]:
    output: list[list[int]] = generate(ids, max_new_tokens=12, do_sample=False).tolist()
    return output


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with daemons(1, "64MiB") as cluster:
        yield cluster.nodes[0]


def test_another_process_uses_the_computed_segments(node: Node, model: Any) -> None:
    expected = [greedy(model.generate, ids) for ids in prompts()]
    with TokenLakeEngine(model, node.socket, EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT)) as engine:
        assert [greedy(engine.generate, ids) for ids in prompts()] == expected
        assert engine.flush(20)
        assert engine.counts.tokens_hit == engine.counts.failures == 0
        assert engine.counts.tokens_not_stored == 0
    command = [sys.executable, "-c", OTHER_ENGINE, str(node.socket)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    tokens, hit, failures = json.loads(output.splitlines()[-1])
    assert tokens == expected
    # The first prompt ends with a segment, whose last token is left to compute.
    assert (hit, failures) == ((4 + 5 * (PROMPTS - 1)) * SEGMENT, 0)
