"""The daemon of a transformers engine restarts, and its memory outlives it: the same tokens, and hits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.models import SEGMENT, prompt
from tests.robustness.live import PATIENT, daemons, wait_until
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine

pytestmark = pytest.mark.live

PROMPTS = 4


def greedy(generate: Any, ids: Any) -> list[list[int]]:
    output: list[list[int]] = generate(ids, max_new_tokens=12, do_sample=False).tolist()
    return output


def test_the_same_tokens_and_hits(model: Any) -> None:
    prompts = [torch.tensor([prompt(5 * SEGMENT + 1 + seed, seed)]) for seed in range(PROMPTS)]
    expected = [greedy(model.generate, ids) for ids in prompts]
    options = EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT, mode="fetch")
    with (
        daemons(1, "64MiB", keep_s="600") as cluster,
        TokenLakeEngine(model, cluster.nodes[0].socket, options) as engine,
    ):
        node = cluster.nodes[0]
        assert [greedy(engine.generate, ids) for ids in prompts] == expected
        assert engine.flush(20)
        for how in ("in order", "killed"):
            if how == "killed":
                node.kill()
            else:
                assert node.stop() == 0
            assert greedy(engine.generate, prompts[0]) == expected[0], "no daemon runs"
            node.start()
            cluster.wait_ready()

            def hits() -> int:
                before = engine.counts.tokens_hit
                assert [greedy(engine.generate, ids) for ids in prompts] == expected
                return int(engine.counts.tokens_hit - before)

            # A request in the moment before the engine is connected again is a miss.
            wait_until(lambda: hits() == 5 * SEGMENT * PROMPTS, "all hits are back")
