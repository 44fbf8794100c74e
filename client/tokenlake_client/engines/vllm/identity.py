"""The layout of what vLLM caches, from its configuration. Everything the pool cannot serve is refused by name.

For one model directory, started plainly, it equals the layout of the transformers integration, so both share segments.
"""

from __future__ import annotations

from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.model_config import check_config, position_of
from tokenlake_client.engines.vllm.checkpoint import digest_of_checkpoint
from tokenlake_client.engines.vllm.settings import EngineSettings

__all__ = ["block_tokens_of", "layout_of"]


def layout_of(vllm_config: Any, kv_cache_config: Any, settings: EngineSettings) -> Layout:
    """`vllm_config`: vLLM's configuration of the engine; `kv_cache_config`: what it caches. Raises `LayoutRefused`."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise LayoutRefused(f"vLLM setting '{name}' is {getattr(parallel, name)}; supported: 1")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", _name(model.dtype)):
        raise LayoutRefused(f"vLLM setting 'kv_cache_dtype' is {cache_dtype!r}; supported: auto, the model's own dtype")
    if model.quantization is not None:
        raise LayoutRefused(
            f"vLLM setting 'quantization' is {model.quantization!r}: quantised weights are not supported"
        )
    if vllm_config.speculative_config is not None:
        raise LayoutRefused("vLLM setting 'speculative_config' is set: what a draft model caches is not supported")
    if model.use_mla:
        raise LayoutRefused("latent attention is not supported")
    spec = _spec_of(kv_cache_config)
    check_config(model.hf_config)
    block = block_tokens_of(kv_cache_config)
    if settings.segment_tokens % block:
        raise LayoutRefused(
            f"setting 'segment_tokens' is {settings.segment_tokens}; expected a multiple of vLLM's block size, {block}"
        )
    architectures = model.hf_config.architectures or [type(model.hf_config).__name__]
    layout = Layout(
        model_id=architectures[0],
        weights_digest=settings.weights_digest or digest_of_checkpoint(vllm_config),
        dtype=_name(model.dtype),
        layers=sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        kv_heads=model.get_total_num_kv_heads(),
        key_dim=spec.head_size,
        value_dim=getattr(spec, "head_size_v", spec.head_size),
        position=position_of(model.hf_config),
        segment_tokens=settings.segment_tokens,
    )
    layout.check()
    if layout.key_dim != layout.value_dim:
        raise LayoutRefused(f"keys have {layout.key_dim} dimensions and values {layout.value_dim}; supported: equal")
    return layout


def block_tokens_of(kv_cache_config: Any) -> int:
    """Tokens of one of the scheduler's blocks."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _spec_of(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise LayoutRefused(
            f"vLLM keeps {len(groups)} groups of layers with {', '.join(kinds) or 'no cache'}; "
            "supported: one of FullAttentionSpec"
        )
    spec = groups[0].kv_cache_spec
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            raise LayoutRefused(
                f"the cache's '{name}' is {getattr(spec, name)}: a layer does not keep the whole prefix"
            )
    return spec


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
