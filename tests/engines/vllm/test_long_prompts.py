"""A prompt of 100,000 tokens, and one that ends with a segment: the same tokens as without the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import spoil_all, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.families import save_sliding_window
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1200)]

LONG = 100_000
SEGMENT = 256
TIMEOUT_S = 300.0
ARGUMENTS: dict[str, Any] = {
    "max_model_len": 102_400,
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_batched_tokens": 8192,
}


def sizes(layers: int) -> TinyModel:
    return TinyModel(
        vocabulary=512,
        hidden=64,
        intermediate=64,
        layers=layers,
        heads=2,
        kv_heads=1,
        positions=ARGUMENTS["max_model_len"],
    )


@pytest.mark.parametrize(
    ("save", "layers"),
    [(save_tiny_model, 1), pytest.param(save_sliding_window, 4, id="more chunks than one request of the daemon names")],
)
def test_a_prompt_of_100_000_tokens(save: Callable[..., Path], layers: int, tmp_path: Path) -> None:
    model = save(tmp_path / "model", sizes(layers))
    longest = prompt(LONG, 1)
    whole = longest[: LONG // SEGMENT * SEGMENT]
    with Cluster(1, "512MiB", "16MiB") as cluster:
        plain = ForkedEngine(model, tmp_path / "plain.log", None, enable_prefix_caching=False, **ARGUMENTS)
        expected = [plain.generate([tokens])[0] for tokens in (longest, whole)]
        plain.close()
        engine = ForkedEngine(model, tmp_path / "log", pool_of(cluster.nodes[0]), **ARGUMENTS)
        try:
            assert engine.generate([longest]) == expected[:1]
            for tokens, answer in zip((longest, whole), expected, strict=True):
                until, cached = time.monotonic() + TIMEOUT_S, 0
                while cached < len(tokens) - 2 * SEGMENT:
                    assert time.monotonic() < until, f"{cached} tokens: {engine.log.read_text()[-2000:]}"
                    engine.call("flush")
                    assert engine.call("forget")
                    timed = engine.timed([tokens])
                    cached = timed.cached
                    assert timed.tokens == [answer]
            counts = engine.call("counts")
            assert (counts["loads_failed"], counts["failures"]) == (0, 0)
            assert tracebacks(engine) == []
            if engine.call("door") == "offloading":
                spoil_all(cluster, engine)
                engine.call("forget")
                assert engine.generate([longest]) != expected[:1], "the control"
        finally:
            engine.close()
