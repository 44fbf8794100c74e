"""Every kind of cache that vLLM has is served or refused by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from tests.engines.vllm.conftest import pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine, refusals
from tests.engines.vllm.test_opaque import SIZES
from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.vllm.offloading.identity import KINDS, identity_of, rank_facts, unknown_cache
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.families import save_mistral

REFUSED = {
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "HiddenStateCacheSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
}
NO_CACHE = {"AttentionSpec", "KVCacheSpec", "UniformTypeKVCacheSpecs"}
"""Base classes, and the wrapper of the specifications of a group's layers."""
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def cached(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def kinds() -> dict[str, type]:
    """All kinds of this version of vLLM."""
    found = inspect.getmembers(kv_cache_interface, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, KVCacheSpec) and name not in NO_CACHE}


def test_each_kind_is_listed() -> None:
    """A kind that a version of vLLM adds is refused until someone has looked at it."""
    assert kinds().keys() == {*KINDS, *REFUSED}


@pytest.mark.parametrize("name", sorted(kinds()))
def test_a_kind_is_served_or_refused_by_its_name(name: str) -> None:
    spec: Any = object.__new__(kinds()[name])
    reason = unknown_cache(cached(spec))
    assert (name in reason) is (name in REFUSED)
    beside = unknown_cache(cached(LATENT, spec))
    assert beside == reason


INDEXER = replace(LATENT, head_size=132, cache_role=SparseCacheRole.INDEXER)


def test_the_index_of_sparse_attention_is_refused() -> None:
    """As the ranks see it, which know all layers of a group."""
    group = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"attention": LATENT, "indexer": INDEXER})
    assert "role INDEXER: sparse attention" in unknown_cache(cached(group))
    only = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"attention": LATENT})
    assert not unknown_cache(cached(only))


def test_states_of_several_tokens_are_refused() -> None:
    assert "several tokens in one state" in unknown_cache(cached(replace(LATENT, tokens_per_state=4)))


def test_the_reason_reaches_both_sides() -> None:
    """A rank reports it, and the scheduler's side raises it; that one knows sparse attention by the model."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256",
            calculate_kv_scales=False,
            kv_cache_layout="NHD",
            enable_prefix_caching=True,
        ),
        model_config=SimpleNamespace(use_mla=False, hf_text_config=SimpleNamespace()),
        parallel_config=None,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )
    sink: Any = object.__new__(kinds()["SinkFullAttentionSpec"])
    facts = rank_facts(config, cached(sink), 0, SimpleNamespace(shard_bytes=1))  # type: ignore[arg-type]
    assert "SinkFullAttentionSpec" in facts.refusal
    full = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
    for spec, text, expected in ((sink, {}, "SinkFullAttentionSpec"), (full, {"index_topk": 2048}, "sparse attention")):
        config.model_config.hf_text_config = SimpleNamespace(**text)
        with pytest.raises(LayoutRefused, match=expected):
            identity_of(config, cached(spec), read_settings({}, {}), chunk_blocks=1, replicated=False)


class WithoutWindows(ForkedEngine):
    """An engine whose client does not know the caches of layers with windows."""

    @staticmethod
    def prepare() -> None:
        from tokenlake_client.engines.vllm.offloading import identity

        identity.KINDS = ("FullAttentionSpec",)


@pytest.mark.live
@pytest.mark.timeout(300)
def test_an_engine_with_an_unknown_cache_goes_without_the_pool(tmp_path: Path, cluster: Cluster) -> None:
    model, tokens = save_mistral(tmp_path / "model", SIZES), prompt(1000, 1)
    answers = []
    for name, pool, kind in (("plain", None, ForkedEngine), ("log", pool_of(cluster.nodes[0]), WithoutWindows)):
        engine = kind(model, tmp_path / name, pool)
        try:
            for _ in range(2):
                answers.append(engine.generate([tokens])[0])
                engine.call("flush")
                engine.call("forget")
            if pool:
                assert engine.call("counts")["tokens_stored"] == 0
                assert "a cache of the kind SlidingWindowSpec is not supported" in refusals(engine)[0]
        finally:
            engine.close()
    assert answers == answers[:1] * 4
