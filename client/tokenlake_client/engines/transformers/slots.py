"""Segments in a pool's slot, to and from the caches of an engine's layers.

A slot holds one segment in the order of `tokenlake.layout.Layout`::

    [head group][layer][K, V][head in group][token][head dim]

With key and value dimensions that differ, K and V of a layer are two blocks of unequal size.
A cache is, per layer, a pair (keys [heads, tokens, key dim], values [heads, tokens, value dim]) of tensors
on any device, of the layout's dtype, whose last dimension is contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.layout import Layout

__all__ = ["TORCH_DTYPES", "LayerPair", "read_segments", "write_segment"]

TORCH_DTYPES: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

LayerPair = tuple[Any, Any]
"""(keys, values) tensors of one layer and one row, each [heads, tokens, dim]."""


def read_segments(
    segments: Sequence[NDArray[np.uint8]], layout: Layout, cache: Sequence[LayerPair], start: int
) -> None:
    """Copy `segments` into tokens [start, start + len(segments) * segment_tokens) of `cache`.

    Segments may be read-only; no reference to one is kept.
    """
    size = layout.segment_tokens
    for index, segment in enumerate(segments):
        first = start + index * size
        for (keys, values), (slot_keys, slot_values) in zip(cache, _blocks(segment, layout), strict=True):
            _grouped(keys, first, layout).copy_(slot_keys)
            _grouped(values, first, layout).copy_(slot_values)


def write_segment(slot: NDArray[np.uint8], layout: Layout, cache: Sequence[LayerPair], start: int) -> None:
    """Fill `slot` with tokens [start, start + segment_tokens) of `cache`. No reference to it is kept."""
    for (keys, values), (slot_keys, slot_values) in zip(cache, _blocks(slot, layout), strict=True):
        slot_keys.copy_(_grouped(keys, start, layout))
        slot_values.copy_(_grouped(values, start, layout))


def _grouped(tensor: Any, start: int, layout: Layout) -> Any:
    """Tokens of one segment as a view [group, head in group, token, dim]."""
    part = tensor[:, start : start + layout.segment_tokens]
    return part.unflatten(0, (layout.shards, layout.heads_per_shard))


def _blocks(slot: NDArray[np.uint8], layout: Layout) -> list[LayerPair]:
    """Per layer, views (K, V) of the slot, each [group, head in group, token, dim]."""
    elements = _elements(slot, layout).view(layout.shards, layout.layers, -1)
    keys_size = layout.heads_per_shard * layout.segment_tokens * layout.key_dim
    shape = (layout.heads_per_shard, layout.segment_tokens)
    keys = elements[:, :, :keys_size].unflatten(2, (*shape, layout.key_dim))
    values = elements[:, :, keys_size:].unflatten(2, (*shape, layout.value_dim))
    return list(zip(keys.unbind(1), values.unbind(1), strict=True))


def _elements(slot: NDArray[np.uint8], layout: Layout) -> Any:
    """The slot's memory as a flat tensor that owns nothing: the caller keeps the array."""
    if slot.nbytes != layout.segment_bytes or not slot.flags.c_contiguous:
        raise ValueError(f"slot has {slot.nbytes} bytes; expected {layout.segment_bytes} contiguous")
    # torch has no read-only tensors and warns about arrays that are; an address carries no such flag.
    memory = (ctypes.c_uint8 * slot.nbytes).from_address(slot.ctypes.data)
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype])
