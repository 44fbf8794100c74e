"""Copies segments between slots of the arena and the cache of a model.

The cache is given per layer as a pair (keys [heads, tokens, key dim], values [heads, tokens, value dim]) of tensors on
any device, of the layout's dtype, whose last dimension is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import LayerPair, slot_tensors

__all__ = ["LayerPair", "read_segments", "write_segment"]


def read_segments(
    segments: Sequence[NDArray[np.uint8]], layout: Layout, cache: Sequence[LayerPair], start: int
) -> None:
    """Copy `segments` into tokens [start, start + len(segments) * segment_tokens) of `cache`.

    Segments may be read-only. No reference to them is kept.
    """
    size = layout.segment_tokens
    for index, segment in enumerate(segments):
        first = start + index * size
        for (keys, values), (slot_keys, slot_values) in zip(cache, slot_tensors(segment, layout), strict=True):
            _grouped(keys, first, layout).copy_(slot_keys)
            _grouped(values, first, layout).copy_(slot_values)


def write_segment(slot: NDArray[np.uint8], layout: Layout, cache: Sequence[LayerPair], start: int) -> None:
    """Fill `slot` with tokens [start, start + segment_tokens) of `cache`. No reference to `slot` is kept."""
    for (keys, values), (slot_keys, slot_values) in zip(cache, slot_tensors(slot, layout), strict=True):
        slot_keys.copy_(_grouped(keys, start, layout))
        slot_values.copy_(_grouped(values, start, layout))


def _grouped(tensor: Any, start: int, layout: Layout) -> Any:
    """The tokens of one segment, from token `start` of `tensor` on, as a view [group, head in group, token, dim]."""
    part = tensor[:, start : start + layout.segment_tokens]
    return part.unflatten(0, (layout.shards, layout.heads_per_shard))
