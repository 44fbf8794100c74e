"""Checksums that the writer makes: xxh3-64 of each shard of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake_client.parallel_copy import ParallelCopy

CACHED_BYTES = 1 << 20
"""Limit of the bytes that are copied before they are hashed: so few bytes are still in the processor's cache."""


def shard_checksums(segment: NDArray[np.uint8], shards: int, mask: int | None = None) -> bytes:
    """The checksums of the shards in the bit mask `mask` (all by default), in order, 8 bytes each, little-endian.
    `segment`: contiguous, its length a multiple of `shards`. Releases the GIL while it hashes."""
    size = len(segment) // shards
    view = segment.data
    digests = [
        xxhash.xxh3_64_intdigest(view[at * size : (at + 1) * size])
        for at in range(shards)
        if mask is None or mask >> at & 1
    ]
    return b"".join(digest.to_bytes(CHECKSUM_BYTES, "little") for digest in digests)


def copy_with_checksums(
    pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], shards: int, parallel_copy: ParallelCopy
) -> list[bytes]:
    """Copy the second segment of each pair into the first, and return `shard_checksums` of each first one. Each piece
    is hashed directly after its copy, while it is in the processor's cache."""
    digests = np.zeros((len(pairs), shards), np.dtype("<u8"))

    def copy_shards(part: tuple[int, int, int]) -> None:
        number, first, last = part
        slot, segment = pairs[number]
        size = len(slot) // shards
        if size > CACHED_BYTES:
            digests[number, first] = _copy_in_pieces(*(side[first * size : last * size] for side in pairs[number]))
            return
        np.copyto(slot[first * size : last * size], segment[first * size : last * size])
        view = slot.data
        for at in range(first, last):
            digests[number, at] = xxhash.xxh3_64_intdigest(view[at * size : (at + 1) * size])

    nbytes = sum(slot.nbytes for slot, _ in pairs)
    step = max(1, CACHED_BYTES * shards * len(pairs) // max(1, nbytes))
    parts = [
        (number, first, min(first + step, shards)) for number in range(len(pairs)) for first in range(0, shards, step)
    ]
    parallel_copy.each(copy_shards, parts, nbytes)
    return [row.tobytes() for row in digests]


def _copy_in_pieces(slot: NDArray[np.uint8], segment: NDArray[np.uint8]) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, len(slot), CACHED_BYTES):
        piece = slot[at : at + CACHED_BYTES]
        np.copyto(piece, segment[at : at + CACHED_BYTES])
        digest.update(piece.data)
    return digest.intdigest()
