"""Sizes of the launches of the kernel for GPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tokenlake.attention import AttentionShape

__all__ = ["SHARED_BYTES", "SMALLEST", "Launch", "launch_for", "splits_for"]

SMALLEST = 16
"""Least number of query rows, tokens and columns of a block that Triton's matrix product `tl.dot` accepts."""
SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor of the H100 that its programs may use."""


class Launch(NamedTuple):
    """The sizes of one launch."""

    rows: int
    """Query rows of a program."""
    tokens: int
    """Tokens of a block: those that a program loads at a time."""
    warps: int
    stages: int
    """Blocks that have room in shared memory, those that are being loaded included."""
    resident: int
    """Programs that a multiprocessor runs at a time."""
    block_bytes: int
    """Bytes of the keys and values of a block."""
    shared_bytes: int
    """Shared memory of a program: its blocks and its queries."""
    partial_bytes: int
    """Bytes of the partial result of a program."""


def launch_for(shape: AttentionShape, size: int, rows: int) -> Launch:
    """The sizes for `rows` query rows per KV head, with elements of `size` bytes."""
    columns = shape.key_dim if shape.latent else shape.key_dim + shape.value_dim
    wide = max(shape.key_dim, shape.value_dim) > 256
    block = SMALLEST
    while block < min(rows, 64 if columns * size > 512 else 128):
        block *= 2
    # The output of these rows takes half of a multiprocessor's registers or more.
    warps = 8 if block == 128 or (wide and block == 64) else 4
    resident = 1 if warps == 8 or wide else 2
    stages = 2 if wide or block == 64 else 3
    queries, row_bytes = block * shape.key_dim * size, columns * size
    tokens = 64
    while tokens > SMALLEST and resident * (queries + stages * tokens * row_bytes) > SHARED_BYTES:
        tokens //= 2
    return Launch(
        rows=block,
        tokens=tokens,
        warps=warps,
        stages=stages,
        resident=resident,
        block_bytes=tokens * row_bytes,
        shared_bytes=queries + stages * tokens * row_bytes,
        partial_bytes=block * shape.value_dim * 4,
    )


@lru_cache
def splits_for(blocks: int, groups: int, launch: Launch, processors: int) -> int:
    """The number of splits of `blocks` blocks of tokens for the least predicted time, with `groups` programs per split.

    The unit is the time of a block while all multiprocessors load blocks. A wave of programs takes as many as its
    longest program has, and one until the first has arrived. The partial results are written and read once.
    """
    room = processors * launch.resident

    def cost(splits: int) -> float:
        waves = -(-groups * splits // room)
        moved = 2 * groups * splits * launch.partial_bytes / launch.block_bytes / room if splits > 1 else 0.0
        return waves * (-(-blocks // splits) + 1) + moved

    # More splits than those of two full waves are never faster.
    return min(range(1, min(blocks, max(1, 2 * room // groups)) + 1), key=cost)
