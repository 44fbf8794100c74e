"""A tenant whose requests with one salt go over their quota: their own segments leave, those of all others stay, and no
token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engines.vllm.conftest import again, pool_of, prompt, until_hit
from tests.engines.vllm.spoiling import tracebacks
from tests.server.scene import RED, tenants
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TOKENS, CACHED, SEGMENTS = 1000, 768, 3
MEMORY_MIB, QUOTA = 24, 0.25
PROMPTS = 12
"""So many prompts of the salt over its quota: more segments than the quota, fewer than the memory has slots for."""
TRIMMED = "tokenlake_evicted_salt_segments_total"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node of two tenants."""
    config = tenants(tmp_path_factory.mktemp("config"), red=f"salt_quota = {QUOTA}")
    with Cluster(1, f"{MEMORY_MIB}MiB", "2MiB", config=config) as running:
        yield running


def of_red(cluster: Cluster, name: str) -> float:
    return cluster.nodes[0].metrics().get(f'{name}{{tenant="red"}}', 0.0)


def test_a_salt_over_its_quota_harms_no_other(start: Callable[..., Engine], plain: Engine, cluster: Cluster) -> None:
    engine = start(pool_of(cluster.nodes[0], credential=RED))
    first, *greedy = [prompt(TOKENS, 100 + number) for number in range(PROMPTS + 1)]
    expected_first, *expected = plain.generate([first, *greedy])
    # The same prompt without a salt, and with one that keeps to its quota.
    for salt in (None, "modest"):
        assert until_hit(engine, first, expected_first, CACHED, salt=salt) == CACHED
    segment = of_red(cluster, "tokenlake_written_bytes_total") / cluster.totals()["tokenlake_stored_segments_total"]
    most = int(QUOTA * (MEMORY_MIB << 20) // segment)
    assert SEGMENTS < most < PROMPTS * SEGMENTS

    assert [again(engine, tokens, salt="greedy")[0] for tokens in greedy] == expected
    assert of_red(cluster, TRIMMED) >= PROMPTS * SEGMENTS - most
    assert cluster.totals()["tokenlake_evicted_segments_total"] == 0, "the memory has room beside the quota"
    for salt in (None, "modest"):
        assert again(engine, first, salt=salt) == (expected_first, CACHED)

    # Of the greedy salt the newest prompts are there; the others are computed, and nothing of them is wrong.
    assert again(engine, greedy[-1], salt="greedy") == (expected[-1], CACHED)
    found = [again(engine, tokens, salt="greedy") for tokens in greedy]
    assert [answer for answer, _ in found] == expected
    assert 0 in [cached for _, cached in found]
    assert engine.call("counts")["failures"] == 0
    assert tracebacks(engine) == []
