"""An engine on a new daemon of another cluster uses what another engine left in the cold tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import SEGMENT
from tests.engines.test_live import PROMPTS, greedy, prompts
from tests.robustness.live import PATIENT, daemons, total, wait_until
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine

pytestmark = pytest.mark.live
OPTIONS = EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT)


def test_an_engine_of_another_cluster_hits(model: Any, tmp_path: Path) -> None:
    expected = [greedy(model.generate, ids) for ids in prompts()]
    with daemons(1, "64MiB", cluster="first", cold=str(tmp_path)) as first:
        node = first.nodes[0]
        wait_until(lambda: total(node, "tokenlake_cold_writable") == 1, "the cold tier is in use")
        with TokenLakeEngine(model, node.socket, OPTIONS) as engine:
            assert [greedy(engine.generate, ids) for ids in prompts()] == expected
            assert engine.flush(20)
        assert node.stop() == 0
    with daemons(1, "64MiB", cluster="second", cold=str(tmp_path)) as second:
        node = second.nodes[0]
        wait_until(lambda: total(node, "tokenlake_cold_objects") > 0, "the index is read")
        with TokenLakeEngine(model, node.socket, OPTIONS) as engine:
            assert [greedy(engine.generate, ids) for ids in prompts()] == expected
            # The first prompt has no token behind its last segment, and an engine computes one at least.
            assert engine.counts.tokens_hit == (PROMPTS * 5 - 1) * SEGMENT
            assert engine.counts.failures == 0
        assert total(node, "tokenlake_cold_read_segments_total") == PROMPTS * 5 - 1
