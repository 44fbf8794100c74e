"""Two instances get the same prompt at once: one computes it, and the other waits for it for a bounded time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.vllm.conftest import pool_of, prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
TOKENS = 3000
FULL = TOKENS // SEGMENT * SEGMENT
MARKERS = "tokenlake_in_flight_markers_total"
WAITS = "tokenlake_in_flight_waits_total"
LONG_S, SHORT_S = 0.01, 0.0007
"""The predicted time per token: for the longest wait, or for a wait of some three seconds."""
TIMEOUT_S = 60.0
ATTEMPTS = 5
"""The attempts: on a busy machine a daemon may answer late, which changes no token."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "64MiB", "16MiB", match_deadline_ms="2000") as running:
        yield running


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], cluster: Cluster) -> list[Engine]:
    """One engine on each node; each step computes a small part of a prompt."""
    both = [start(pool_of(node), max_num_batched_tokens=128) for node in cluster.nodes]
    for engine in both:
        engine.generate([prompt(600, 1)])
    return both


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def stored_and_hit(engines: Sequence[Engine]) -> tuple[int, int]:
    """The tokens that were stored, and the tokens that were taken from the pool, each summed over both engines."""
    for engine in engines:
        engine.call("flush")
    counts = [engine.call("counts") for engine in engines]
    return sum(int(count["tokens_stored"]) for count in counts), sum(int(count["tokens_hit"]) for count in counts)


def test_a_prompt_of_both_engines_is_computed_once(
    engines: list[Engine], plain: Engine, cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    """One request of one engine computes it; the others find it in vLLM's own cache, or in the pool."""
    seen = []
    for attempt in range(ATTEMPTS):
        tokens = prompt(TOKENS, 10 + attempt)
        expected = plain.generate([tokens])[0]
        for engine in engines:
            engine.call("expect_prefill", token_s=LONG_S)
        waits, (stored, hit) = cluster.totals()[WAITS], stored_and_hit(engines)
        begun = [threads.submit(engine.generate, [tokens, tokens]) for engine in engines]
        assert [future.result() for future in begun] == [[expected] * 2] * 2
        now = stored_and_hit(engines)
        # Both requests of the waiting engine load.
        seen.append((cluster.totals()[WAITS] > waits, now[0] - stored, now[1] - hit))
        if seen[-1] == (True, FULL, 2 * FULL):
            break
    assert (True, FULL, 2 * FULL) in seen, seen


@pytest.mark.parametrize("ended", [signal.SIGSTOP, signal.SIGKILL])
def test_the_wait_for_a_stopped_engine_ends(
    ended: signal.Signals, engines: list[Engine], plain: Engine, cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    seen = []
    first, second = engines
    for attempt in range(ATTEMPTS):
        tokens = prompt(TOKENS, 100 * ended + attempt)
        expected = plain.generate([tokens])
        for engine in engines:
            engine.call("expect_prefill", token_s=SHORT_S)
        before = cluster.totals()
        hit, computing = second.call("counts")["tokens_hit"], threads.submit(first.generate, [tokens])
        until = time.monotonic() + TIMEOUT_S
        while cluster.totals()[MARKERS] == before[MARKERS]:
            assert time.monotonic() < until
            time.sleep(0.01)
        waiting = threads.submit(second.generate, [tokens])
        # The marker of a killed engine ends at once, so that the other engine must wait before the kill.
        while cluster.totals()[WAITS] == before[WAITS] and not computing.done():
            assert time.monotonic() < until
            time.sleep(0.01)
        if ended == signal.SIGKILL and computing.done():
            assert waiting.result() == expected
            continue
        first.process.send_signal(ended)
        assert waiting.result() == expected
        seen.append((cluster.totals()[WAITS] > before[WAITS], second.call("counts")["tokens_hit"] - hit < FULL))
        if ended == signal.SIGKILL:
            assert computing.exception() is not None
            break
        first.process.send_signal(signal.SIGCONT)
        assert computing.result() == expected
        if seen[-1] == (True, True):
            break
    # An engine that is killed may have stored the whole prompt just before.
    assert (True, True) in seen or (ended == signal.SIGKILL and seen == [(True, False)]), seen
