"""The interface of kernels: attention of queries over segments in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tokenlake.attention import AttentionShape, Partial, SlotMap, Stored, empty_partial, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout

Slot = Any
"""The bytes of one segment on the kernel's device, contiguous uint8, possibly read-only: a numpy array on a CPU, a
torch tensor on a GPU."""


class Kernel(ABC):
    """Attention of one shape over segments of one layout. For one thread at a time.

    Queries and slots are borrowed for the call and not changed; the caller holds the leases on the segments until it
    returns. The kernel keeps no reference to them. Results are new memory that the caller owns.
    """

    def __init__(self, layout: Layout, shape: AttentionShape) -> None:
        """`layout`: of the segments that the kernel reads; `shape`: of the attention. Raises LayoutRefused where the
        shape does not fit the layout."""
        for field in ("kv_heads", "key_dim", "value_dim", "latent"):
            if getattr(shape, field) != getattr(layout, field):
                raise LayoutRefused(
                    f"attention's '{field}' is {getattr(shape, field)}; the layout has {getattr(layout, field)}"
                )
        self.shape = shape
        self.slots = SlotMap.of(layout)
        self._stored = stored_dtype(layout.dtype)

    def attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        """Attention of all queries over all tokens of all segments, without a mask. Over no segments `out` is 0 and
        `lse` is -inf.

        `queries`: `[query, q heads, key dim]` in the layout's element type (bfloat16 as uint16), any number, with any
        strides, in host memory. `slots`: whole segments, each once, in any order. Returns float32 `out`
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
        """The computation of `attend`, for queries, slots and a layer that are checked and not empty."""
