"""Sizes of the launches of the kernel for GPUs, and their arithmetic for an H100.

132 multiprocessors with 65,536 registers and 227 KiB of shared memory each; 3.35 TB/s with 600 ns latency need 2.0 MB
in flight (Little's law), 15.2 KB per multiprocessor. bfloat16, segments of 256 tokens, 4K / 32K / 128K cached tokens:

| attention | queries | rows | programs | splits | shared KiB | in flight per multiprocessor |
|---|---|---|---|---|---|---|
| GQA: 32 query heads, 8 KV heads of 128 | 1 | 16 | 256 / 256 / 264 of 264 | 32 / 32 / 33 | 102 | 2 x 64 KiB |
| | 16 | 64 | 256 / 256 / 264 of 264 | 32 / 32 / 33 | 80 | 2 x 32 KiB |
| | 512 | 128 | 128 of 132 | 1 | 128 | 64 KiB |
| MLA: 128 query heads, 576 and 512 | 1 | 64 | 64 / 128 / 128 of 132 | 32 / 64 / 64 | 216 | 72 KiB |
| | 16 | 64 | 128 of 132 | 4 | 216 | 72 KiB |
| | 512 | 64 | 1,024, in 8 waves of 132 | 1 | 216 | 72 KiB |

A block is 64 tokens: 32 KiB with GQA, 72 KiB with MLA, whose values are columns of the loaded keys. While one is
computed, the others that have room are loaded. Registers per thread: 72, 156, 137 and 248, without spills, with Triton
3.6 for sm_90 (a test compiles them). At 1 query MLA computes 242 operations per byte read, near the H100's 295:
bandwidth alone does not limit it. 512 queries of both are limited by arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tokenlake.attention import AttentionShape

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
    """Triton's number of stages of the loop over blocks: from 64 rows on as many blocks have room in shared memory,
    below (other instructions multiply there) one fewer."""
    resident: int
    """Programs that a multiprocessor runs at a time."""
    block_bytes: int
    """Bytes of the keys and values of a block."""
    shared_bytes: int
    """Shared memory of a program: its blocks, its queries and, below 64 rows, its weights."""
    partial_bytes: int
    """Bytes of the partial result of a program."""


def launch_for(shape: AttentionShape, size: int, rows: int) -> Launch:
    """The sizes for `rows` query rows per KV head, with elements of `size` bytes."""
    columns = shape.key_dim if shape.latent else shape.key_dim + shape.value_dim
    wide = max(shape.key_dim, shape.value_dim) > 256
    # Products of float32 are computed without tensor cores: more rows would not fit into the registers.
    most = SMALLEST if size == 4 else 64 if columns * size > 512 else 128
    block = SMALLEST
    while block < min(rows, most):
        block *= 2
    # The output of these rows takes half of a multiprocessor's registers or more.
    warps = 8 if block == 128 or (wide and block == 64) else 4
    resident = 1 if warps == 8 or wide else 2
    stages = 2 if wide or block == 64 else 3 if block == 128 else 4
    row_bytes = columns * size
    tokens = 64
    while tokens > SMALLEST and resident * _shared(shape, size, block, tokens, stages) > SHARED_BYTES:
        tokens //= 2
    return Launch(
        rows=block,
        tokens=tokens,
        warps=warps,
        stages=stages,
        resident=resident,
        block_bytes=tokens * row_bytes,
        shared_bytes=_shared(shape, size, block, tokens, stages),
        partial_bytes=block * shape.value_dim * 4,
    )


def _shared(shape: AttentionShape, size: int, rows: int, tokens: int, stages: int) -> int:
    columns = shape.key_dim if shape.latent else shape.key_dim + shape.value_dim
    blocks = stages if rows >= 64 else stages - 1
    weights = 0 if rows >= 64 else rows * tokens * size
    return blocks * tokens * columns * size + rows * shape.key_dim * size + weights


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
