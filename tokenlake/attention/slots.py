"""The places of a layer's keys and values in a segment's slot, and numpy views of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention.dtypes import Stored, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import DTYPE_BYTES, Layout


class Place(NamedTuple):
    """Where the keys or the values of a layer lie in a slot: an array `[head group][head in group][token][dim]`, whose
    offset, shape and strides are in elements. The index of a KV head is head group x heads in a group + head in group.
    The last stride is 1."""

    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @property
    def end(self) -> int:
        """Index in the slot after the last element of the array."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """Geometry of a slot, `[head group][layer][K, V][head in group][token][dim]`; with `latent`, `[K]` alone.

    Views have one dimension for head groups and one for the heads of a group, because the distance from the last head
    of a group to the first of the next group differs from the distance of heads in a group: an array with a single
    dimension for all KV heads would be a copy.
    """

    dtype: str
    layers: int
    groups: int
    heads: int
    """Number of KV heads in one head group (shard)."""
    tokens: int
    key_dim: int
    value_dim: int
    latent: bool = False
    """The value is the first `value_dim` columns of the key row; it has no storage of its own."""

    @classmethod
    def of(cls, layout: Layout) -> SlotMap:
        """The map of slots that hold segments of `layout`."""
        return cls(
            dtype=layout.dtype,
            layers=layout.layers,
            groups=layout.shards,
            heads=layout.heads_per_shard,
            tokens=layout.segment_tokens,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            latent=layout.latent,
        )

    @property
    def row(self) -> int:
        """Number of elements that one token has per layer and KV head."""
        return self.key_dim if self.latent else self.key_dim + self.value_dim

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return self.groups * self.layers * self.heads * self.tokens * self.row * DTYPE_BYTES[self.dtype]

    def places(self, layer: int) -> tuple[Place, Place]:
        """The places of the keys and values of `layer`. Raises LayoutRefused for a layer that a segment does not
        have."""
        if not 0 <= layer < self.layers:
            raise LayoutRefused(f"layer is {layer}; expected 0 to {self.layers - 1}")
        of_layer = self.heads * self.tokens * self.row
        of_group = self.layers * of_layer
        start = layer * of_layer
        keys = Place(
            start,
            (self.groups, self.heads, self.tokens, self.key_dim),
            (of_group, self.tokens * self.key_dim, self.key_dim, 1),
        )
        if self.latent:
            return keys, Place(start, (*keys.shape[:3], self.value_dim), keys.strides)
        values = Place(
            start + self.heads * self.tokens * self.key_dim,
            (self.groups, self.heads, self.tokens, self.value_dim),
            (of_group, self.tokens * self.value_dim, self.value_dim, 1),
        )
        return keys, values

    def check(self, slot: NDArray[np.uint8]) -> None:
        """Raise LayoutRefused unless `slot` is one-dimensional, contiguous, and at least `nbytes` long."""
        if slot.dtype != np.uint8 or slot.ndim != 1 or not slot.flags.c_contiguous or slot.nbytes < self.nbytes:
            raise LayoutRefused(
                f"a slot is an array of {slot.dtype} of shape {slot.shape}; expected {self.nbytes} contiguous uint8"
            )

    def views(self, slot: NDArray[np.uint8], layer: int) -> tuple[Stored, Stored]:
        """Keys `[groups, heads, tokens, key dim]` and values `[groups, heads, tokens, value dim]` of `layer`.

        `slot`: the segment's bytes, as `check` demands. Both arrays are views: they copy nothing, keep `slot` alive and
        are writable where it is. Their contents are valid as long as the lease on the segment. With `latent` the values
        are columns of the keys. Raises LayoutRefused as `places` and `check` do.
        """
        self.check(slot)
        dtype = stored_dtype(self.dtype)

        def view(place: Place) -> Stored:
            strides = tuple(stride * dtype.itemsize for stride in place.strides)
            return np.ndarray(place.shape, dtype, slot.data, place.offset * dtype.itemsize, strides)

        keys, values = self.places(layer)
        return view(keys), view(values)
