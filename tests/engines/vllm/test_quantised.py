"""Quantised weights and quantised caches: the same tokens as without the pool, and nothing shared with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import PATIENT, TINY, prompt
from tests.engines.vllm.scenario import check_scenario, three
from tokenlake.layout import Layout
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_quantised

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(tmp_path_factory.mktemp("quantised"), TINY)


def test_quantised_weights(start: Callable[..., Engine], cluster: Cluster, quantised: Path) -> None:
    check_scenario(three(start, cluster, quantised), cluster, 10)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_a_cache_in_fp8(start: Callable[..., Engine], cluster: Cluster, name: str, dtype: str) -> None:
    engines = three(start, cluster, kv_cache_dtype=name)
    check_scenario(engines, cluster, 20)
    layout = Layout.decode(bytes.fromhex(engines.first.call("layout")))
    assert (layout.dtype, layout.quantisation) == (dtype, "static scales, computed in float32")
    # 3 layers x 2 heads x 256 tokens x (32 + 32) elements of one byte.
    assert layout.segment_bytes == 3 * 2 * 256 * 64


def test_engines_of_other_kinds_share_nothing(
    start: Callable[..., Engine], cluster: Cluster, quantised: Path, plain: Engine
) -> None:
    tokens = prompt(800, 30)
    pool = {"socket": str(cluster.nodes[0].socket), **PATIENT}
    kinds: list[dict[str, Any]] = [
        {},
        {"model": quantised},
        {"kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    ]
    for number, kind in enumerate(kinds):
        engine = start(pool, **kind)
        answer = engine.generate([tokens])
        assert number or answer == plain.generate([tokens])
        assert engine.call("flush")
        counts = engine.call("counts")
        assert (counts["tokens_stored"], counts["tokens_hit"], counts["failures"]) == (768, 0, 0), kind
        engine.close()
