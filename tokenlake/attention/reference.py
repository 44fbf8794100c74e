"""Reference attention in numpy: tests compare every kernel with it, and it serves where torch is not installed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention.partial import Partial, empty_partial


def attend(query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], scale: float) -> Partial:
    """Attention of all queries over all tokens, without a mask.

    `query`: `[q heads, query, key dim]`; `keys`: `[kv heads, token, key dim]`; `values`:
    `[kv heads, token, value dim]`; q heads a multiple of kv heads. Returns new arrays, `out`
    `[q heads, query, value dim]` and `lse` `[q heads, query]`. Without tokens the result is empty.

    Computed in float64 relative to the greatest logit, so that the result is finite wherever the logits fit float32.
    """
    q_heads, q_len, key_dim = query.shape
    kv_heads, tokens, _ = keys.shape
    if not tokens:
        return empty_partial(q_heads, q_len, values.shape[-1])
    # Query heads that share a KV head become further rows of that head.
    rows = query.reshape(kv_heads, -1, key_dim).astype(np.float64)
    logits = scale * (rows @ keys.astype(np.float64).swapaxes(1, 2))
    greatest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - greatest)
    total = weights.sum(-1, keepdims=True)
    out = (weights @ values.astype(np.float64)) / total
    lse = greatest + np.log(total)
    return Partial(out.reshape(q_heads, q_len, -1).astype(np.float32), lse.reshape(q_heads, q_len).astype(np.float32))
