"""A dynamic cache with room to grow: tokens are written in place instead of concatenated.

Who owns which tokens of a row of the storage::

    0        padding      hit              prompt - 1        length        capacity
    | zeroed | from the pool | computed by prefill | decode appends | free |

A position is written once. The background writer may therefore read any position below the length it was
given while decode appends behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from tokenlake_client.engines.transformers.slots import LayerPair

__all__ = ["CacheShape", "RoomyCache", "RoomyLayer", "allocate", "row_cache"]

SPARE_TOKENS = 256
"""Least room that is added when a layer is full."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one forward pass of the model caches."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    devices: tuple[Any, ...]
    """One per layer."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views [rows, heads, :length, dim] of storage [rows, heads, capacity, dim]."""

    keys: Any
    values: Any
    _storage: tuple[Any, Any] | None
    _shown: Any
    """The `keys` that were set here last; another object there means that somebody else set it."""

    def __init__(self, keys: Any, values: Any, length: int) -> None:
        """Takes over the storage, of which the first `length` tokens are valid."""
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show(keys, values, length)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append [rows, heads, tokens, dim]; returns all keys and values, as views."""
        if self.keys is not self._shown:
            # Somebody cropped, reordered or replaced the tensors: the storage may hold tokens that others
            # still read, so it is left alone from now on.
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
        """Per layer, views [heads, tokens, dim] of one row's keys and values from token `start` on."""
        return [(layer.keys[row, :, start:], layer.values[row, :, start:]) for layer in self.layers]


def allocate(shape: CacheShape, rows: int, capacity: int) -> list[LayerPair]:
    """Storage per layer: keys and values [rows, heads, capacity, dim], not initialised."""
    return [
        (
            torch.empty((rows, shape.kv_heads, capacity, shape.key_dim), dtype=shape.dtype, device=device),
            torch.empty((rows, shape.kv_heads, capacity, shape.value_dim), dtype=shape.dtype, device=device),
        )
        for device in shape.devices
    ]


def row_cache(storage: Sequence[LayerPair], row: int, padding: int, stop: int) -> list[LayerPair]:
    """Views [1, heads, stop - padding, dim] of one row; the padding before them is zeroed, because
    attention multiplies it by a weight of zero, which memory that holds no number would survive."""
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
