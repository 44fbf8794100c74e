"""The cache of prompts whose known prefix stays on its node: it stores only the tokens behind the prefix.

A row of the batch. The storage begins with column `before`, for all rows::

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
from tokenlake_client.engines.common.pool import PrefixView
from tokenlake_client.engines.transformers.cache import RoomyCache, RoomyLayer
from tokenlake_client.engines.transformers.segment_copy import LayerPair


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Whole segments at the beginning of one or several rows. While there is a `view`, queries attend to the segments
    on their nodes. After the view was lost, `local` holds their keys and values [1, heads, tokens, dim] per layer."""

    tokens: list[int]
    keys: Sequence[SegmentKey]
    view: PrefixView | None
    elsewhere: Sequence[str] = ()
    """For each segment of the prefix that lay on another node when the view was opened, the name of that node."""
    local: list[LayerPair] | None = None
    loaded: int = 0
    """The number of tokens of `local` whose cache came from the pool; that of the others was computed."""


class ShippedLayer(RoomyLayer):
    """A layer whose `keys` and `values` begin with column `before` of the padded batch. `get_seq_length` also counts
    the columns before it, which are not stored here."""

    def __init__(self, keys: Any, values: Any, length: int, before: int) -> None:
        """Takes ownership of the tensors `keys` and `values`, whose first `length` columns are valid."""
        super().__init__(keys, values, length)
        self.before = before

    def get_seq_length(self) -> int:
        """The number of the batch's columns so far, including the first `before`, which are not stored here."""
        return int(self.before + self.keys.shape[-2])

    def shorten(self, length: int) -> None:
        """Drop the columns behind the first `length`, as `get_seq_length` counts them."""
        keys, values = self._storage or (self.keys, self.values)
        self._show(keys, values, length - self.before)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        keys, values = (tensor.repeat_interleave(repeats, dim=0) for tensor in (self.keys, self.values))
        self._show(keys, values, keys.shape[-2])


class ShippedCache(RoomyCache):
    """The layers of one batch, and the prefixes of its rows."""

    def __init__(
        self, layers: Sequence[ShippedLayer], prefixes: Sequence[tuple[SharedPrefix, list[int]]], starts: list[int]
    ):
        """`prefixes`: each with the ascending indices of its rows. `starts`: for each row, the column of its first
        token behind its prefix."""
        super().__init__(layers)
        self.prefixes = list(prefixes)
        self.starts = starts
        self._before = layers[0].before
        self._mask: tuple[tuple[int, int], Any] = ((0, 0), None)

    def row(self, row: int, start: int = 0) -> list[LayerPair]:
        """For each layer, views [heads, columns, dim] of the keys and values of one prompt of the batch (a row), from
        column `start` of the padded batch on. `start` must not be before the first token of the row that is stored
        here."""
        return super().row(row, start - self._before)

    def shorten(self, length: int) -> None:
        """Drop the columns of all layers behind the first `length` columns of the padded batch."""
        for layer in self.layers:
            layer.shorten(length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the cache of each prompt of the batch `repeats` times; the copies of a prompt follow each other."""
        super().batch_repeat_interleave(repeats)
        self.starts = [start for start in self.starts for _ in range(repeats)]
        self.prefixes = [
            (prefix, [row * repeats + copy for row in rows for copy in range(repeats)])
            for prefix, rows in self.prefixes
        ]

    def mask(self, queries: int, columns: int, device: Any) -> Any:
        """The attention mask of the last `queries` tokens over the stored columns: bool [rows, 1, queries, columns],
        True where a token sees a column. None: causal attention over all columns."""
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
