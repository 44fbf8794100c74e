"""Checksums made by the writer: xxh3-64 of each shard of a segment."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["shard_checksums"]

CHECKSUM_BYTES = 8


def shard_checksums(segment: NDArray[np.uint8], shards: int, mask: int | None = None) -> bytes:
    """8 bytes, little-endian, for each shard in `mask` (all by default), in order. `segment`: contiguous, its
    length a multiple of `shards`. Releases the GIL while it hashes."""
    size = len(segment) // shards
    view = segment.data
    digests = [
        xxhash.xxh3_64_intdigest(view[at * size : (at + 1) * size])
        for at in range(shards)
        if mask is None or mask >> at & 1
    ]
    return b"".join(digest.to_bytes(CHECKSUM_BYTES, "little") for digest in digests)
