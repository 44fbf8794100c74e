"""The tokens that the daemons count for a transformers engine are those that the engine counts itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.models import family, prompt
from tests.engines.test_planner import measured
from tests.engines.test_shipping import READER, SEGMENT, check, engine_at, put
from tests.robustness.live import wait_until
from tokenlake.planner import Rates
from tokenlake_client.engines.transformers import TokenLakeEngine
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

Measure = Callable[[TokenLakeEngine, Cluster], Rates | None]
WAYS: dict[str, tuple[str, Measure]] = {
    "fetch": ("fetch", lambda engine, cluster: None),
    "auto, without measurements": ("auto", lambda engine, cluster: None),
    "auto, fetched": ("auto", lambda engine, cluster: measured(engine, cluster, 1e-3, 1e-12, 1.0)),
    "auto, computed": ("auto", lambda engine, cluster: measured(engine, cluster, 1e-9, 1e-3, 1.0)),
    "auto, shipped": ("auto", lambda engine, cluster: measured(engine, cluster, 1e-3, 1e-3, 1e-9)),
    "ship": ("ship", lambda engine, cluster: None),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return family("llama-gqa")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_both_count_the_same_tokens(cluster: Cluster, model: Any, way: str, count: int) -> None:
    mode, measure = WAYS[way]
    seed = 10 * sum(map(ord, way)) + 100 * count
    rows = [prompt(6 * SEGMENT + 5 + number, seed + number) for number in range(count)]
    # The last row is computed by this engine alone.
    put(cluster, model, [row[: 4 * SEGMENT + 2] for row in rows[: max(1, count - 1)]])
    before = cluster.tokens()
    with engine_at(cluster, READER, model, mode=mode) as engine:
        measure(engine, cluster)
        counts = check(engine, model, rows)
        assert engine.flush(30)
    expected = {
        "asked": counts.tokens_asked,
        "supplied": counts.tokens_hit + counts.tokens_shipped,
        "missed": counts.tokens_computed,
    }

    def counted() -> dict[str, int]:
        grown = {name: tokens - before.get(name, 0) for name, tokens in cluster.tokens().items()}
        asked = grown.pop("asked")
        supplied = sum(grown.pop(source, 0) for source in ("local", "fetched", "shipped"))
        return {"asked": asked, "supplied": supplied, "missed": sum(grown.values())}

    with contextlib.suppress(AssertionError):
        wait_until(lambda: counted() == expected, "the tokens are counted", 10.0)
    assert counted() == expected, cluster.tokens()
