"""The contract of SGLang's door, and what this door keeps besides. The tests continue each other, because an engine
takes long to start."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import FOREIGN, LEASE_S, TIMEOUT_S, Answer, Contract, Door, Who, nodes
from tests.engines.gate import Gate
from tests.engines.sglang.conftest import (
    PAGE,
    PAGE_BYTES,
    TINY,
    counts_of,
    forget,
    pages_of,
    pool_of,
    prompt,
    tracebacks,
)
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NEW = 8
GATED = {"module_path": "tests.engines.sglang.gated", "lease_s": LEASE_S}


class SGLang(Door):
    segment, unit, segment_bytes = PAGE, 256, PAGE_BYTES

    def __init__(self, start: Callable[..., Engine], directory: Path, cluster: Cluster, gate: Gate) -> None:
        self.cluster, self.gate = cluster, gate
        self.trained = save_tiny_model(directory / "trained", replace(TINY, seed=1))

        def using(node: int, **settings: Any) -> Engine:
            pool = pool_of(cluster.nodes[node], write_patience_s=1, **settings)
            return start(pool, enable_metrics=True, environment=dict(gate.environment))

        self.engines = {
            Who.PLAIN: start(),
            Who.FIRST: using(0, verify=True),
            Who.SECOND: using(1, **GATED),
            Who.FOREIGN: using(0, credential=FOREIGN),
        }
        self._offered: Counter[Who] = Counter()
        """The tokens that an engine has offered to the pool."""
        for who in (Who.FIRST, Who.SECOND, Who.FOREIGN):
            self._until_connected(who)

    def _until_connected(self, who: Who) -> None:
        """The connection is made in the background, and logged by a lookup."""
        until = time.monotonic() + TIMEOUT_S
        for seed in itertools.count(100):
            self.ask(who, prompt(2 * PAGE, seed))
            log = self.engines[who].log.read_text()
            if "TokenLake: connected to the pool" in log:
                return
            assert time.monotonic() < until, log[-2000:]

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed)

    def ask(self, who: Who, tokens: Sequence[int], **request: Any) -> Answer:
        forget(self.engines[who])
        answer = self.engines[who].timed([tokens], NEW, **request)
        # The last token was not fed to the model.
        self._offered[who] += (len(tokens) + NEW - 1) // PAGE * PAGE - answer.cached
        return Answer(answer.tokens[0], answer.cached)

    def settle(self, who: Who) -> None:
        until = time.monotonic() + TIMEOUT_S
        while True:
            # The counts of a step are published by the next one.
            self.engines[who].generate([prompt(10, 99)], 1)
            counts = counts_of(self.engines[who])
            if counts["stored_tokens"] + counts["not_stored_tokens"] >= self._offered[who]:
                return
            assert time.monotonic() < until, (counts, self._offered)

    def counts(self, who: Who) -> dict[str, float]:
        """The counts of an engine that stores nothing any more."""
        self.settle(who)
        return counts_of(self.engines[who])

    def grown(self, who: Who, before: Mapping[Who, Mapping[str, float]]) -> dict[str, float]:
        """The growth of the counts since `before`."""
        return {name: value - before[who][name] for name, value in self.counts(who).items()}

    def begin(self, tokens: Sequence[int]) -> None:
        forget(self.engines[Who.SECOND])
        self.engines[Who.SECOND].call("begin", prompt=tokens)

    def abort(self) -> None:
        self.engines[Who.SECOND].call("abort")

    def change_weights(self, who: Who) -> None:
        assert self.engines[who].call("update", model=str(self.trained))

    def tracebacks(self) -> list[str]:
        return [line for engine in self.engines.values() for line in tracebacks(engine)]


@pytest.fixture(scope="module")
def door(start: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    directory = tmp_path_factory.mktemp("contract")
    with nodes(directory) as cluster:
        yield SGLang(start, directory, cluster, Gate(directory / "gate"))


def test_the_counts_on_the_metrics_page(door: SGLang) -> None:
    tokens = prompt(1000, 60)
    before = {who: door.counts(who) for who in (Who.FIRST, Who.SECOND)}
    assert door.ask(Who.FIRST, tokens).cached == 0
    assert door.grown(Who.FIRST, before)["stored_tokens"] == 15 * PAGE
    assert door.ask(Who.SECOND, tokens).cached == pages_of(tokens) * PAGE
    found = door.grown(Who.SECOND, before)
    assert found["other_nodes"] == found["loaded_tokens"] == 15 * PAGE
    assert found["failures"] == found["loads_failed"] == found["lookups_late"] == 0


def test_a_prompt_that_comes_back_with_its_answer(door: SGLang) -> None:
    tokens = prompt(1000, 60)
    longer = tokens + door.ask(Who.FIRST, tokens).tokens + prompt(200, 61)
    answer = door.ask(Who.SECOND, longer)
    assert answer.tokens == door.ask(Who.PLAIN, longer).tokens
    assert answer.cached >= 15 * PAGE


def test_requests_at_once(door: SGLang) -> None:
    many = [prompt(900 + 50 * seed, 62 + seed) for seed in range(4)]
    assert door.engines[Who.SECOND].generate(many) == [door.ask(Who.PLAIN, tokens).tokens for tokens in many]
    door._offered[Who.SECOND] += sum((len(tokens) + NEW - 1) // PAGE * PAGE for tokens in many)


def test_salts_do_not_share(door: SGLang) -> None:
    tokens = prompt(1000, 60)
    assert door.ask(Who.SECOND, tokens, salt="other") == (door.ask(Who.PLAIN, tokens).tokens, 0)


def test_the_log_of_a_restarted_daemon(door: SGLang) -> None:
    engine, node, tokens = door.engines[Who.SECOND], door.cluster.nodes[1], prompt(1000, 60)
    expected = door.ask(Who.PLAIN, tokens).tokens
    node.kill()
    assert door.ask(Who.SECOND, tokens) == (expected, 0)
    node.start()
    door.cluster.wait_ready()
    _until_hit(door, tokens, expected)
    log = engine.log.read_text()
    assert len(re.findall("TokenLake: connected to the pool: node", log)) == 1
    assert re.search("TokenLake: lost the daemon at", log)
    assert re.search("TokenLake: the daemon at .* is back", log)


class TestContract(Contract):
    pass


def test_without_emptying_the_caches_the_pool_is_not_used(door: SGLang) -> None:
    engine, tokens = door.engines[Who.SECOND], prompt(1000, 70)
    old = door.ask(Who.SECOND, tokens).tokens
    door.settle(Who.SECOND)
    _until_hit(door, tokens, old)
    forget(engine)
    assert engine.call("update", model=str(door.trained), flush=False)
    answer = engine.timed([tokens])
    assert answer.cached == 0
    assert answer.tokens[0] != old
    _until_hit(door, tokens, answer.tokens[0])


def _until_hit(door: SGLang, tokens: Sequence[int], expected: list[int]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while True:
        answer = door.ask(Who.SECOND, tokens)
        assert answer.tokens == expected
        if answer.cached:
            return
        assert time.monotonic() < until
