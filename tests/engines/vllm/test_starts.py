"""An engine whose requests a lost segment would end does not start; one whose tokens the pool would change starts
without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import PATIENT, prompt
from tests.engines.vllm.forked import ForkedEngine, answers
from tokenlake.errors import Unreachable
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.families import save_latent
from tokenlake_testing.vllm_engine import transfer_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPTS = [prompt(700, 1), prompt(300, 2)]
DECLINED = 'tokenlake_refused_engines_total{reason="declined"}'
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def within(cluster: Cluster) -> list[dict[str, Any]]:
    """The settings of a `MultiConnector` with our connector alone, which verifies its reads."""
    return [{"socket": str(cluster.nodes[0].socket), "verify": True, **PATIENT}]


def test_a_wrapper_without_the_policy_is_refused(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    refused = ForkedEngine(model, tmp_path / "refused.log", within(cluster))
    # The line within "connectors" does not reach vLLM's scheduler.
    (misplaced,) = transfer_of(within(cluster))["kv_connector_extra_config"]["connectors"]
    misplaced["kv_load_failure_policy"] = "recompute"
    extra = {"kv_connector_extra_config": {"connectors": [misplaced]}}
    refused_too = ForkedEngine(model, tmp_path / "misplaced.log", within(cluster), transfer=extra)
    # Of a model whose layout the pool does not know.
    opaque = ForkedEngine(model, tmp_path / "opaque.log", within(cluster), speculative_config=GUESSING)
    for engine in (refused, refused_too, opaque):
        with pytest.raises(Unreachable, match="setting 'kv_load_failure_policy' is 'fail'") as raised:
            answers(engine, PROMPTS)
        assert 'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config' in str(raised.value)


def test_a_model_that_the_pool_would_change(cluster: Cluster, tmp_path: Path) -> None:
    """vLLM's CPU kernels of latent attention; with `serve_inexact`, `test_opaque` runs them."""
    log = tmp_path / "log"
    engine = ForkedEngine(
        save_latent(tmp_path / "model"),
        log,
        {"socket": str(cluster.nodes[0].socket), **PATIENT},
        attention_backend="CPU_MLA",
    )
    before = cluster.nodes[0].metrics()
    # These kernels round by what vLLM batches together: two answers without a pool may differ too.
    assert [len(each) for each in answers(engine, PROMPTS)] == [len(PROMPTS)] * 2
    after = cluster.nodes[0].metrics()
    assert after["tokenlake_match_requests_total"] == before["tokenlake_match_requests_total"]
    assert "served without the pool: latent attention on vLLM's CPU kernels" in log.read_text()
    assert after[DECLINED] == before[DECLINED] + 1, "operators of the daemon see it too"
