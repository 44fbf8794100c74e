"""Partial attention: results over disjoint parts of the tokens, and their merging by the log-sum-exp of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Partial(NamedTuple):
    """The result of attention of some queries over some tokens, which can be merged with results over other tokens.

    `out`: float32 `[..., query, value dim]`, normalised over these tokens. `lse`: float32 `[..., query]`, the natural
    logarithm of the sum of exp(logit) over the tokens. Over no tokens `lse` is -inf and `out` is 0.
    """

    out: NDArray[np.float32]
    lse: NDArray[np.float32]


def empty_partial(*shape: int) -> Partial:
    """Returns the result of attention over no tokens; `shape` is the shape of its `out`."""
    return Partial(np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32))


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the tokens of all parts: one or more parts in any order, over disjoint tokens.

    With `out` o_i and `lse` l_i of part i: `l = log sum exp(l_i)`, `o = sum o_i exp(l_i - l)`, in float32. The
    exponentials are taken relative to the greatest `l_i`: nothing overflows, and the weights sum to 1 even where
    `l` is so large that its rounding error would matter. A query for which all parts are empty gets 0 and -inf. Returns
    new arrays and does not change the parts. `tokenlake.attention.torch_merge` does the same for torch.
    """
    if not parts:
        raise ValueError("nothing to merge; expected at least one part, which gives the shape")
    lses = np.stack([part.lse for part in parts])
    greatest = lses.max(0)
    none = np.isneginf(greatest)
    # The difference between an `lse` and the greatest may overflow to -inf, which gives the right weight, 0.
    with np.errstate(over="ignore"):
        weights = np.exp(lses - np.where(none, np.float32(0), greatest))
    total = weights.sum(0)
    # Where all parts are empty, the total is 0. The divisor 1 makes the weights 0 there, and the result's `lse` -inf.
    total[none] = 1
    weights /= total
    out = weights[0][..., None] * parts[0].out
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        out += weight[..., None] * part.out
    return Partial(out, greatest + np.log(total))
