"""Three nodes with kept memory restart in turn beside engines of transformers."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.engines.models import SEGMENT, family, prompt
from tests.engines.rolling import KEPT, Load, Reply, Serving, Shape, Tokens, rolling_restarts
from tests.robustness.live import PATIENT, accounted, wait_until
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.rest, pytest.mark.timeout(300)]

NODES = 3
SHAPE = Shape(SEGMENT, 6 * SEGMENT, 40, prompt)
OPTIONS = EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT, mode="fetch")


def greedy(generate: Any, tokens: Tokens) -> Tokens:
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    answer: Tokens = generate(torch.tensor([tokens]), **settings)[0, len(tokens) :].tolist()
    return answer


def serving(engine: TokenLakeEngine) -> Serving:
    def ask(tokens: Tokens) -> Reply:
        before, began = engine.counts.tokens_hit, time.monotonic()
        answer = greedy(engine.generate, tokens)
        seconds = time.monotonic() - began
        engine.flush(20)
        return Reply(answer, engine.counts.tokens_hit - before, seconds)

    return Serving(ask, os.getpid())


def test_hits_before_during_and_after(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Cluster(NODES, "64MiB", "1MiB", **KEPT) as cluster:
        with ExitStack() as stack:
            models = [family("llama-gqa") for _ in cluster.nodes]
            engines = [
                stack.enter_context(TokenLakeEngine(each, node.socket, OPTIONS))
                for each, node in zip(models, cluster.nodes, strict=True)
            ]
            load = Load([serving(each) for each in engines], lambda tokens: greedy(model.generate, tokens), SHAPE)
            rolling_restarts(cluster, load)
            for node in cluster.nodes:
                wait_until(lambda: accounted(node), "nothing is leased or withheld")  # noqa: B023
        assert not [record for record in caplog.records if record.exc_info]
        for node in cluster.nodes:
            assert "Traceback" not in node.log.read_text()
