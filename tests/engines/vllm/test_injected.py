"""Real engines of vLLM whose client fails: a thousand seeded faults of calls, messages, copies and bytes in the process
of each engine change no token and end nothing, and leave no lease and no write at the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.faults import MESSAGES, begin, environment, nothing_left, quiet, recorded
from tests.engines.vllm.conftest import pool_of, prompt, until_hit
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import tracebacks
from tests.engines.vllm.test_opaque import SIZES
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_mistral

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

FAULTS = 1000
SEED = 23
SETTINGS: dict[str, Any] = {
    "verify": True,
    "segment_tokens": 128,
    "match_ms": 50,
    "call_ms": 100,
    "fetch_ms": 100,
    "write_patience_s": 0.05,
}
LENGTHS = (140, 270, 400, 600)
CALLS = ("EngineCalls.begin_match", "EngineCalls.attach", "PendingMatch.poll", "Pool.store_all", "Lease.fetch")


class FaultyEngine(ForkedEngine):
    """An engine whose client has the faults that its environment asks for."""

    @staticmethod
    def prepare() -> None:
        from tokenlake_client.engines.common import connection
        from tokenlake_client.engines.vllm.copies import HostCopy

        # Most requests use the pool, and are not in the pause behind the fault before.
        connection.RETRY_S = 0.02
        begin((HostCopy, ("from_slot", "to_slot")), calls=0.08, messages=0.3)


@pytest.fixture
def faulty(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[Path], Engine]]:
    engines: list[Engine] = []

    def begin(model: Path) -> Engine:
        pool = pool_of(cluster.nodes[0], **SETTINGS)
        engines.append(FaultyEngine(model, tmp_path / "log", pool, environment=environment(tmp_path, SEED)))
        return engines[0]

    yield begin
    for engine in engines:
        engine.close()


def check(engine: Engine, plain: Engine, cluster: Cluster, directory: Path, *, at_once: int) -> None:
    """Serve `at_once` prompts at a time until there were enough faults."""
    prompts = [prompt(length, seed) for seed in range(70, 78) for length in LENGTHS]
    expected = dict(enumerate(plain.generate(prompts)))
    chains = len(LENGTHS)
    step = 0
    while (faults := recorded(directory)).total() < FAULTS:
        # The prompts that are served at a time share no prefix: each spoils bytes that it verifies itself.
        order = [(step + 5 * at) % 8 * chains + (step // 8 + at) % chains for at in range(at_once)]
        answers = engine.generate([prompts[each] for each in order])
        assert answers == [expected[each] for each in order], engine.log.read_text()[-4000:]
        engine.call("forget")
        step += 1
    print(f"seed {SEED}: {faults.total()} faults of {len(faults)} kinds in {step * at_once} requests")
    for call in CALLS:
        assert any(name.startswith(f"call {call} ") for name in faults), call
    for message in MESSAGES:
        assert any(name.startswith(f"message {message} ") for name in faults), message
    assert faults["bytes spoiled"]
    assert any(name.startswith("copy ") for name in faults)
    counts = engine.call("counts")
    assert counts["tokens_hit"] > 10_000
    quiet(directory)
    until_hit(engine, prompts[3], expected[3], 128)
    engine.call("flush")
    nothing_left(cluster.nodes[0])
    assert "hook start_load_kv failed" not in engine.log.read_text()
    assert tracebacks(engine) == []


def test_a_known_layout(
    faulty: Callable[[Path], Engine], model: Path, plain: Engine, cluster: Cluster, tmp_path: Path
) -> None:
    check(faulty(model), plain, cluster, tmp_path, at_once=4)


def test_an_opaque_layout(
    faulty: Callable[[Path], Engine], start: Callable[..., Engine], cluster: Cluster, tmp_path: Path
) -> None:
    window = save_mistral(tmp_path / "window", SIZES)
    check(faulty(window), start(model=window), cluster, tmp_path, at_once=1)
