"""The reference implementation as a kernel, for installations without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenlake.attention import Partial, Stored, as_float32, attend, merge
from tokenlake_query.kernels.base import Kernel, Slot


class NumpyKernel(Kernel):
    """The kernel that computes in numpy, one segment at a time in float64, and merges the results."""

    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        dtype, heads = self.slots.dtype, self.shape.kv_heads
        query = as_float32(queries, dtype).swapaxes(0, 1)
        parts = []
        for slot in slots:
            keys, values = (
                as_float32(view, dtype).reshape(heads, self.slots.tokens, -1) for view in self.slots.views(slot, layer)
            )
            parts.append(attend(query, keys, values, self.shape.scale))
        merged = merge(parts)
        return Partial(np.ascontiguousarray(merged.out.swapaxes(0, 1)), np.ascontiguousarray(merged.lse.swapaxes(0, 1)))
