"""KV events: vLLM's own, with the connector, for models of both doors; and those of the daemon for the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm.conftest import pool_of, prompt
from tests.engines.vllm.test_opaque import GUESSING
from tests.server.kv_events.readers import Llmd, Subscriber, events_of
from tests.server.kv_events.scene import MODEL, publishing, until
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.ports import reserve_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

BLOCK = 128
"""Tokens of a block of vLLM's CPU build."""
LENGTH, CACHED = 1000, 768


class Events:
    """A reader of vLLM's own events."""

    def __init__(self) -> None:
        self.endpoints = [f"tcp://127.0.0.1:{reserve_port()}" for _ in range(2)]
        self.index = Llmd(BLOCK)
        self.seen: list[dict[str, Any]] = []

    def settings(self) -> dict[str, Any]:
        """vLLM's `kv_events_config`."""
        events, replay = (each.replace("127.0.0.1", "*") for each in self.endpoints)
        topic = f"kv@engine@{MODEL}"
        return {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay, "topic": topic}

    def take(self, topic: bytes, payload: bytes) -> None:
        self.seen += events_of(payload)
        self.index.take(topic, payload)


def check_events(engine: Engine, own: Events, plain: list[list[int]], tokens: list[int]) -> None:
    """vLLM says that it has the blocks that it computed, that it has none after a reset, and that it has those that it
    loaded from the pool."""
    blocks = LENGTH // BLOCK * BLOCK
    with Subscriber(own.endpoints[0], own.endpoints[1], own.take):

        def known() -> int:
            return own.index.tokens(tokens, MODEL, "engine")

        assert engine.generate([tokens]) == plain
        until(blocks, known)
        assert engine.call("flush")
        own.seen.clear()
        assert engine.call("forget")
        before = engine.call("counts")["tokens_hit"]
        assert engine.generate([tokens]) == plain
        assert engine.call("counts")["tokens_hit"] - before == CACHED
        until(True, lambda: {"type": "AllBlocksCleared"} in own.seen)
        until(blocks, known)
    # The daemon alone knows when a segment leaves the pool: vLLM's events are about its own cache.
    assert {each["medium"] for each in own.seen if each["type"] == "BlockStored"} == {"GPU"}


def test_a_model_whose_layout_is_known(start: Callable[..., Engine], plain: Engine) -> None:
    own, node = Events(), Llmd(BLOCK)
    tokens = prompt(LENGTH, 71)
    with publishing(1, "128MiB", block_tokens=BLOCK) as (cluster, (stream,)), Subscriber(*stream.endpoints, node.take):
        pool = pool_of(cluster.nodes[0])
        engine = start(pool, served_model_name=MODEL, kv_events=own.settings())
        check_events(engine, own, plain.generate([tokens]), tokens)
        until(CACHED, lambda: node.tokens(tokens, MODEL, stream.pod))
        engine.close()


def test_an_engine_whose_cache_only_vllm_understands(start: Callable[..., Engine], plain: Engine) -> None:
    own, tokens = Events(), prompt(LENGTH, 72)
    with publishing(1, "128MiB", block_tokens=BLOCK) as (cluster, _):
        pool = pool_of(cluster.nodes[0])
        engine = start(pool, speculative_config=GUESSING, served_model_name=MODEL, kv_events=own.settings())
        check_events(engine, own, plain.generate([tokens]), tokens)
        engine.close()
