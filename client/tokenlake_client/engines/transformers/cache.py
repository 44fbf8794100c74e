"""A dynamic cache with spare capacity: tokens are written in place instead of concatenated.

The tokens of a row of the storage::

    0        padding      hit              prompt - 1        length        capacity
    | zeroed | from the pool | computed by prefill | decode appends | free |

Each position is written once. Therefore the background writer may read the positions that were written when its task
was submitted, while decode appends behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from tokenlake_client.engines.transformers.segment_copy import LayerPair

SHARED_LAYERS = 4
"""Layers in one allocation. It is freed when the last of them has been enlarged: with all layers in one, an answer that
outgrows its cache would need the memory of two caches."""
SPARE_TOKENS = 256
"""The least capacity, in tokens, that is added when a layer is full."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a model's KV cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    devices: tuple[Any, ...]
    """The device on which the cache of each layer lies."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose `keys` and `values` are views [rows, heads, :length, dim] of larger storage [rows, heads, capacity,
    dim]."""

    keys: Any
    values: Any
    _storage: tuple[Any, Any] | None
    _shown: Any
    """The tensor that this class set as `keys` last. If `keys` is another object, code outside this class replaced
    it."""

    def __init__(self, keys: Any, values: Any, length: int) -> None:
        """Takes ownership of the tensors `keys` and `values`, whose first `length` tokens are valid; the rest is spare
        capacity."""
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show(keys, values, length)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append the keys and values of new tokens, each [rows, heads, tokens, dim]. Returns views of all keys and
        values of the layer."""
        if self.keys is not self._shown:
            # Code outside this class cropped, reordered or replaced the tensors. The background writer may still read
            # the old storage, so it is not written any more.
            self._storage = None
        if self._storage is None:
            joined: tuple[Any, Any] = super().update(key_states, value_states, *args, **kwargs)
            return joined
        keys, values = self._storage
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if stop > keys.shape[-2]:
            room = stop + max(SPARE_TOKENS, stop // 4)
            keys, values = _enlarged(self.keys, room), _enlarged(self.values, room)
        keys[:, :, start:stop].copy_(key_states)
        values[:, :, start:stop].copy_(value_states)
        self._show(keys, values, stop)
        return self.keys, self.values

    def _show(self, keys: Any, values: Any, length: int) -> None:
        self._storage = (keys, values)
        self.keys = keys[:, :, :length]
        self.values = values[:, :, :length]
        self._shown = self.keys


class RoomyCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` over given layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        Cache.__init__(self, layers=list(layers))

    def row(self, row: int, start: int = 0) -> list[LayerPair]:
        """For each layer, views [heads, tokens, dim] of the keys and values of one prompt of the batch (a row), from
        token `start` on."""
        return [(layer.keys[row, :, start:], layer.values[row, :, start:]) for layer in self.layers]


def allocate(shape: CacheShape, rows: int, capacity: int) -> list[LayerPair]:
    """Uninitialised tensors for the cache of a batch: for each layer the keys and values, each [rows, heads, capacity,
    dim]. `SHARED_LAYERS` consecutive layers on one device share an allocation, so that one operation copies a segment
    into all of them."""
    pairs: list[LayerPair] = []
    for device, same in groupby(shape.devices):
        layers = len(list(same))
        for first in range(0, layers, SHARED_LAYERS):
            count = min(SHARED_LAYERS, layers - first)
            keys, values = (
                torch.empty((count, rows, shape.kv_heads, capacity, dim), dtype=shape.dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            # Views share a version counter, unlike `data`: autograd would take the update of one layer for one of all.
            pairs += [(keys[layer].data, values[layer].data) for layer in range(count)]
    return pairs


def row_cache(storage: Sequence[LayerPair], row: int, padding: int, stop: int) -> list[LayerPair]:
    """For each layer, views [1, heads, stop - padding, dim] of the keys and values of one prompt of the batch (a row),
    behind its padding. Zeroes the padding: attention multiplies masked values by zero, and a NaN in uninitialised
    memory would remain a NaN."""
    views = []
    for keys, values in storage:
        keys[row, :, :padding].zero_()
        values[row, :, :padding].zero_()
        views.append((keys[row : row + 1, :, padding:stop], values[row : row + 1, :, padding:stop]))
    return views


def _enlarged(tensor: Any, capacity: int) -> Any:
    rows, heads, length, dim = tensor.shape
    larger = tensor.new_empty((rows, heads, capacity, dim))
    larger[:, :, :length].copy_(tensor)
    return larger
