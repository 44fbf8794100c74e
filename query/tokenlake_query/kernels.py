"""Temporary: numpy reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention import AttentionShape, Partial, SlotMap, Stored, as_float32, attend
from tokenlake.layout import Layout


class Kernel(Protocol):
    def attend(self, queries: Stored, slots: Sequence[NDArray[np.uint8]], layer: int) -> Partial: ...


class Reference:
    def __init__(self, layout: Layout, shape: AttentionShape) -> None:
        self.map = SlotMap.of(layout)
        self.shape = shape

    def attend(self, queries: Stored, slots: Sequence[NDArray[np.uint8]], layer: int) -> Partial:
        q = as_float32(queries, self.map.dtype).swapaxes(0, 1)
        views = [self.map.views(slot, layer) for slot in slots]
        k = np.concatenate([as_float32(k, self.map.dtype).reshape(-1, *k.shape[2:]) for k, _ in views], 1)
        v = np.concatenate([as_float32(v, self.map.dtype).reshape(-1, *v.shape[2:]) for _, v in views], 1)
        out, lse = attend(q, k, v, self.shape.scale)
        return Partial(out.swapaxes(0, 1), lse.swapaxes(0, 1))


def kernel_for(layout: Layout, shape: AttentionShape) -> Kernel:
    return Reference(layout, shape)
