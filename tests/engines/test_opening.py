"""The connection of an engine with an opaque layout is opened in the background."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from tests.robustness.live import wait_until
from tokenlake.errors import LayoutRefused
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

    def decline(reason: str) -> Any:
        raise AssertionError(reason)

    manager: Any = SimpleNamespace(open=lambda *arguments: opened.append(arguments), stop=opened.append)
    opening = Opening(manager, connect, lambda operation, error: opened.append(error), decline)
    opening.identify(lambda: ENGINE)
    opening.reported({0: RankFacts(0, 400, "a")}, 1)
    assert connecting.wait(20)
    opening.close()
    closed.set()
    assert ended.wait(20), "the pool is closed"
    assert opened == []
    assert opening.pool is None


def test_a_cache_that_cannot_be_named_is_told_again() -> None:
    """The daemon is told why the pool is not used: at once, and when requests arrive."""
    stopped: list[str] = []
    told, asked = threading.Event(), threading.Event()

    def decline(reason: str) -> Any:
        stopped.append(reason)
        told.set()
        return SimpleNamespace(get=asked.set, close=lambda: None)

    manager: Any = SimpleNamespace(open=lambda *arguments: None, stop=stopped.append)

    def identify() -> EngineIdentity:
        raise LayoutRefused("weights without a name")

    def connect(layout: object) -> Any:
        raise AssertionError(layout)

    opening = Opening(manager, connect, lambda operation, error: None, decline)
    opening.requested()
    opening.identify(identify)
    opening.reported({0: RankFacts(0, 400, "a")}, 1)
    assert told.wait(20)

    def again() -> bool:
        opening.requested()
        return asked.is_set()

    wait_until(again, "the next request is an occasion to tell it again")
    opening.close()
    assert stopped == ["weights without a name"] * 2
