"""The identity of the cache that a model computes: the cache's layout, which includes the digest of the weights.

A model that was loaded from a directory, and whose configuration and weights still equal those in the directory, has
the digest of the directory, so that it shares segments with every engine that loads the same files. Any other model has
the digest of its tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.common.model_config import check_config, position_of
from tokenlake_client.engines.common.slots import TORCH_DTYPES
from tokenlake_client.engines.transformers.cache import CacheShape
from tokenlake_client.engines.transformers.request import has_adapters
from tokenlake_client.weights import digest_of_directory, digest_of_tensors, weight_files

NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that the weights digest leaves out, because they do not change the computation; the dtype has a field of its
own in the layout."""
PIECE = 1 << 18
"""The number of tensor elements that are compared at a time, chosen so that they stay in the processor's cache."""
PROBE_TOKENS = 2


def layout_of(
    model: Any,
    *,
    segment_tokens: int = 256,
    adapter: str | None = None,
    weights_digest: str | None = None,
    shape: CacheShape | None = None,
) -> Layout:
    """The layout of `model`'s cache. Raises `LayoutRefused` that names the field that the pool cannot serve.

    `adapter`: the id of the active LoRA adapters; required if there are any. `weights_digest`: a digest from
    `tokenlake_client.weights`; None: it is computed from the model. `shape`: the result of an earlier
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
    """Raise `LayoutRefused`, with field and reason, for a model that the pool cannot serve."""
    if not getattr(model, "can_generate", lambda: False)():
        raise LayoutRefused(f"model class {type(model).__name__} does not generate")
    if not type(model).__module__.startswith("transformers."):
        raise LayoutRefused(
            f"model class {type(model).__name__} comes from {type(model).__module__!r}, "
            "not from transformers: the meaning of its cache is not known"
        )
    check_config(model.config)
    position_of(model.config)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise LayoutRefused(f"model class {type(model).__name__} takes no position_ids")
    for owner, field in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if getattr(owner, field, None) is not None:
            raise LayoutRefused(f"model field '{field}' is set: quantised weights are not supported")
    if adapter is None and has_adapters(model):
        raise LayoutRefused("LoRA adapters are loaded and no adapter id was given")
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            raise LayoutRefused(f"layer {index} is cached as {type(layer).__name__}; supported: DynamicLayer")


def cache_shape(model: Any) -> CacheShape:
    """The shape of `model`'s cache, measured by a forward pass of two tokens, because configurations name heads and
    dimensions in many ways."""
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


def weights_digest_of(model: Any) -> str:
    """The hex digest of the weights. Raises `LayoutRefused` where some weights are not in memory."""
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise LayoutRefused("layout field 'weights_digest': some weights are not in memory")
    directory = Path(model.name_or_path) if model.name_or_path else None
    if directory is not None and directory.is_dir() and _loaded_from(model, state, directory):
        return digest_of_directory(directory)
    return digest_of_tensors(_settings(model.config), _contents(state))


def _settings(config: Any) -> dict[str, object]:
    return {name: value for name, value in config.to_dict().items() if name not in NOT_COMPUTED_WITH}


def _contents(state: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    for name, tensor in state.items():
        flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
        yield name, str(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())


def _loaded_from(model: Any, state: Mapping[str, Any], directory: Path) -> bool:
    """True if configuration and weights are equal to those in `directory`, bit for bit. Weights that the files hold
    under other names, or not at all, count as different: the caller then uses the digest of the tensors, which is
    always valid."""
    files = weight_files(directory)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return False
    if _settings(AutoConfig.from_pretrained(directory)) != _settings(model.config):
        return False
    compared: set[str] = set()
    for file in files:
        names = _equal_names(file, state)
        if names is None:
            return False
        compared |= names
    # A file holds tied weights once, under one of their names: a tensor that shares its memory with a compared one
    # counts as compared.
    places = {_place(state[name]) for name in compared}
    return all(name in compared or _place(tensor) in places for name, tensor in state.items())


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _equal_names(path: Path, state: Mapping[str, Any]) -> set[str] | None:
    """The names of the tensors in the weight file `path`; None if one of them differs from the tensor of that name in
    `state`."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        # The file is memory-mapped, so a tensor is read only while it is compared.
        if all(name in state and _equal(file.get_tensor(name), state[name]) for name in names):
            return names
    return None


def _equal(stored: Any, loaded: Any) -> bool:
    """True if the tensor `stored`, converted to the dtype of `loaded`, has the same bits. Compares `PIECE` elements at
    a time, so that the converted copies stay small."""
    if stored.shape != loaded.shape:
        return False
    one, other = stored.reshape(-1), loaded.detach().reshape(-1)
    for start in range(0, other.numel(), PIECE):
        piece = other[start : start + PIECE].cpu()
        if not np.array_equal(_bits(one[start : start + PIECE].to(piece.dtype)), _bits(piece)):
            return False
    return True


def _bits(tensor: Any) -> NDArray[np.uint8]:
    """The tensor's bytes. They are compared instead of the numbers, because equal numbers may have different bytes
    (-0.0 and 0.0), and a NaN does not equal itself."""
    content: NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return content
