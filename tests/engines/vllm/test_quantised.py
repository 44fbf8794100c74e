"""Quantised weights and quantised caches: the same tokens as without the pool, and nothing shared with others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engines.vllm.conftest import TINY, pool_of, prompt
from tests.engines.vllm.scenario import Three, check_scenario, three
from tokenlake.layout import Layout
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_quantised

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

FP8_CACHES = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's kernels for caches in fp8 need AVX-512 or AMX",
)


@pytest.fixture(scope="module")
def weights(start: Callable[..., Engine], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Three:
    dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    return three(start, cluster, save_quantised(tmp_path_factory.mktemp("quantised"), TINY), dtype=dtype)


@pytest.fixture(scope="module")
def cache(start: Callable[..., Engine], cluster: Cluster) -> Three:
    return three(start, cluster, kv_cache_dtype="fp8")


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels of 8-bit weights for AMX take no float32"
)
def test_quantised_weights(weights: Three, cluster: Cluster) -> None:
    check_scenario(weights, cluster, 10)


@FP8_CACHES
def test_a_cache_in_fp8(cache: Three, cluster: Cluster) -> None:
    check_scenario(cache, cluster, 20)
    layout = Layout.decode(bytes.fromhex(cache.first.call("layout")))
    assert (layout.dtype, layout.quantisation) == ("float8_e4m3fn", "static scales, computed in float32")
    # 3 layers x 2 heads x 256 tokens x (32 + 32) elements of one byte.
    assert layout.segment_bytes == 3 * 2 * 256 * 64


@FP8_CACHES
def test_engines_of_other_kinds_share_nothing(
    start: Callable[..., Engine], cluster: Cluster, weights: Three, cache: Three
) -> None:
    """Weights as in the file, quantised in the file, and quantised while they are loaded, and caches of three kinds."""
    pool = pool_of(cluster.nodes[0])
    online = {"dtype": "bfloat16", "quantization": "fp8_per_channel", "kv_cache_dtype": "fp8_e5m2"}
    tokens = prompt(800, 30)
    for engine in (weights.first, cache.first, start(pool), start(pool, **online)):
        before = engine.call("counts")
        engine.generate([tokens])
        assert engine.call("flush")
        after = engine.call("counts")
        names = ("tokens_stored", "tokens_hit", "requests_not_served")
        assert [after[name] - before[name] for name in names] == [768, 0, 0]
