"""The real vLLM, where it is installed: `make test-vllm` runs these in an environment of their own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.engines.vllm.forked import ForkedEngine
from tokenlake_client import Deadlines
from tokenlake_testing.cluster import Cluster, Node, parse_metrics
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

TINY = TinyModel(vocabulary=512, hidden=128, intermediate=256, layers=3, heads=4, kv_heads=2, positions=8192)
"""Head dim 32, the smallest that vLLM's CPU kernels have."""
PATIENT = {"match_ms": 20000, "call_ms": 20000, "fetch_ms": 20000, "write_patience_s": 20, "weigh_loads": False}
"""Settings with deadlines that hold on a busy machine, and every hit is loaded."""
DEADLINES = Deadlines(connect_s=20.0, dial_s=20.0, call_s=20.0, match_s=20.0, fetch_s=20.0, store_s=20.0, grace_s=20.0)
"""The same for a pool of the tests themselves."""
TIMEOUT_S = 60.0
PATIENT_NODES = {"match_deadline_ms": "20000", "suspect_ms": "20000"}
"""The same for daemons: a node that does not run for a while is not taken for a frozen one, whose segments are
misses."""


def prompt(length: int, seed: int) -> list[int]:
    """Seeded token ids; two seeds share no prefix."""
    state = seed * 7919 + 1
    tokens = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2147483648
        tokens.append((state >> 12) % TINY.vocabulary)
    return tokens


def pool_of(node: Node, **settings: Any) -> dict[str, Any]:
    """The settings of an engine that uses the pool at a node."""
    return {"socket": str(node.socket), **PATIENT, **settings}


def again(engine: Engine, tokens: Sequence[int], **request: Any) -> tuple[list[int], int]:
    """The answer of an engine whose own cache was emptied, and the number of prompt tokens that the pool supplied. What
    it computed is stored on return."""
    engine.call("flush")
    assert engine.call("forget")
    answer = engine.timed([tokens], **request)
    engine.call("flush")
    return answer.tokens[0], answer.cached


def until_hit(engine: Engine, tokens: Sequence[int], expected: list[int], least: int = 1, **request: Any) -> int:
    """Repeat a prompt, each time with the `expected` answer, until the pool supplies `least` tokens of it: beside busy
    programs its answer may be late. Returns the number of tokens. The engine's own cache is empty then."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        answer, cached = again(engine, tokens, **request)
        assert answer == expected
        if cached >= least:
            assert engine.call("forget")
            return cached
        assert time.monotonic() < until, engine.log.read_text()[-2000:]


def totals(page: str) -> dict[str, float]:
    """The values on vLLM's metrics page, without the labels that all its series have."""
    return {
        re.sub(r"\{,?\}", "", re.sub(r'(engine|model_name)="[^"]*",?', "", name)): value
        for name, value in parse_metrics(page).items()
    }


def metrics_of(engine: Engine) -> dict[str, float]:
    """The metrics of an engine that was started with `disable_log_stats=False`."""
    return totals(engine.call("metrics"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """As many nodes as the module's `NODES` says, or one."""
    nodes = getattr(request.module, "NODES", 1)
    with Cluster(nodes, "128MiB", "16MiB", **(PATIENT_NODES if nodes > 1 else {})) as running:
        yield running


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Starts engines, which end with the module. An argument `model` replaces the tiny model."""
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("logs")

    def begin(pool: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        # The ranks of one engine spin while they wait for each other; the daemon must get time beside them.
        nice = 10 if arguments.get("tensor_parallel_size", 1) > 1 else 0
        engine = ForkedEngine(arguments.pop("model", model), logs / f"{len(engines)}.log", pool, nice=nice, **arguments)
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM without a connector, the reference for all other engines."""
    engine = ForkedEngine(model, tmp_path_factory.mktemp("plain") / "log")
    yield engine
    engine.close()
