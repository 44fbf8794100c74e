"""The layout of a transformers model: from its configuration, its weights and one forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.model_config import check_config, position_of
from tokenlake_client.engines.transformers.cache import CacheShape
from tokenlake_client.engines.transformers.identity import weights_digest_of
from tokenlake_client.engines.transformers.request import has_adapters
from tokenlake_client.engines.transformers.slots import TORCH_DTYPES

__all__ = ["cache_shape", "check_model", "layout_of"]

PROBE_TOKENS = 2


def layout_of(
    model: Any,
    *,
    segment_tokens: int = 256,
    adapter: str | None = None,
    weights_digest: str | None = None,
    shape: CacheShape | None = None,
) -> Layout:
    """The layout of `model`'s cache. Raises `LayoutRefused` naming the field that the pool cannot serve.

    `adapter`: the id of the LoRA adapters that are active; required where some are. `weights_digest`:
    from `tokenlake_client.weights`, computed from the model where None. `shape`: of an earlier
    `cache_shape(model)`.
    """
    check_model(model, adapter)
    position = position_of(model.config)
    shape = cache_shape(model) if shape is None else shape
    layout = Layout(
        model_id=type(model).__name__,
        weights_digest=weights_digest_of(model) if weights_digest is None else weights_digest,
        dtype=_dtype_name(shape.dtype),
        layers=len(shape.devices),
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        position=position,
        segment_tokens=segment_tokens,
    )
    layout.check()
    return layout


def check_model(model: Any, adapter: str | None = None) -> None:
    """Raise `LayoutRefused`, naming field and reason, for a model that the pool cannot serve."""
    if not getattr(model, "can_generate", lambda: False)():
        raise LayoutRefused(f"model class {type(model).__name__} does not generate")
    if not type(model).__module__.startswith("transformers."):
        raise LayoutRefused(
            f"model class {type(model).__name__} comes from {type(model).__module__!r}, "
            "not from transformers: what its cache means is not known"
        )
    check_config(model.config)
    position_of(model.config)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise LayoutRefused(f"model class {type(model).__name__} takes no position_ids")
    if getattr(model, "hf_quantizer", None) is not None:
        raise LayoutRefused("model field 'hf_quantizer' is set: quantised weights are not supported")
    if adapter is None and has_adapters(model):
        raise LayoutRefused("LoRA adapters are loaded and no adapter id was given")
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            raise LayoutRefused(f"layer {index} is cached as {type(layer).__name__}; supported: DynamicLayer")


def cache_shape(model: Any) -> CacheShape:
    """What `model` caches, measured by a forward pass of two tokens.

    The configuration names heads and dimensions in many ways; the tensors say it in one.
    """
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    shapes = set()
    for index, layer in enumerate(cache.layers):
        if not layer.is_initialized or layer.keys.dim() != 4 or layer.values.dim() != 4:
            raise LayoutRefused(f"layer {index} caches no keys and values of [row, head, token, dim]")
        (_, heads, tokens_k, key_dim), (_, value_heads, tokens_v, value_dim) = (
            layer.keys.shape,
            layer.values.shape,
        )
        if (tokens_k, tokens_v, value_heads) != (PROBE_TOKENS, PROBE_TOKENS, heads):
            raise LayoutRefused(f"layer {index} does not cache one key and one value per head and token")
        shapes.add((heads, key_dim, value_dim, layer.keys.dtype, layer.values.dtype))
    if len(shapes) != 1:
        raise LayoutRefused(
            f"the layers' caches differ: (heads, key dim, value dim, dtypes) in {sorted(map(str, shapes))}"
        )
    heads, key_dim, value_dim, dtype, value_dtype = shapes.pop()
    if dtype != value_dtype:
        raise LayoutRefused(f"layout field 'dtype': keys are {dtype}, values are {value_dtype}")
    devices = tuple(layer.keys.device for layer in cache.layers)
    return CacheShape(heads, key_dim, value_dim, dtype, devices)


def _dtype_name(dtype: Any) -> str:
    for name, candidate in TORCH_DTYPES.items():
        if candidate == dtype:
            return name
    raise LayoutRefused(f"layout field 'dtype' is {dtype}; supported: {', '.join(TORCH_DTYPES)}")
