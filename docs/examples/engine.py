"""An engine without a GPU, for `docs/tutorial.md`: it reads a document and a question, and answers.

    python docs/examples/engine.py SOCKET DOCUMENT QUESTION

A token is a byte. In place of a model, each token attends in numpy to all tokens before it, and the answer is a digest
of the last one: it depends on every byte of the cache.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from door import LAYOUT, SHAPE, Cache, Door  # type: ignore[import-not-found]

from tokenlake import Deadlines, Pool, TokenLakeError

DEADLINES = Deadlines(call_s=2.0, match_s=2.0, fetch_s=10.0, grace_s=2.0)
"""Computing takes this engine seconds, so that it may wait longer than by default, on a busy machine too."""
EMBEDDINGS = np.random.default_rng(0).normal(0, 0.5, (256, *SHAPE[:2], SHAPE[3], SHAPE[5])).astype(np.float32)


def compute(cache: Cache, tokens: Sequence[int]) -> Cache:
    """The cache with that of further tokens appended."""
    begin = cache.shape[4]
    full = np.concatenate([cache, np.zeros((*SHAPE[:4], len(tokens), SHAPE[5]), np.float32)], axis=4)
    keys, values = full[:, :, 0], full[:, :, 1]  # each [head group, layer, head in group, token, dim]
    for at, token in enumerate(tokens, begin):
        keys[..., at, :] = values[..., at, :] = query = EMBEDDINGS[token]
        weights = np.exp(np.einsum("glhtd,glhd->glht", keys[..., : at + 1, :], query))
        values[..., at, :] += (
            np.einsum("glht,glhtd->glhd", weights, values[..., : at + 1, :]) / weights.sum(-1)[..., None]
        )
    return full


def main() -> None:
    socket, document, question = sys.argv[1:]
    tokens = list(Path(document).read_bytes() + question.encode())
    begin, found = time.perf_counter(), 0
    try:
        with Pool.connect(socket, LAYOUT, deadlines=DEADLINES) as pool:
            door = Door(pool)
            cache, found = door.prefill(tokens, compute), door.found
    except TokenLakeError as error:
        print(f"without the pool: {error}")
        cache = compute(np.zeros((*SHAPE[:4], 0, SHAPE[5]), np.float32), tokens)
    answer = hashlib.sha256(cache[..., -1, :].tobytes()).hexdigest()[:8]
    took = time.perf_counter() - begin
    print(f"{len(tokens):,} tokens, {found:,} of them from the pool, in {took:.2f} s: answer {answer}")


if __name__ == "__main__":
    main()
