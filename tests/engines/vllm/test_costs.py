"""Measurements decide whether a hit is loaded; the tokens are the same in both cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import pool_of, prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
ENOUGH = 8
"""The number of prefills, and of loads, before their times are known."""
SLOW_S = 0.3
"""The delay of a load per segment: many times the time to compute it."""
PROMPTS = [prompt(1100 + 130 * number, number) for number in range(2 * ENOUGH)]
WHOLE = sum(len(tokens) // SEGMENT * SEGMENT for tokens in PROMPTS)


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [plain.generate([tokens])[0] for tokens in PROMPTS]


@pytest.fixture(scope="module")
def weighs(start: Callable[..., Engine], cluster: Cluster) -> Callable[[], Engine]:
    """Starts an engine that compares the times of loading and computing."""
    return lambda: start(pool_of(cluster.nodes[0], weigh_loads=True))


def run(engine: Engine, expected: list[list[int]]) -> tuple[float, float]:
    """(tokens taken from the pool, tokens found there and computed) of all prompts; vLLM's own cache is empty. Beside
    busy programs a load may be given up after the time of a prefill."""
    assert engine.call("flush")
    assert engine.call("forget")
    before = engine.call("counts")
    assert [engine.generate([tokens])[0] for tokens in PROMPTS] == expected
    after = engine.call("counts")
    hit, skipped = (after[name] - before[name] for name in ("tokens_hit", "tokens_skipped_by_cost"))
    return hit, skipped


def test_loads_faster_than_a_prefill_are_done(weighs: Callable[[], Engine], expected: list[list[int]]) -> None:
    engine = weighs()
    assert run(engine, expected) == (0, 0)
    assert sum(run(engine, expected)) == WHOLE
    # The engine has measured the times of prefills and loads by now.
    loaded = engine.call("counts")["tokens_loaded"]
    hit, skipped = run(engine, expected)
    assert hit + skipped == WHOLE
    assert engine.call("counts")["tokens_loaded"] - loaded > WHOLE / 2


def test_loads_slower_than_a_prefill_are_skipped(
    weighs: Callable[[], Engine], expected: list[list[int]], cluster: Cluster
) -> None:
    engine = weighs()
    engine.call("slow_loads", seconds=SLOW_S)
    hit, skipped = run(engine, expected)
    assert hit + skipped == WHOLE
    assert hit >= sum(len(tokens) // SEGMENT * SEGMENT for tokens in PROMPTS[:ENOUGH])
    before = cluster.totals()["tokenlake_stored_segments_total"]
    assert run(engine, expected) == (0, WHOLE)
    assert engine.call("flush")
    assert cluster.totals()["tokenlake_stored_segments_total"] == before, "the pool had these segments already"
