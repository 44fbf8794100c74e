"""Within vLLM's `MultiConnector` the tokens are the same, and a corrupt or lost segment costs a recompute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import again, metrics_of, pool_of, prompt
from tests.engines.vllm.spoiling import spoil
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

NODES = 2

TOKENS = "vllm:tokenlake_prompt_tokens_total"
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], plain: Engine, cluster: Cluster) -> tuple[Engine, Engine]:
    """One with two connectors, whose salts make two pools of one daemon; one with the second of these connectors alone,
    on the other node. They start at once."""
    here, there = cluster.nodes
    wrapped = [pool_of(here, salt=salt, verify=True) for salt in "ab"]
    alone = start(pool_of(there, salt="b", verify=True))
    return start(wrapped, transfer=RECOMPUTE, disable_log_stats=False), alone


@pytest.fixture(scope="module")
def multi(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


@pytest.fixture(scope="module")
def alone(engines: tuple[Engine, Engine]) -> Engine:
    return engines[1]


def test_one_connector_loads_and_all_store(multi: Engine, alone: Engine, plain: Engine) -> None:
    tokens = prompt(1000, 1)
    expected = plain.generate([tokens])[0]
    assert alone.generate([tokens])[0] == expected
    assert alone.call("flush")
    # The first connector finds nothing, so the second loads and the first stores; then the first loads.
    assert [again(multi, tokens) for _ in range(2)] == [(expected, 768)] * 2
    longer = tokens + prompt(500, 2)
    assert multi.generate([longer]) == plain.generate([longer])
    assert multi.call("flush")
    assert again(alone, longer) == (plain.generate([longer])[0], 1280), "the second connector stored nothing"
    counts = multi.call("counts")
    assert (counts["failures"], counts["loads_failed"]) == (0, 0)
    # Both connectors report under one name.
    page = metrics_of(multi)
    assert page["vllm:tokenlake_requests_total"] == counts["requests"]
    here, there = (
        page[f'vllm:tokenlake_prompt_tokens_total{{source="{node}"}}'] for node in ("this_node", "other_nodes")
    )
    assert here + there == counts["tokens_hit"]
    assert there == 768 == page['vllm:prompt_tokens_cached_by_source_total{source="p2p"}']
    assert here == page['vllm:prompt_tokens_cached_by_source_total{source="host"}']


def test_no_connector_answers_for_another_engine(multi: Engine, plain: Engine) -> None:
    """vLLM's engine ends if two connectors give the same field of an answer."""
    tokens = prompt(700, 5)
    answer = multi.timed([tokens], params={"do_remote_decode": True})
    assert (answer.tokens, answer.params) == (plain.generate([tokens]), [None])
    assert "no prompt is handed over to another engine: the connector is within" in multi.log.read_text()


def test_a_corrupt_segment_is_recomputed(multi: Engine, plain: Engine, cluster: Cluster) -> None:
    tokens = prompt(1000, 3)
    expected = plain.generate([tokens])[0]
    assert multi.generate([tokens])[0] == expected
    assert again(multi, tokens) == (expected, 768)
    # The control are the hits above: no load fails while the segments are intact.
    assert multi.call("counts")["loads_failed"] == 0
    # One pool loses its last segment, which is recomputed; then the other pool loses all its segments.
    assert spoil(cluster, multi, tokens, salt="a", segments=1) == 1
    assert again(multi, tokens)[0] == expected
    failed = multi.call("counts")["loads_failed"]
    assert failed > 0
    # The recomputed segment is not stored again where the store came before the daemon had dropped the corrupt copy.
    assert spoil(cluster, multi, tokens, salt="a") >= 2
    assert spoil(cluster, multi, tokens, salt="b") == 3
    assert again(multi, tokens)[0] == expected
    failures = multi.call("counts")["loads_failed"]
    assert failures > failed
    # Both sides of a connector count a failed load, and the metrics page counts it once.
    assert 2 * metrics_of(multi)["vllm:tokenlake_loads_failed_total"] == failures


def test_rank_reports_are_merged_per_connector() -> None:
    """vLLM merges the reports of ranks so: for each connector the slowest rank counts."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

    from tokenlake_client.engines.vllm.known.connector import StepOutcome
    from tokenlake_client.engines.vllm.known.step_plan import StepReport

    ranks = [
        MultiKVConnectorWorkerMetadata((StepOutcome(StepReport(first)), None, StepOutcome(StepReport(second))))
        for first, second in ((3, 7), (4, 6))
    ]
    first, between, second = ranks[0].aggregate(ranks[1]).metadata
    assert (first.report.done, between, second.report.done) == (3, None, 6)
