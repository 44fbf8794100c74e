"""Two instances get the same prompt at once: one computes it, the other one waits for it, and never for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.vllm.conftest import PATIENT, prompt
from tokenlake_bench.cluster import Cluster
from tokenlake_bench.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
TOKENS = 3000
FULL = TOKENS // SEGMENT * SEGMENT
WAITS = "tokenlake_pending_waits_total"
ATTEMPTS = 5
"""On a busy machine a daemon may be late for once; the tokens are right all the same."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "64MiB", "16MiB", match_deadline_ms="2000") as running:
        yield running


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], cluster: Cluster) -> list[Engine]:
    """One on each node; each step computes a part of a prompt, and each waits as long as the pool does."""
    both = [start({"socket": str(node.socket), **PATIENT}, max_num_batched_tokens=512) for node in cluster.nodes]
    for engine in both:
        engine.call("expect prefill", token_s=0.01)
    return both


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def stored_and_hit(engines: Sequence[Engine]) -> tuple[float, float]:
    """Tokens, of both engines."""
    for engine in engines:
        engine.call("flush")
    counts = [engine.call("counts") for engine in engines]
    return sum(count["tokens_stored"] for count in counts), sum(count["tokens_hit"] for count in counts)


def test_a_prompt_that_both_get_at_once_is_computed_once(
    engines: list[Engine], plain: Engine, cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    seen = []
    for attempt in range(ATTEMPTS):
        tokens = prompt(TOKENS, 10 + attempt)
        expected = plain.generate([tokens])
        waits, (stored, hit) = cluster.totals()[WAITS], stored_and_hit(engines)
        begun = [threads.submit(engine.generate, [tokens]) for engine in engines]
        assert [future.result() for future in begun] == [expected] * 2
        now = stored_and_hit(engines)
        seen.append((cluster.totals()[WAITS] - waits, now[0] - stored, now[1] - hit))
        print(seen)
    assert (1, FULL, FULL) in seen
