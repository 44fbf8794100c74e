"""A door to the pool, in numpy: `docs/integrate.md` explains it. Run by `tests/engines/test_contract.py`, which holds
it to the contract of the doors of real engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake import Code, Layout, Pool, TokenLakeError

Cache = NDArray[np.float32]
LAYOUT = Layout(
    model_id="toy",
    weights_digest="00",
    dtype="float32",
    layers=2,
    kv_heads=2,
    key_dim=4,
    value_dim=4,
    position="none",
    segment_tokens=16,
)
SIZE = LAYOUT.segment_tokens
SHAPE = (LAYOUT.shards, LAYOUT.layers, 2, LAYOUT.heads_per_shard, SIZE, LAYOUT.key_dim)
"""A slot as an array: [head group, layer, keys or values, head in group, token, dim]."""


class Door:
    """Serves prompts with the cache that the pool has, and stores what is computed."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.weights: str | None = None
        """The digest of weights that have changed in place; None: that of the layout."""
        self.found = 0
        """The number of tokens of the last prompt that the pool supplied."""

    def prefill(self, tokens: Sequence[int], compute: Callable[[Cache, Sequence[int]], Cache]) -> Cache:
        """The cache of all tokens. `compute(cache, tokens)`: the cache with that of further tokens appended."""
        keys, parts, full = [], [np.zeros((*SHAPE[:4], 0, SHAPE[5]), np.float32)], len(tokens) // SIZE
        try:
            prefix = self.pool.prefix(tokens, weights_digest=self.weights)
            tail = [prefix.tail_key(full, tokens[full * SIZE :])] if len(tokens) % SIZE else []
            keys = [*prefix.keys, *tail]
            with self.pool.match(keys) as lease:
                parts += [_array(slot).copy() for slot in lease.fetch(0, lease.hits)]
        except TokenLakeError as error:
            logging.warning("served without the pool: %s", error)
        hits = len(parts) - 1
        # The engine computes at least the last token, because it needs what follows it.
        self.found = min(hits * SIZE, len(tokens) - 1)
        cache = compute(np.concatenate(parts, axis=4)[..., : self.found, :], tokens[self.found :])

        def fill(index: int, slot: NDArray[Any]) -> None:
            part = cache[..., (hits + index) * SIZE : (hits + index + 1) * SIZE, :]
            slot[:] = 0
            _array(slot)[..., : part.shape[4], :] = part

        try:
            codes = self.pool.store_all(keys[hits:], fill, first=hits)
            logging.info("stored: %s", [Code(code).name for code in codes])
        except TokenLakeError as error:
            logging.warning("not stored: %s", error)
        return cache


def _array(slot: NDArray[Any]) -> Cache:
    """The bytes of a slot as its layout has them."""
    return slot.view(np.float32).reshape(SHAPE)
