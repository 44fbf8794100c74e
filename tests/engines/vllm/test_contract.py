"""The contract of both doors of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import gate as gates
from tests.engines.contract import FOREIGN, Answer, Contract, Door, Who, nodes
from tests.engines.gate import Gate
from tests.engines.vllm.conftest import TINY, pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import tracebacks
from tokenlake.opaque_layout import decode_layout
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_mistral
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SEGMENT = 256
BLOCK = 128
SAVES: Mapping[str, Callable[[str | Path, TinyModel | None], Path]] = {
    "connector": save_tiny_model,
    "offloading": save_mistral,
}
"""By door, a model that it serves: one with full attention, and one with windows."""


class Gated(ForkedEngine):
    @staticmethod
    def prepare() -> None:
        gates.install()


class Vllm(Door):
    segment = unit = SEGMENT

    def __init__(self, name: str, directory: Path, cluster: Cluster, gate: Gate) -> None:
        self.name, self.cluster, self.gate = name, cluster, gate
        model = SAVES[name](directory / "model", TINY)
        self._trained = SAVES[name](directory / "trained", replace(TINY, seed=1))

        def start(who: Who, node: int = 0, kind: type[ForkedEngine] = ForkedEngine, **settings: Any) -> Engine:
            pool = None if who is Who.PLAIN else pool_of(cluster.nodes[node], write_patience_s=1, **settings)
            log = directory / f"{who.name.lower()}.log"
            return kind(model, log, pool, environment=dict(gate.environment))

        self.engines = {
            Who.PLAIN: start(Who.PLAIN),
            Who.FIRST: start(Who.FIRST, verify=True),
            Who.SECOND: start(Who.SECOND, 1, Gated),
            Who.FOREIGN: start(Who.FOREIGN, credential=FOREIGN),
        }
        # The layout is known with the first step.
        self.engines[Who.FIRST].generate([prompt(8, 99)], 1)
        self.segment_bytes = decode_layout(bytes.fromhex(self.engines[Who.FIRST].call("layout"))).segment_bytes
        assert self.engines[Who.FIRST].call("door") == name

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed)

    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        engine = self.engines[who]
        assert engine.call("forget")
        answer = engine.timed([tokens])
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


@pytest.fixture(scope="module", params=SAVES)
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("contract")
    with nodes(directory) as cluster:
        made = Vllm(request.param, directory, cluster, Gate(directory / "gate"))
        yield made
        for engine in made.engines.values():
            engine.close()


class TestContract(Contract):
    pass
