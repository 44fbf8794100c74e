"""What a kernel is: attention of queries over segments where they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tokenlake.attention import AttentionShape, Partial, SlotMap, Stored, empty_partial, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout

__all__ = ["Kernel", "Slot"]

Slot = Any
"""The bytes of one segment where the kernel's device has them: contiguous uint8, read-only or not; on a CPU an array of
numpy, on a GPU a tensor of torch."""


class Kernel(ABC):
    """Attention of one shape over segments of one layout. For one thread at a time.

    Queries and slots are borrowed for the call and not changed: the caller holds the leases on the segments until it
    returns. A kernel keeps no reference to them, and what it returns is new memory, the caller's.
    """

    def __init__(self, layout: Layout, shape: AttentionShape) -> None:
        """Raises LayoutRefused where the shape is not of the layout."""
        for field in ("kv_heads", "key_dim", "value_dim", "latent"):
            if getattr(shape, field) != getattr(layout, field):
                raise LayoutRefused(
                    f"attention's '{field}' is {getattr(shape, field)}; the layout has {getattr(layout, field)}"
                )
        self.shape = shape
        self.slots = SlotMap.of(layout)
        self._stored = stored_dtype(layout.dtype)

    def attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        """Attention of all queries over all tokens of all segments, without a mask; over no segments the empty part.

        `queries`: `[query, q heads, key dim]` in the layout's element type (bfloat16 as uint16), of any strides and any
        number, in memory of the host. `slots`: whole segments, each once, in any order. Returns float32 `out`
        `[query, q heads, value dim]` and `lse` `[query, q heads]`.
        Raises LayoutRefused for queries, slots or a layer that do not fit the layout.
        """
        heads, dim = self.shape.q_heads, self.shape.key_dim
        if queries.ndim != 3 or queries.shape[1:] != (heads, dim) or queries.dtype != self._stored:
            raise LayoutRefused(
                f"queries are {queries.dtype} of {queries.shape}; expected {self._stored} of (any, {heads}, {dim})"
            )
        self.slots.places(layer)
        for slot in slots:
            self._check(slot)
        if not len(queries) or not slots:
            return empty_partial(len(queries), heads, self.shape.value_dim)
        return self._attend(queries, slots, layer)

    def _check(self, slot: Slot) -> None:
        self.slots.check(slot)

    @abstractmethod
    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        """Checked, and neither is empty."""
