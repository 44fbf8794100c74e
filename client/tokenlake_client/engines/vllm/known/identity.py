"""The layout of vLLM's cache, for models whose layout the pool knows.

For a model directory that vLLM serves without overrides, the layout equals that of the transformers integration, so
both share segments. Models that the pool cannot serve are refused with the name of the setting.

vLLM's names are imported in the functions that use them: an engine whose version of vLLM lacks one of them runs without
the pool.
"""

from __future__ import annotations

from typing import Any

from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake.layout import Layout, static_quantisation
from tokenlake_client.engines.common.model_config import check_config, position_of
from tokenlake_client.engines.vllm.checkpoint import check_machines, weights_digest_of
from tokenlake_client.engines.vllm.settings import EngineSettings

FP8_CACHES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's names of caches in fp8 with constant scales, and the layout's dtype for them."""


def layout_of(vllm_config: Any, kv_cache_config: Any, settings: EngineSettings) -> Layout:
    """The layout of vLLM's cache. `vllm_config`: vLLM's configuration of the engine. `kv_cache_config`: vLLM's
    description of its cache. Raises `LayoutRefused` for a model or a setting of vLLM that the pool cannot serve,
    `ConfigurationError` for a segment length that does not fit the block size."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    check_machines(parallel)
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise LayoutRefused(f"vLLM setting '{name}' is {getattr(parallel, name)}; supported: 1")
    if vllm_config.speculative_config is not None:
        raise LayoutRefused("vLLM setting 'speculative_config' is set: the cache of a draft model is not supported")
    if model.use_mla:
        raise LayoutRefused("latent attention is not supported")
    spec = _spec_of(kv_cache_config)
    # The decoder of a model for images, sound or video has a configuration of its own.
    config = model.hf_text_config if model.is_multimodal_model else model.hf_config
    check_config(config)
    for name in ("is_encoder_decoder", "is_mm_prefix_lm"):
        if getattr(model, name, False):
            raise LayoutRefused(f"vLLM's model has '{name}': a token's cache depends on more than the tokens before it")
    block = block_tokens_of(kv_cache_config)
    if settings.segment_tokens % block:
        # The user set this length, so the start fails; after a LayoutRefused the engine would run without the pool.
        raise ConfigurationError(
            "segment_tokens", settings.segment_tokens, f"a multiple of vLLM's block size, {block}, such as {8 * block}"
        )
    dtype, quantisation = _elements_of(vllm_config, spec)
    architectures = model.hf_config.architectures or [type(model.hf_config).__name__]
    layout = Layout(
        model_id=architectures[0],
        weights_digest=weights_digest_of(vllm_config, settings),
        dtype=dtype,
        layers=sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        kv_heads=model.get_total_num_kv_heads(),
        key_dim=spec.head_size,
        value_dim=getattr(spec, "head_size_v", spec.head_size),
        position=position_of(config),
        quantisation=quantisation,
        segment_tokens=settings.segment_tokens,
    )
    layout.check()
    if layout.key_dim != layout.value_dim:
        raise LayoutRefused(f"keys have {layout.key_dim} dimensions and values {layout.value_dim}; supported: equal")
    return layout


def block_tokens_of(kv_cache_config: Any) -> int:
    """The number of tokens of one block of vLLM's scheduler; an attention kernel may use smaller blocks."""
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


def _elements_of(vllm_config: Any, spec: Any) -> tuple[str, str]:
    """The layout's `dtype` and `quantisation` for the cache that `spec` describes."""
    cache, computed = vllm_config.cache_config, _dtype_name(vllm_config.model_config.dtype)
    name = cache.cache_dtype
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is not None and mode.name != "NONE":
        # A checkpoint may choose a cache in fp8 too. The setting is "auto" then.
        dtype = FP8_CACHES["fp8"] if name == "auto" else FP8_CACHES.get(name)
        if mode.name != "FP8_PER_TENSOR" or dtype is None:
            raise LayoutRefused(
                f"vLLM setting 'kv_cache_dtype' is {name!r}: its scales or its memory layout are not supported; "
                f"supported: auto, the model's own dtype, {', '.join(FP8_CACHES)}"
            )
        if getattr(cache, "calculate_kv_scales", False):
            raise LayoutRefused(
                "vLLM setting 'calculate_kv_scales' is True: the scales of the cache depend on one engine's prompts"
            )
        if _is_fnuz():
            raise LayoutRefused(f"vLLM setting 'kv_cache_dtype' is {name!r}: fp8 in the format fnuz is not supported")
        return dtype, static_quantisation(computed)
    if name not in ("auto", computed):
        raise LayoutRefused(f"vLLM setting 'kv_cache_dtype' is {name!r}, and the cache has the dtype {spec.dtype}")
    return computed, "none"


def _is_fnuz() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
