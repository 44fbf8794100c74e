"""The same greedy float32 tokens with the pool as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import again, pool_of, prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
BLOCK = 128
LENGTHS = (1, 255, 256, 257, 383, 384, 385, 511, 512, 513, 640, 769, 1500)
PROMPTS = [prompt(length, length) for length in LENGTHS]


def loadable(length: int) -> int:
    """Tokens of a stored prompt that can be loaded: full segments, whole blocks, one token left to compute."""
    return min(length // SEGMENT * SEGMENT, (length - 1) // BLOCK * BLOCK)


HITS = sum(loadable(length) for length in LENGTHS)


@pytest.fixture(scope="module")
def first(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    """Its cache is small, and a step is shorter than two segments."""
    pool = pool_of(cluster.nodes[0])
    return start(pool, num_gpu_blocks_override=40, max_num_batched_tokens=320)


@pytest.fixture(scope="module")
def second(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    """An engine that verifies its reads."""
    return start(pool_of(cluster.nodes[0], verify=True))


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return one_by_one(plain)


def one_by_one(engine: Engine) -> list[list[int]]:
    return [engine.generate([tokens])[0] for tokens in PROMPTS]


def test_cold_and_warm(first: Engine, expected: list[list[int]]) -> None:
    assert one_by_one(first) == expected
    assert first.call("flush")
    counts = first.call("counts")
    assert counts["tokens_hit"] == counts["failures"] == 0
    # Seven of the eight new tokens are fed to the model.
    assert counts["tokens_stored"] == sum((length + 7) // SEGMENT * SEGMENT for length in LENGTHS)
    assert first.call("forget")
    assert one_by_one(first) == expected
    counts = first.call("counts")
    assert (counts["tokens_hit"], counts["failures"], counts["loads_failed"]) == (HITS, 0, 0)


def test_vllms_cache_and_the_pool_share_a_prompt(first: Engine, plain: Engine) -> None:
    longer = PROMPTS[-1] + prompt(700, 1)
    expected = plain.generate([longer])
    assert first.generate([longer]) == expected
    assert first.call("flush")
    assert first.call("forget")
    # One block of the first segment is found locally, so the load begins in the middle of it.
    assert first.generate([longer[:200]]) == plain.generate([longer[:200]])
    before = first.call("counts")["tokens_hit"]
    assert first.generate([longer]) == expected
    assert first.call("counts")["tokens_hit"] - before == 2048 - 128


def test_another_process(second: Engine, expected: list[list[int]]) -> None:
    assert one_by_one(second) == expected
    counts = second.call("counts")
    assert (counts["tokens_hit"], counts["failures"], counts["loads_failed"]) == (HITS, 0, 0)


def test_many_at_once_with_preemption(first: Engine, second: Engine, plain: Engine) -> None:
    many = [prompt(600 + 37 * seed, 100 + seed) for seed in range(8)]
    expected = [plain.generate([tokens], 150)[0] for tokens in many]
    # 8 prompts of up to 860 tokens and 150 more: 60 blocks, of which the first engine has 40.
    before = first.call("counts")["requests"]
    assert first.generate(many, 150) == expected
    assert first.call("counts")["requests"] > before + len(many), "no request was preempted"
    assert first.call("flush")
    assert first.call("forget")
    assert first.generate(many, 150) == expected
    assert second.generate(many, 150) == expected
    for engine in (first, second):
        assert engine.call("counts")["failures"] == 0


def test_segments_completed_by_decode(first: Engine, second: Engine, plain: Engine) -> None:
    question = prompt(200, 7)
    answer = first.generate([question], 400)[0]
    assert answer == plain.generate([question], 400)[0]
    assert first.call("flush")
    follow_up = question + answer + prompt(20, 8)
    # 200 + 400 tokens, of which the last one was never fed to the model: two segments.
    assert again(second, follow_up) == (plain.generate([follow_up])[0], 2 * SEGMENT)


def test_two_salts_share_nothing(first: Engine, plain: Engine) -> None:
    tokens = prompt(600, 77)
    (expected,) = plain.generate([tokens])
    assert [again(first, tokens, salt=salt) for salt in ("a", "b", "a")] == [
        (expected, cached) for cached in (0, 0, 512)
    ]


def test_after_a_restart_of_the_engine(start: Callable[..., Engine], cluster: Cluster, second: Engine) -> None:
    tokens = [prompt(900 + seed, 300 + seed) for seed in range(3)]
    expected = [second.generate([one])[0] for one in tokens]
    assert second.call("flush")
    second.close()
    restarted = start(pool_of(cluster.nodes[0]))
    assert [again(restarted, one) for one in tokens] == [(answer, 768) for answer in expected]
