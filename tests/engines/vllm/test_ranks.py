"""Tensor parallelism: each rank has its shards, all have one hit length, and other sizes share without a setting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import metrics_of, pool_of, prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.timeout(400)]

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
LENGTHS = (250, 512, 513, 700, 1500)
PROMPTS = [prompt(length, length) for length in LENGTHS]
FULL = sum((length + 7) // 256 for length in LENGTHS)
"""The number of segments of all prompts, including those that decode completes."""
HITS = 0 + 384 + 512 + 512 + 1280
"""The tokens that one rank finds when all segments were stored."""


def test_two_ranks_and_one_rank_share(start: Callable[..., Engine], plain: Engine, cluster: Cluster) -> None:
    expected = [plain.generate([tokens])[0] for tokens in PROMPTS]
    longer = [tokens + prompt(600, 9) for tokens in PROMPTS]
    expected_longer = [plain.generate([tokens])[0] for tokens in longer]
    pool = pool_of(cluster.nodes[0], salt="ranks")
    before = cluster.totals()["tokenlake_stored_segments_total"]
    two = start(pool, tensor_parallel_size=2, environment=TWO_RANKS, disable_log_stats=False)
    assert [two.generate([tokens])[0] for tokens in PROMPTS] == expected
    # Segments are whole when both ranks have filled their part, which happens behind the engine. Two ranks that spin
    # on two processors may leave the daemon without a turn beyond a deadline: then some are computed again.
    until = time.monotonic() + 20
    while (stored := cluster.totals()["tokenlake_stored_segments_total"] - before) < FULL and time.monotonic() < until:
        time.sleep(0.02)
    assert stored > 0, two.log.read_text()[-2000:]

    one = start(pool)
    assert [one.generate([tokens])[0] for tokens in PROMPTS] == expected
    hit = one.call("counts")["tokens_hit"]
    assert 0 < hit <= HITS
    assert [one.generate([tokens])[0] for tokens in longer] == expected_longer
    assert one.call("flush")

    before = cluster.tokens()["local"]
    assert [two.generate([tokens])[0] for tokens in longer] == expected_longer
    # The ranks load and store the same tokens, which count once.
    page = metrics_of(two)
    loaded = page['vllm:tokenlake_prompt_tokens_total{source="this_node"}']
    until = time.monotonic() + 20
    while cluster.tokens()["local"] - before < loaded and time.monotonic() < until:
        time.sleep(0.02)
    assert cluster.tokens()["local"] - before == loaded
    assert page["vllm:tokenlake_loaded_tokens_total"] == loaded > 0
    assert 256 * stored <= page["vllm:tokenlake_stored_tokens_total"] + page["vllm:tokenlake_not_stored_tokens_total"]
    assert page["vllm:tokenlake_stored_tokens_total"] <= sum(len(tokens) + 8 for tokens in longer)
    two.close()
    one.close()
