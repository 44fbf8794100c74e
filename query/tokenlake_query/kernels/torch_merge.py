"""Merging partial results on whatever device torch has them, as `tokenlake.attention.merge` does in numpy."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RunningMerge", "Tensor", "merge_first"]

Tensor = Any
"""torch's own types are not seen by the type checker."""


def merge_first(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts along the first dimension, none of them empty: `out` `[part, ..., row, dim]` of any float type, `lse`
    float32 `[part, ..., row]`. Float32; of one part the part itself, where that is float32."""
    if len(out) == 1:
        return out[0].float(), lse[0]
    greatest = lse.amax(0)
    weights = (lse - greatest).exp_()
    total = weights.sum(0)
    weights /= total
    return (out * weights.unsqueeze(-1)).sum(0), greatest + total.log_()


class RunningMerge:
    """Parts merged as they come, none of them empty: `out` float32 `[..., row, dim]` and `lse` `[..., row]`. The first
    becomes this object's own and is changed."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out = out
        self.lse = lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        """One more part, left as it is."""
        greatest = torch.maximum(self.lse, lse)
        mine, other = (self.lse - greatest).exp_(), (lse - greatest).exp_()
        total = mine + other
        self.out.mul_((mine / total).unsqueeze(-1)).addcmul_(out, (other / total).unsqueeze(-1))
        self.lse = greatest + total.log()
