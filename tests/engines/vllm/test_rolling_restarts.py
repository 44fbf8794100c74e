"""Three nodes with kept memory restart in turn beside engines of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.rolling import KEPT, MATCH_S, Load, Reply, Serving, Shape, Tokens, rolling_restarts
from tests.engines.vllm.conftest import prompt
from tests.engines.vllm.spoiling import tracebacks
from tests.robustness.live import accounted, wait_until
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NODES = 3
SHAPE = Shape(256, 512, 120, prompt)
MILLISECONDS = int(1000 * MATCH_S)
POOL: dict[str, Any] = {
    "match_ms": MILLISECONDS,
    "call_ms": MILLISECONDS,
    "fetch_ms": MILLISECONDS,
    "write_patience_s": 2,
    "weigh_loads": False,
    "verify": True,
}


def serving(engine: Engine) -> Serving:
    def ask(tokens: Tokens) -> Reply:
        assert engine.call("forget")
        answer = engine.timed([tokens])
        engine.call("flush")
        return Reply(answer.tokens[0], answer.cached, answer.seconds)

    return Serving(ask, engine.process.pid)


def test_hits_before_during_and_after(start: Callable[..., Engine], plain: Engine) -> None:
    with Cluster(NODES, "128MiB", "16MiB", **KEPT) as cluster:
        engines = [start({**POOL, "socket": str(node.socket)}) for node in cluster.nodes]
        load = Load([serving(each) for each in engines], lambda tokens: plain.generate([tokens])[0], SHAPE)
        rolling_restarts(cluster, load)
        for node in cluster.nodes:
            wait_until(lambda: accounted(node), "nothing is leased or withheld")  # noqa: B023
            assert "Traceback" not in node.log.read_text()
        for engine in engines:
            assert engine.call("counts")["requests_not_served"] == 0
            assert tracebacks(engine) == []
