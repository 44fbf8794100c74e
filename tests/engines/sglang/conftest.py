"""The real SGLang on the CPU, where it is installed: `make test-sglang` runs these in an environment of their own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (`make install-sglang`)", allow_module_level=True)

# Transformers, which makes the models of the tests, imports torchvision too.
import tests.engines.sglang.standins.sitecustomize  # noqa: F401
from tokenlake_testing.cluster import Cluster, Node, parse_metrics
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

TINY = TinyModel(vocabulary=512, hidden=128, intermediate=256, layers=3, heads=4, kv_heads=2, positions=8192)
PAGE = 64
PAGE_BYTES = PAGE * TINY.layers * TINY.kv_heads * (TINY.hidden // TINY.heads) * 2 * 4
"""Keys and values in float32."""
TIMEOUT_S = 120.0
STAND_INS = Path(__file__).parent / "standins"
PATIENT = {"match_ms": 20000, "call_ms": 20000, "fetch_ms": 20000, "write_patience_s": 20, "lease_s": 60}
"""Settings with deadlines that hold on a busy machine."""


def prompt(length: int, seed: int) -> list[int]:
    """Seeded token ids; two seeds share no prefix."""
    state = seed * 7919 + 1
    tokens = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2147483648
        tokens.append((state >> 12) % TINY.vocabulary)
    return tokens


def pages_of(tokens: Sequence[int]) -> int:
    """The pages of a prompt that SGLang can restore: it computes at least one token."""
    return (len(tokens) - 1) // PAGE


def pool_of(node: Node, **settings: Any) -> dict[str, Any]:
    """The JSON of the flag with which an engine uses the pool at a node."""
    return {
        "backend_name": "tokenlake",
        "module_path": "tokenlake_client.engines.sglang",
        "class_name": "TokenLakeStorage",
        "interface_v1": 1,
        # SGLang does not look shorter prompts up.
        "prefetch_threshold": PAGE,
        "socket": str(node.socket),
        **PATIENT,
        **settings,
    }


def counts_of(engine: Engine) -> dict[str, float]:
    """The backend's counts on the metrics page of an engine with `enable_metrics`, by the label `source` where a count
    has it."""
    found: dict[str, float] = {}
    for name, value in parse_metrics(engine.call("metrics")).items():
        if name.startswith("sglang:tokenlake_"):
            source = re.search(r'source="(\w+)"', name)
            short = name.removeprefix("sglang:tokenlake_").split("_total")[0]
            found[source[1] if source else short] = value
    return found


def until_stored(cluster: Cluster, pages: int) -> None:
    """Wait until the daemons have stored so many pages, because SGLang stores behind the answer."""
    until = time.monotonic() + TIMEOUT_S
    while cluster.totals()["tokenlake_stored_segments_total"] < pages:
        assert time.monotonic() < until, cluster.totals()
        time.sleep(0.05)


def forget(engine: Engine) -> None:
    """Empty SGLang's own cache; it refuses while a request ends."""
    until = time.monotonic() + TIMEOUT_S
    while not engine.call("forget"):
        assert time.monotonic() < until
        time.sleep(0.05)


def tracebacks(engine: Engine) -> list[str]:
    """Lines of the engine's log that begin a traceback."""
    return [line for line in engine.log.read_text().splitlines() if "Traceback" in line]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "256MiB", "16MiB") as running:
        yield running


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Starts engines, which end with the module. `start` does not wait: engines start beside each other."""
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("logs")
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }

    def begin(pool: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        log = logs / f"{len(engines)}.log"
        engine = Engine(
            arguments.pop("model", model),
            log,
            pool,
            kind="sglang",
            environment=environment | arguments.pop("environment", {}),
            nice=5,
            **arguments,
        )
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.close()
