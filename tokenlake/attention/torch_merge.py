"""Merging partial results on the device that has them: `tokenlake.attention.merge` for tensors of torch.

This module calls methods of its arguments and does not import torch.
"""

from __future__ import annotations

from typing import Any

Tensor = Any
"""A torch tensor; Any, because this module does not import torch."""


def merge_stacked(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial results that are stacked along the first dimension; none of them is over no tokens.

    `out`: `[part, ..., row, dim]` of any float type; `lse`: float32 `[part, ..., row]`. Returns both in float32 without
    the first dimension: new tensors, except that a single float32 part is returned itself.
    """
    if len(out) == 1:
        return out[0].float(), lse[0]
    greatest = lse.amax(0)
    weights = (lse - greatest).exp_()
    total = weights.sum(0)
    weights /= total
    return (out * weights.unsqueeze(-1)).sum(0), greatest + total.log_()


class RunningMerge:
    """Merges parts one at a time; no part is empty. It takes over the tensors of the first part and changes them."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """`out`: float32 `[..., row, dim]`; `lse`: float32 `[..., row]`."""
        self.out = out
        self.lse = lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge one more part, which is not changed. Its weight is exp(lse) / (exp(self.lse) + exp(lse)), which is
        sigmoid(lse - self.lse)."""
        self.out.lerp_(out, (lse - self.lse).sigmoid_().unsqueeze(-1))
        self.lse = self.lse.logaddexp(lse)
