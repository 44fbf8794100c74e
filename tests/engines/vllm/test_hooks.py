"""vLLM goes on, with equal tokens, when any call of the pool raises, and when a request carries any parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm.conftest import again, pool_of, prompt, until_hit
from tests.engines.vllm.spoiling import tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0
CALLS = (
    "Pool.prefix",
    "EngineCalls.begin_match",
    "Pool.hint",
    "EngineCalls.attach",
    "Pool.store_all",
    "Pool.connected",
    "EngineCalls.session",
    "PendingMatch.poll",
    "Lease.fetch",
    "Lease.release",
)
"""The calls of the pool that the hooks of an engine with one rank make at one node."""


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    return start(pool_of(cluster.nodes[0], verify=True))


@pytest.mark.parametrize("error", ["Unreachable", "RuntimeError"])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_a_call_of_the_pool_changes_no_token(engine: Engine, plain: Engine, call: str, error: str) -> None:
    """One of the pool, and one that the pool never raises."""
    known, new = prompt(600, 10 + CALLS.index(call)), prompt(600, 50 + CALLS.index(call))
    (expected,), (expected_new,) = plain.generate([known]), plain.generate([new])
    until_hit(engine, known, expected)
    engine.call("plant", call=call, error=error)
    try:
        for _ in range(2):
            assert engine.generate([known, new]) == [expected, expected_new]
            engine.call("forget")
    finally:
        engine.call("plant", call="", error="")
    engine.call("flush")
    lines = [line for line in engine.log.read_text().splitlines() if f"{call} is broken" in line]
    texts = [line.split("TokenLake: ")[-1] for line in lines]
    assert len(texts) == len(set(texts)), "each line once"
    assert tracebacks(engine) == []
    until_hit(engine, known, expected)


@pytest.mark.parametrize(
    "params", ["", [], 0, {"tokenlake": 7}, {"tokenlake": ["outlook"]}, {"tokenlake": {"priority": "high"}}]
)
def test_malformed_parameters_of_a_request(engine: Engine, plain: Engine, params: Any) -> None:
    """Malformed parameters of a request change nothing for others."""
    tokens = prompt(600, 90)
    (expected,) = plain.generate([tokens])
    until_hit(engine, tokens, expected)
    before = engine.call("counts")["failures"]
    assert again(engine, tokens, params=params)[0] == expected
    until_hit(engine, tokens, expected)
    assert engine.call("counts")["failures"] == before, "the pool is not paused"
    assert "is served without its hints" in engine.log.read_text()
