"""A prompt that several engines get at once is computed once, and the wait for its engine is bounded."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.engines.models import SEGMENT, family, padded, prompt
from tests.engines.test_shipping import NEW, engine_at
from tests.robustness.live import LIMIT_S, daemons, wait_until
from tokenlake.core.engines.waiting import IN_FLIGHT_WAITS
from tokenlake.wire import Code
from tokenlake_client import Lease, MatchOptions, Pool
from tokenlake_client.engines.common.in_flight import FACTOR, LONGEST_S
from tokenlake_client.engines.transformers import Counts, TokenLakeEngine
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.rest]

ENGINES = 3
TAIL = 2
"""Tokens behind the last full segment; with the answer they do not fill another segment."""
SEGMENTS = 6
TOKENS = SEGMENTS * SEGMENT + TAIL
SAMPLES = 64
IN_DIRECTORIES = 'tokenlake_map_entries{map="directory"}'
PATIENT_S = 0.9 * LONGEST_S
SHORT_S = 0.5

OTHER_ENGINE = """
import sys, time, torch
from tests.engines.test_stampede import PATIENT_S, expect_prefill
from tests.engines.models import SEGMENT, family
from tests.robustness.live import PATIENT
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
torch.set_num_threads(1)
model = family("llama-gqa")
options = EngineOptions(mode=sys.argv[2], segment_tokens=SEGMENT, deadlines=PATIENT)
engine = TokenLakeEngine(model, sys.argv[1], options)
expect_prefill(engine, PATIENT_S)
def computes(*_):
    print("computes", flush=True)
    time.sleep(3600)
model.register_forward_pre_hook(computes)
engine.generate(torch.tensor([list(map(int, sys.argv[3].split(",")))]), max_new_tokens=2)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # No node fails: on a busy machine one that answers no ping for a quarter of a second would end the waits for it.
    with daemons(ENGINES, "64MiB", suspect_ms="20000") as cluster:
        yield cluster


@pytest.fixture
def row(request: pytest.FixtureRequest) -> list[int]:
    """A prompt per test."""
    return prompt(TOKENS, sum(map(ord, request.node.name)))


@pytest.fixture
def in_vain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limit of each match that waited until the limit, without getting the segments."""
    found: list[float] = []
    match = Pool.match

    def watched(pool: Pool, keys: Any, options: MatchOptions, **deadline: float) -> Lease:
        lease = match(pool, keys, options, **deadline)
        if options.in_flight_wait_s and lease.hits < len(keys) and lease.codes[lease.hits] == Code.PENDING:
            found.append(options.in_flight_wait_s)
        return lease

    monkeypatch.setattr(Pool, "match", watched)
    return found


def expect_prefill(engine: TokenLakeEngine, patience_s: float) -> None:
    """Set the rates so that a match waits for `patience_s`, and transfers take no time."""
    each = patience_s / FACTOR / (SEGMENTS * SEGMENT)
    for sample in range(SAMPLES):
        tokens = 16 * (1 + sample % 7)
        engine.rates.prefill.add(tokens, 0, each * tokens, 0.0)
        engine.rates.copy.add(tokens << 10, 1e-9 * tokens, 0.0)


def before_prefill(engine: TokenLakeEngine, do: Callable[[], object]) -> None:
    """Call `do` before the first forward pass of the engine's model."""

    def computes(*_: object) -> None:
        hook.remove()
        do()

    hook = engine.model.register_forward_pre_hook(computes)


def greedy(engine: TokenLakeEngine, rows: Sequence[list[int]]) -> list[list[int]]:
    ids, mask = padded(list(rows))
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    output: list[list[int]] = engine.generate(ids, attention_mask=mask, **settings).tolist()
    return output


