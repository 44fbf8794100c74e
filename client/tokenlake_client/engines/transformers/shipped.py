"""The cache of prompts whose known prefix stays where it is: it holds only the tokens after it.

One row of the storage, of which all rows have the same number of columns::

    0               before         start                 length     capacity
    | not stored here | zeroed      | computed            | free     |
    | padding, prefix | of this row | after the prefix    |          |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.base import PrefixView
from tokenlake_client.engines.transformers.cache import RoomyCache, RoomyLayer
from tokenlake_client.engines.transformers.slots import LayerPair

__all__ = ["SharedPrefix", "ShippedCache", "ShippedLayer"]


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Whole segments that one or several rows begin with: attended where they lie while there is a `view`; after that
    was lost, `local` has their keys and values [1, heads, tokens, dim] per layer."""

    tokens: list[int]
    keys: Sequence[SegmentKey]
    view: PrefixView | None
    elsewhere: Sequence[str] = ()
    """The node of each of its segments that lies on another, when the view was opened."""
    local: list[LayerPair] | None = None
    loaded: int = 0
    """Of `local`, tokens that came from the pool; the others were computed."""


class ShippedLayer(RoomyLayer):
    """`keys` and `values` begin with token `before` of the padded rows, which `get_seq_length` counts."""

    def __init__(self, keys: Any, values: Any, length: int, before: int) -> None:
        """Takes over the storage, of which the first `length` columns are valid."""
        super().__init__(keys, values, length)
        self.before = before

    def get_seq_length(self) -> int:
        """With what is not stored here."""
        return int(self.before + self.keys.shape[-2])

    def shorten(self, length: int) -> None:
        """Forget what follows the first `length` tokens, as `get_seq_length` counts them."""
        keys, values = self._storage or (self.keys, self.values)
        self._show(keys, values, length - self.before)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        keys, values = (tensor.repeat_interleave(repeats, dim=0) for tensor in (self.keys, self.values))
        self._show(keys, values, keys.shape[-2])


class ShippedCache(RoomyCache):
    """Layers of one batch, and the prefixes of its rows."""

    def __init__(
        self, layers: Sequence[ShippedLayer], prefixes: Sequence[tuple[SharedPrefix, list[int]]], starts: list[int]
    ):
        """`prefixes`: each with its rows, ascending. `starts`: of each row, the first token that is stored."""
        super().__init__(layers)
        self.prefixes = list(prefixes)
        self.starts = starts
        self._before = layers[0].before
        self._mask: tuple[tuple[int, int], Any] = ((0, 0), None)

    def row(self, row: int, start: int = 0) -> list[LayerPair]:
        """As `RoomyCache.row`; `start` is not before the row's first stored token."""
        return super().row(row, start - self._before)

    def shorten(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        for layer in self.layers:
            layer.shorten(length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, behind each other."""
        super().batch_repeat_interleave(repeats)
        self.starts = [start for start in self.starts for _ in range(repeats)]
        self.prefixes = [
            (prefix, [row * repeats + copy for row in rows for copy in range(repeats)])
            for prefix, rows in self.prefixes
        ]

    def mask(self, queries: int, columns: int, device: Any) -> Any:
        """Which of the `columns` stored tokens each of the last `queries` sees: bool [rows, 1, queries, columns]. None
        where that is causal attention over all of them."""
        if all(start == self._before for start in self.starts):
            return None
        shape, mask = self._mask
        if shape != (queries, columns) or mask.device != device:
            column = torch.arange(columns, device=device)
            first = torch.tensor(self.starts, device=device)[:, None, None, None] - self._before
            last = torch.arange(columns - queries, columns, device=device)[:, None]
            mask = (column >= first) & (column <= last)
            self._mask = ((queries, columns), mask)
        return mask
