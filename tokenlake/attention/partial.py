"""Attention over parts of a sequence, put together again by the log-sum-exp of each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Partial", "empty_partial", "merge"]


class Partial(NamedTuple):
    """Attention of some queries over some of the tokens that they see.

    `out`: float32 `[..., query, value dim]`, normalised over these tokens. `lse`: float32 `[..., query]`, the natural
    logarithm of the sum of exp(logit) over them. Over no tokens `lse` is -inf and `out` is 0.
    """

    out: NDArray[np.float32]
    lse: NDArray[np.float32]


def empty_partial(*shape: int) -> Partial:
    """Attention over no tokens, `out` of this shape."""
    return Partial(np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32))


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the tokens of all parts, which must be disjoint; in any order, any number from one on.

    `l = log sum exp(l_i)`, `o = sum o_i exp(l_i - l)` in float32 (for two parts the formula of design section 8).
    Reckoned from the greatest `l_i`: nothing overflows, and the weights sum to 1 even where `l` itself is so large
    that its rounding would show in them. A query that no part has tokens for gets 0 and -inf. New arrays; the parts
    are left as they are.
    """
    if not parts:
        raise ValueError("nothing to merge: at least one part says what the shape is")
    lses = np.stack([part.lse for part in parts])
    greatest = lses.max(0)
    none = np.isneginf(greatest)
    # A part may lie so far below the greatest that their difference leaves float32: its weight is 0 all the same.
    with np.errstate(over="ignore"):
        weights = np.exp(lses - np.where(none, np.float32(0), greatest))
    total = weights.sum(0)
    # 1 where all parts are empty: 0 / 1, and log 1 added to -inf.
    total[none] = 1
    weights /= total
    out = weights[0][..., None] * parts[0].out
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        out += weight[..., None] * part.out
    return Partial(out, greatest + np.log(total))