@contextmanager
def engines(cluster: Cluster, count: int, mode: str) -> Iterator[list[TokenLakeEngine]]:
    """One engine at each of the first nodes, each with its own model."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(engine_at(cluster, node, family("llama-gqa"), mode, prefill_chunk=1000))
            for node in range(count)
        ]


def at_once(
    serving: Sequence[TokenLakeEngine], row: list[int], meanwhile: Callable[[], object] = lambda: None
) -> Counts:
    """All engines serve the prompt and answer as the model alone does. Returns the sum of their counts."""
    expected = greedy(TokenLakeEngine(family("llama-gqa")), [row])
    with ThreadPoolExecutor(len(serving)) as threads:
        answers = [threads.submit(greedy, engine, [row]) for engine in serving]
        meanwhile()
        assert [answer.result(2 * LIMIT_S) for answer in answers] == [expected] * len(serving)
    assert all(engine.flush(LIMIT_S) for engine in serving)
    counts = [engine.counts for engine in serving]
    assert not any(each.failures or each.requests_without_pool for each in counts), counts
    return Counts(*(sum(getattr(each, name) for each in counts) for name in Counts.__slots__))


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_it_is_computed_once(cluster: Cluster, row: list[int], mode: str) -> None:
    before = cluster.totals()

    def others_wait() -> None:
        """The others wait, and the directory nodes know that each segment is being computed: on a busy machine one of
        them may be told so only after the first segment is stored."""

        def grown(name: str) -> float:
            return cluster.totals().get(name, 0.0) - before.get(name, 0.0)

        wait_until(lambda: grown(IN_FLIGHT_WAITS.name) == ENGINES - 1, "the others wait")
        wait_until(lambda: grown(IN_DIRECTORIES) >= SEGMENTS, "the segments are in flight")

    with engines(cluster, ENGINES, mode) as serving:
        for engine in serving:
            expect_prefill(engine, PATIENT_S)
            before_prefill(engine, others_wait)
        counts = at_once(serving, row)
    assert counts.tokens_hit == (ENGINES - 1) * SEGMENTS * SEGMENT
    assert counts.tokens_computed == SEGMENTS * SEGMENT + ENGINES * TAIL
    assert counts.tokens_stored == SEGMENTS * SEGMENT
    assert counts.tokens_not_stored == 0


@contextmanager
def computing(cluster: Cluster, row: list[int], mode: str) -> Iterator[subprocess.Popen[str]]:
    """An engine at the first node that never finishes computing the prompt."""
    command = [sys.executable, "-c", OTHER_ENGINE, str(cluster.nodes[0].socket), mode, ",".join(map(str, row))]
    with start_child(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "computes\n"
            yield other
        finally:
            other.kill()


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_who_hangs_is_waited_for_no_longer_than_computing_takes(
    cluster: Cluster, row: list[int], in_vain: list[float], mode: str
) -> None:
    with computing(cluster, row, mode) as other, engines(cluster, ENGINES, mode) as serving:
        for engine in serving[1:]:
            expect_prefill(engine, SHORT_S)
        other.send_signal(signal.SIGSTOP)
        counts = at_once(serving[1:], row)
    assert counts.tokens_computed + counts.tokens_hit == (ENGINES - 1) * TOKENS
    assert counts.tokens_stored >= SEGMENTS * SEGMENT
    assert in_vain


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_who_dies_is_waited_for_no_more(cluster: Cluster, row: list[int], in_vain: list[float], mode: str) -> None:
    waited = cluster.totals().get(IN_FLIGHT_WAITS.name, 0.0)
    with computing(cluster, row, mode) as other, engines(cluster, ENGINES, mode) as serving:
        for engine in serving[1:]:
            expect_prefill(engine, PATIENT_S)

        def kill() -> None:
            wait_until(lambda: cluster.totals().get(IN_FLIGHT_WAITS.name, 0.0) == waited + ENGINES - 1, "both wait")
            other.kill()

        counts = at_once(serving[1:], row, kill)
    assert counts.tokens_computed == SEGMENTS * SEGMENT + (ENGINES - 1) * TAIL
    assert counts.tokens_stored == SEGMENTS * SEGMENT
    assert not in_vain


def test_rows_of_one_batch_wait_for_what_is_computed_already(
    cluster: Cluster, row: list[int], in_vain: list[float]
) -> None:
    """The prompts of a batch share a prefix: the second is looked up while the first is being stored."""
    rows = [row + prompt(SEGMENT + number, number) for number in range(3)]
    expected = greedy(TokenLakeEngine(family("llama-gqa")), rows)
    with engines(cluster, 1, "auto") as (engine,):
        expect_prefill(engine, PATIENT_S)
        assert greedy(engine, rows) == expected
        assert engine.counts.tokens_hit == 2 * SEGMENTS * SEGMENT
        assert engine.counts.failures == 0
    assert not in_vain


def test_batches_in_another_order_do_not_wait(cluster: Cluster, row: list[int], in_vain: list[float]) -> None:
    """Batches with the same prompts in another order do not wait for each other."""
    rows = [row, row[::-1]]
    expected = greedy(TokenLakeEngine(family("llama-gqa")), rows)
    # Each engine has begun its first row before the other reaches its second row.
    both_compute = threading.Barrier(2, timeout=LIMIT_S)
    with engines(cluster, 2, "auto") as serving, ThreadPoolExecutor(2) as threads:
        for engine in serving:
            expect_prefill(engine, PATIENT_S)
            before_prefill(engine, both_compute.wait)
        answers = [threads.submit(greedy, serving[0], rows), threads.submit(greedy, serving[1], rows[::-1])]
        assert [answer.result(2 * LIMIT_S) for answer in answers] == [expected, expected[::-1]]
        assert [engine.counts.tokens_computed for engine in serving] == [TOKENS + TAIL] * 2
    assert not in_vain
