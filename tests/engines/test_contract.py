"""The contract of doors whose engine runs in this process: transformers, and the example for new doors."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.engines import gate as gates
from tests.engines.contract import DEADLINES, FOREIGN, TIMEOUT_S, Answer, Contract, Door, Who, nodes
from tests.engines.gate import Gate
from tests.engines.models import SEGMENT, family, prompt
from tokenlake.layout import Layout
from tokenlake.opaque_layout import AnyLayout
from tokenlake_client import Pool
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_client.lease import Lease
from tokenlake_client.weights import digest_of_version
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "door.py"
NEW = 8
VERSION = "changed"
USERS = (Who.FIRST, Who.SECOND, Who.FOREIGN)


class InProcess(Door):
    """An engine in this process has no requests that could be aborted: the caller is interrupted instead."""

    segment = SEGMENT
    unit = 4 * SEGMENT

    def __init__(self, cluster: Cluster, gate: Gate, layout: AnyLayout) -> None:
        self.cluster, self.gate, self.layout = cluster, gate, layout
        self.segment_bytes = layout.segment_bytes
        self.interrupts = False
        self._thread: threading.Thread | None = None

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed)

    def connect(self, who: Who, layout: AnyLayout) -> Pool:
        """The pool of one engine."""
        node = self.cluster.nodes[1 if who is Who.SECOND else 0]
        credential = FOREIGN if who is Who.FOREIGN else None
        return Pool.connect(node.socket, layout, credential, verify=who is Who.FIRST, deadlines=DEADLINES)

    def begin(self, tokens: Sequence[int]) -> None:
        def ask() -> None:
            with contextlib.suppress(KeyboardInterrupt):
                self.ask(Who.SECOND, tokens)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def abort(self) -> None:
        assert self._thread is not None
        self.interrupts = True
        self.gate.open()
        self._thread.join(TIMEOUT_S)
        self.interrupts = False

    def tracebacks(self) -> list[str]:
        return []

    @abstractmethod
    def close(self) -> None:
        """Leave the pool."""


class Transformers(InProcess):
    def __init__(self, cluster: Cluster, gate: Gate) -> None:
        self.models = {who: family("llama-gqa") for who in Who}
        self.pools: list[Pool] = []
        self.engines: dict[Who, TokenLakeEngine] = {}
        with TokenLakeEngine(self.models[Who.PLAIN], cluster.nodes[0].socket, self.options) as engine:
            assert engine.layout is not None
            super().__init__(cluster, gate, engine.layout)
        for who in USERS:
            self.pools.append(self.connect(who, self.layout))
            self.engines[who] = TokenLakeEngine(self.models[who], self.pools[-1], self.options)

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(segment_tokens=SEGMENT, deadlines=DEADLINES, mode="fetch")

    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        ids: Any = torch.tensor([tokens])
        arguments: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        engine = self.engines.get(who)
        if engine is None:
            return Answer(self.models[who].generate(ids, **arguments)[0].tolist(), 0)
        before = engine.counts.tokens_hit
        output = engine.generate(ids, **arguments)[0].tolist()
        return Answer(output, engine.counts.tokens_hit - before)

    def settle(self, who: Who) -> None:
        assert self.engines[who].flush(TIMEOUT_S)

    def change_weights(self, who: Who) -> None:
        with torch.no_grad():
            for parameter in self.models[who].parameters():
                parameter.mul_(0.9)
        if who in self.engines:
            assert isinstance(self.layout, Layout)
            digest = digest_of_version(self.layout.weights_digest, VERSION)
            self.pools.append(self.connect(who, structs.replace(self.layout, weights_digest=digest)))
            self.engines[who].new_weights(VERSION, self.pools[-1])

    def tracebacks(self) -> list[str]:
        return [
            f"{who}: {engine.counts}"
            for who, engine in self.engines.items()
            if who is Who.FOREIGN and engine.counts.failures
        ]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for pool in self.pools:
            pool.close()


class Toy:
    """A model whose cache of a token depends on all tokens before it, and whose answer on the whole cache."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self.embedding = draw.normal(size=(256, 2, 2, 2, 1, 4)).astype(np.float32)
        self.output = draw.normal(size=(64, 32)).astype(np.float32)

    def compute(self, cache: Any, tokens: Sequence[int]) -> Any:
        for token in tokens:
            last = cache[..., -1, :] if cache.shape[4] else np.float32(0)
            new = np.sin(self.embedding[token] + np.float32(3) * last)
            cache = np.concatenate([cache, new[..., None, :]], axis=4)
        return cache

    def next_token(self, cache: Any) -> int:
        return int(np.argmax(self.output @ cache.sum(axis=4).reshape(-1)))


class Example(InProcess):
    def __init__(self, cluster: Cluster, gate: Gate) -> None:
        spec = spec_from_file_location("door", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        self.example: Any = module_from_spec(spec)
        spec.loader.exec_module(self.example)
        super().__init__(cluster, gate, self.example.LAYOUT)
        self.models = {who: Toy() for who in Who}
        self.doors = {who: self.example.Door(self.connect(who, self.layout)) for who in USERS}

    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        model, door = self.models[who], self.doors.get(who)
        nothing = np.zeros((2, 2, 2, 1, 0, 4), np.float32)
        cache = model.compute(nothing, tokens) if door is None else door.prefill(tokens, model.compute)
        answer: list[int] = []
        while len(answer) < NEW:
            answer.append(model.next_token(cache))
            cache = model.compute(cache, answer[-1:])
        return Answer(answer, 0 if door is None else door.found)

    def settle(self, who: Who) -> None:
        """The example stores before it answers."""

    def loadable(self, length: int) -> int:
        return length - 1

    def change_weights(self, who: Who) -> None:
        self.models[who].embedding += np.float32(0.1)
        if who in self.doors:
            self.doors[who].weights = digest_of_version(self.example.LAYOUT.weights_digest, VERSION)

    def close(self) -> None:
        for door in self.doors.values():
            door.pool.close()


@pytest.fixture(scope="module", params=[Transformers, Example])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("contract")
    gate = Gate(directory / "gate")
    with nodes(directory) as cluster, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Pool, "match"), (Lease, "fetch")):
            patch.setattr(owner, name, getattr(owner, name))
        gates.install(str(gate.directory))
        made: InProcess = request.param(cluster, gate)
        fetch = Lease.fetch

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if made.interrupts:
                raise KeyboardInterrupt
            return fetch(*args, **kwargs)

        patch.setattr(Lease, "fetch", interrupted)
        yield made
        made.close()


class TestContract(Contract):
    pass
