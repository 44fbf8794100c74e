"""The contract of LMCache's door: the real `lmcache server` and vLLM."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.engines.contract import FOREIGN, LEASE_S, TIMEOUT_S, Answer, Contract, Door, Who, nodes
from tests.engines.gate import Gate
from tests.engines.vllm.conftest import TINY, prompt
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.lmcache_server import LMCACHE, LMCacheServer
from tokenlake_testing.tiny_model import save_tiny_model

if not (LMCACHE / "lmcache").is_dir():
    pytest.skip("LMCache is not installed (`make install-lmcache`)", allow_module_level=True)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CHUNK = 256
NEW = 8
PATIENT = {"match_ms": 20000, "call_ms": 20000, "fetch_ms": 20000, "write_patience_s": 1}
HERE = "tokenlake_client.engines.lmcache"
GATED = "tests.engines.lmcache.gated"
WITHOUT = {"test_weights_that_change_in_place": "LMCache does not tell an adapter that weights change in place"}


class LMCache(Door):
    segment = unit = CHUNK
    segment_bytes = CHUNK * TINY.layers * TINY.kv_heads * (TINY.hidden // TINY.heads) * 2 * 4
    without = WITHOUT

    def __init__(self, directory: Path, cluster: Cluster, gate: Gate, stack: contextlib.ExitStack) -> None:
        self.cluster, self.gate = cluster, gate
        self._model = save_tiny_model(directory / "model", TINY)
        self._directory, self._stack = directory, stack
        self._offered: Counter[Who] = Counter()
        """The tokens that a server has offered to the pool."""
        self.servers: dict[Who, LMCacheServer] = {}
        plain = ForkedEngine(self._model, directory / "plain.log", enable_prefix_caching=False)
        stack.callback(plain.close)
        self.engines: dict[Who, Engine] = {Who.PLAIN: plain}
        self._start(Who.FIRST, 0, HERE, verify=True)
        self._start(Who.SECOND, 1, GATED, lease_s=LEASE_S)
        self._start(Who.FOREIGN, 0, HERE, credential=FOREIGN)

    def _start(self, who: Who, node: int, module: str, **settings: Any) -> None:
        socket = str(self.cluster.nodes[node].socket)
        plugin = {
            "type": "plugin",
            "module_path": module,
            "class_name": "TokenLakeL2",
            "adapter_params": {"socket": socket, "engine": "vllm float32", **PATIENT, **settings},
        }
        server = LMCacheServer(sys.executable, 256, CHUNK, l2=plugin, environment=self.gate.environment)
        self.servers[who] = self._stack.enter_context(server)
        log = self._directory / f"{who.name.lower()}.log"
        # vLLM's own cache keeps the blocks that LMCache is reading, for a time that no event ends.
        own: dict[str, Any] = {"environment": server.environment, "enable_prefix_caching": False}
        engine = Engine(self._model, log, transfer=server.transfer, **own)
        self._stack.callback(engine.close)
        self.engines[who] = engine
        # The first lookup connects to the pool, and is a miss.
        until = time.monotonic() + TIMEOUT_S
        for seed in range(100, 1000):
            engine.generate([prompt(300, seed)], NEW)
            self._offered[who] += CHUNK
            if self.counts(who)["connected"]:
                break
            assert time.monotonic() < until, server.log.read_text()[-4000:]
        server.hide_memory()

    def counts(self, who: Who) -> dict[str, Any]:
        """The adapter's part of the server's status."""

        def find(value: Any) -> Iterator[dict[str, Any]]:
            if isinstance(value, dict):
                if value.get("type") == "TokenLakeL2":
                    yield value
                for each in value.values():
                    yield from find(each)
            elif isinstance(value, list):
                for each in value:
                    yield from find(each)

        return next(find(self.servers[who].status()))

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed)

    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        self._forget(who)
        answer = self.engines[who].timed([tokens], NEW)
        # Of a prompt that is found whole, vLLM computes the last token.
        found = -(-answer.cached // CHUNK) * CHUNK
        self._offered[who] += (len(tokens) + NEW - 1) // CHUNK * CHUNK - found
        return Answer(answer.tokens[0], answer.cached)

    def _forget(self, who: Who) -> None:
        if who in self.servers:
            # Objects that are not stored yet would be lost.
            self.settle(who)
            self.servers[who].clear()

    def settle(self, who: Who) -> None:
        until = time.monotonic() + TIMEOUT_S
        while True:
            counts = self.counts(who)
            if counts["tokens_stored"] + counts["tokens_not_stored"] >= self._offered[who]:
                return
            assert time.monotonic() < until, (counts, self._offered)
            time.sleep(0.02)

    def begin(self, tokens: Sequence[int]) -> None:
        self._forget(Who.SECOND)
        self.engines[Who.SECOND].call("begin", prompt=tokens)

    def abort(self) -> None:
        self.engines[Who.SECOND].call("abort")

    def tracebacks(self) -> list[str]:
        servers = [line for each in self.servers.values() for line in each.log.read_text().splitlines()]
        engines = [line for engine in self.engines.values() for line in tracebacks(engine)]
        return [*engines, *(line for line in servers if "Traceback" in line)]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCache]:
    directory = tmp_path_factory.mktemp("contract")
    with nodes(directory) as cluster, contextlib.ExitStack() as stack:
        yield LMCache(directory, cluster, Gate(directory / "gate"), stack)


def test_the_counts_in_the_servers_status(door: LMCache) -> None:
    tokens = prompt(1000, 60)
    assert door.ask(Who.FIRST, tokens).cached == 0
    door.settle(Who.FIRST)
    before = door.counts(Who.SECOND)
    assert door.ask(Who.SECOND, tokens).cached == 3 * CHUNK
    after = door.counts(Who.SECOND)
    assert after["tokens_loaded"] - before["tokens_loaded"] == 3 * CHUNK
    assert after["tokens_hit_remote"] - before["tokens_hit_remote"] == 3 * CHUNK
    assert after["failures"] == after["loads_failed"] == after["pages_not_read"] == 0


class TestContract(Contract):
    pass
