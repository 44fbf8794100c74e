"""The connection of an engine with an opaque layout is opened in the background."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from tokenlake_client.engines.vllm.offloading.identity import EngineIdentity, RankFacts
from tokenlake_client.engines.vllm.offloading.opening import Opening

ENGINE = EngineIdentity("M", "digest", "vllm 0.32.0", 256, 1, replicated=False)


def test_a_close_while_the_pool_connects_ends_its_connection() -> None:
    connecting, closed, ended = threading.Event(), threading.Event(), threading.Event()
    opened: list[object] = []

    def connect(layout: object) -> Any:
        connecting.set()
        assert closed.wait(20)
        return SimpleNamespace(close=ended.set)

    manager: Any = SimpleNamespace(open=lambda *arguments: opened.append(arguments), stop=opened.append)
    opening = Opening(manager, connect, lambda operation, error: opened.append(error))
    opening.identify(lambda: ENGINE)
    opening.reported({0: RankFacts(0, 400, "a")}, 1)
    assert connecting.wait(20)
    opening.close()
    closed.set()
    assert ended.wait(20), "the pool is closed"
    assert opened == []
    assert opening.pool is None
