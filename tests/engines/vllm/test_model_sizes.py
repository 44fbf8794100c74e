"""The sizes in the table of known models are those of the pages that vLLM makes for them."""

from __future__ import annotations

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec

from tokenlake_client.engines.vllm.offloading.chunks import blocks_per_chunk
from tokenlake_server.start.models import MODELS, ModelCache

BLOCK = 16


def spec(model: ModelCache, layer: int) -> KVCacheSpec:
    """Layers with full attention are spread evenly among those with windows, as the last of each period."""
    sizes = {"block_size": BLOCK, "num_kv_heads": model.kv_heads, "head_size": model.head_dim, "dtype": torch.bfloat16}
    if model.latent:
        return MLAAttentionSpec(**sizes)
    period = 1 + model.windows // model.layers
    if layer % period == period - 1 and layer // period < model.layers:
        return FullAttentionSpec(**sizes)
    return SlidingWindowSpec(**sizes, sliding_window=model.window)


@pytest.mark.parametrize(
    "model", [model for model in MODELS if model.windows or model.latent], ids=lambda model: model.name
)
def test_the_largest_group_of_vllm_fills_a_segment(model: ModelCache) -> None:
    specs = {f"layer.{number}": spec(model, number) for number in range(model.layers + model.windows)}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    layout = model.layout()
    chunk = blocks_per_chunk([BLOCK] * len(groups), layout.segment_tokens)
    pages = [len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups]
    windows = [get_sliding_window_size_in_chunks(group.kv_cache_spec, layout.segment_tokens) for group in groups]
    assert len(groups) == model.groups
    assert sum(filter(None, windows)) == model.prompt_segments
    assert max(pages) * chunk == layout.segment_bytes
