"""The contract of both doors of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import gate as gates
from tests.engines.contract import FOREIGN, TIMEOUT_S, Answer, Contract, Door, Who, nodes
from tests.engines.gate import Gate
from tests.engines.vllm.conftest import TINY, pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import tracebacks
from tokenlake.opaque_layout import decode_layout
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "connector": {},
    "offloading": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
}
"""By door, arguments of vLLM with which it serves the model."""


class Gated(ForkedEngine):
    @staticmethod
    def prepare() -> None:
        gates.install()


class Vllm(Door):
    segment = unit = SEGMENT

    def __init__(self, name: str, directory: Path, cluster: Cluster, gate: Gate) -> None:
        self.name, self.cluster, self.gate = name, cluster, gate
        model = save_tiny_model(directory / "model", TINY)
        self._trained = save_tiny_model(directory / "trained", replace(TINY, seed=1))

        def start(who: Who, node: int = 0, kind: type[ForkedEngine] = ForkedEngine, **settings: Any) -> Engine:
            pool = None if who is Who.PLAIN else pool_of(cluster.nodes[node], write_patience_s=1, **settings)
            log = directory / f"{who.name.lower()}.log"
            return kind(model, log, pool, environment=dict(gate.environment), **ARGUMENTS[name])

        self.engines = {
            Who.PLAIN: start(Who.PLAIN),
            Who.FIRST: start(Who.FIRST, verify=True),
            Who.SECOND: start(Who.SECOND, 1, Gated),
            Who.FOREIGN: start(Who.FOREIGN, credential=FOREIGN),
        }
        layouts = [self._layout_of(who) for who in Who if who is not Who.PLAIN]
        self.segment_bytes = decode_layout(layouts[0]).segment_bytes
        assert self.engines[Who.FIRST].call("door") == name

    def _layout_of(self, who: Who) -> bytes:
        """Waits until an engine knows its layout, some steps after the start."""
        until = time.monotonic() + TIMEOUT_S
        while not (layout := self.engines[who].call("layout")):
            assert time.monotonic() < until, who
            self.engines[who].generate([prompt(8, 99)], 1)
        return bytes.fromhex(layout)

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed)

    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        engine = self.engines[who]
        assert engine.call("forget")
        answer = engine.timed([tokens])
        engine.call("idle")
        return Answer(answer.tokens[0], answer.cached)

    def settle(self, who: Who) -> None:
        assert self.engines[who].call("flush")

    def begin(self, tokens: Sequence[int]) -> None:
        assert self.engines[Who.SECOND].call("forget")
        self.engines[Who.SECOND].call("begin", prompt=tokens)

    def abort(self) -> None:
        self.engines[Who.SECOND].call("abort")

    def change_weights(self, who: Who) -> None:
        assert self.engines[who].call("reset", how="reset")
        self.engines[who].call("reload", directory=str(self._trained), version=None)

    def tracebacks(self) -> list[str]:
        return [line for engine in self.engines.values() for line in tracebacks(engine)]


@pytest.fixture(scope="module", params=ARGUMENTS)
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("contract")
    with nodes(directory) as cluster:
        made = Vllm(request.param, directory, cluster, Gate(directory / "gate"))
        yield made
        for engine in made.engines.values():
            engine.close()


class TestContract(Contract):
    pass
