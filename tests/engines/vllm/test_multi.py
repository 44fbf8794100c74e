"""Within vLLM's `MultiConnector` the tokens are the same, and a corrupt or lost segment costs a recompute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.engines.vllm.conftest import PATIENT, PATIENT_NODES, metrics_of, prompt
from tests.engines.vllm.spoiling import spoil, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0
TOKENS = "vllm:tokenlake_prompt_tokens_total"
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "128MiB", "16MiB", **PATIENT_NODES) as running:
        yield running


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], plain: Engine, cluster: Cluster) -> tuple[Engine, Engine]:
    """One with two connectors, whose salts make two pools of one daemon; one with the second of these connectors alone,
    on the other node. They start at once."""
    here, there = (str(node.socket) for node in cluster.nodes)
    common = {"verify": True, **PATIENT}
    wrapped = [{"socket": here, "salt": salt, **common} for salt in "ab"]
    return start(wrapped, transfer=RECOMPUTE, disable_log_stats=False), start({"socket": there, "salt": "b", **common})


@pytest.fixture(scope="module")
def multi(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


@pytest.fixture(scope="module")
def alone(engines: tuple[Engine, Engine]) -> Engine:
    return engines[1]


def hits(engine: Engine, tokens: list[int], expected: list[int]) -> float:
    """The number of tokens that an engine with an empty cache takes from its pools for a prompt."""
    assert engine.call("flush")
    assert engine.call("forget")
    before = engine.call("counts")["tokens_hit"]
    assert engine.generate([tokens])[0] == expected
    return float(engine.call("counts")["tokens_hit"] - before)


def test_one_connector_loads_and_all_store(multi: Engine, alone: Engine, plain: Engine) -> None:
    tokens = prompt(1000, 1)
    expected = plain.generate([tokens])[0]
    assert alone.generate([tokens])[0] == expected
    assert alone.call("flush")
    # The first connector finds nothing, so the second loads and the first stores; then the first loads.
    assert [hits(multi, tokens, expected) for _ in range(2)] == [768, 768]
    longer = tokens + prompt(500, 2)
    assert multi.generate([longer]) == plain.generate([longer])
    assert multi.call("flush")
    assert hits(alone, longer, plain.generate([longer])[0]) == 1280, "the second connector stored nothing"
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
    assert hits(multi, tokens, expected) == 768
    assert multi.call("forget")
    # The control are the hits above: no load fails while the segments are intact.
    assert multi.call("counts")["loads_failed"] == 0
    # One pool loses its last segment, which is recomputed; then the other pool loses all its segments.
    assert spoil(cluster, multi, tokens, salt="a", segments=1) == 1
    assert multi.generate([tokens])[0] == expected
    failed = multi.call("counts")["loads_failed"]
    assert failed > 0
    assert multi.call("flush")
    assert multi.call("forget")
    # The recomputed segment is not stored again where the store came before the daemon had dropped the corrupt copy.
    assert spoil(cluster, multi, tokens, salt="a") >= 2
    assert spoil(cluster, multi, tokens, salt="b") == 3
    assert multi.generate([tokens])[0] == expected
    failures = multi.call("counts")["loads_failed"]
    assert failures > failed
    # Both sides of a connector count a failed load, and the metrics page counts it once.
    assert 2 * metrics_of(multi)["vllm:tokenlake_loads_failed_total"] == failures


def test_segments_of_a_killed_owner_are_recomputed(
    multi: Engine, alone: Engine, plain: Engine, cluster: Cluster
) -> None:
    many = [prompt(900 + seed, 40 + seed) for seed in range(6)]
    expected = [plain.generate([tokens])[0] for tokens in many]
    assert alone.generate(many) == expected
    assert alone.call("flush")
    multi.call("slow_loads", seconds=0.05)
    before = multi.call("counts")["loads_failed"]
    received = cluster.totals()["tokenlake_received_segments_total"]
    answers: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: answers.append(multi.generate(many)))
    thread.start()
    # The requests are loaded one after the other, three segments each.
    until = time.monotonic() + TIMEOUT_S
    while cluster.totals()["tokenlake_received_segments_total"] == received:
        assert time.monotonic() < until, multi.log.read_text()[-2000:]
        time.sleep(0.01)
    cluster.nodes[1].kill()
    thread.join(TIMEOUT_S)
    assert answers == [expected]
    assert multi.call("counts")["loads_failed"] > before
    assert tracebacks(multi) == []


def test_rank_reports_are_merged_per_connector() -> None:
    """vLLM merges the reports of ranks so: for each connector the slowest rank counts."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

    from tokenlake_client.engines.vllm.connector import StepOutcome
    from tokenlake_client.engines.vllm.step_plan import StepReport

    ranks = [
        MultiKVConnectorWorkerMetadata((StepOutcome(StepReport(first)), None, StepOutcome(StepReport(second))))
        for first, second in ((3, 7), (4, 6))
    ]
    first, between, second = ranks[0].aggregate(ranks[1]).metadata
    assert (first.report.done, between, second.report.done) == (3, None, 6)
