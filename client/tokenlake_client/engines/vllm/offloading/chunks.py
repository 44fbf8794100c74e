"""Chunks: the unit that vLLM's OffloadingConnector stores and loads, consecutive blocks of one cache group. A chunk is
stored as one segment. Imports no engine.

A job names the blocks of all its chunks in one list, group after group. The first chunk of a group may begin in its
middle, and the last one of a load may end there::

    group_sizes[g] = 6, block_indices[g] = 2, 4 blocks per chunk

    chunk      |---- key 0 ----|---- key 1 ----|
    block of it  0   1   2   3   0   1   2   3
    block        -   -   b0  b1  b2  b3  b4  b5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenlake_client.engines.vllm.parts import Part

HASH_BYTES = 32
"""Size of a block hash that vLLM makes with SHA-256."""
GROUP_BYTES = 4
"""Size of the number of the cache group, with which a key of vLLM's OffloadingConnector ends."""


def parse_key(key: bytes) -> tuple[int, bytes]:
    """(number of the cache group, block hash) of a key of vLLM's OffloadingConnector."""
    return int.from_bytes(key[-GROUP_BYTES:], "big"), key[:-GROUP_BYTES]


def blocks_per_chunk(block_tokens: Sequence[int], segment_tokens: int) -> int:
    """The number of blocks of a chunk whose segment has about `segment_tokens` tokens. `block_tokens`: the block size
    of each cache group. 1 where block sizes differ, because vLLM has one number for all groups."""
    return max(1, segment_tokens // block_tokens[0]) if len(set(block_tokens)) == 1 else 1


def chunk_parts(
    keys: Iterable[int],
    group_ids: Sequence[int],
    blocks: Sequence[int],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    size: int,
) -> list[Part]:
    """The blocks of a job by chunk. `keys`: the number of the cache group of each key, in the order of the job.
    `group_ids`: the numbers of the groups that `group_sizes` and `block_indices` count. `size`: blocks per chunk. The
    chunks of a group follow each other, but need not be neighbours. Raises `ValueError` where keys and blocks do not
    fit together."""
    of_group: dict[int, list[int]] = {group: [] for group in group_ids}
    for index, group in enumerate(keys):
        if group not in of_group:
            raise ValueError(f"a key of cache group {group}; the groups are {list(group_ids)}")
        of_group[group].append(index)
    parts: list[Part] = []
    start = 0
    for position, (group, count, first) in enumerate(zip(group_ids, group_sizes, block_indices, strict=True)):
        own = blocks[start : start + count]
        start += count
        skip = first % size if count else 0
        indices = of_group[group]
        if -(-(skip + count) // size) != len(indices):
            raise ValueError(f"{len(indices)} chunks of {size} blocks for {count} blocks of cache group {group}")
        at = 0
        for index in indices:
            taken = min(size - skip, count - at)
            parts.append(Part(index, position, skip, tuple(own[at : at + taken])))
            at, skip = at + taken, 0
    return parts


def whole_chunks(parts: Iterable[Part], size: int) -> list[Part]:
    """The parts that are whole chunks. vLLM has given up the first blocks of a chunk that lies at the edge of a sliding
    window; without them the chunk is not stored, because its key stands for all its blocks."""
    return [part for part in parts if len(part.blocks) == size and 0 not in part.blocks]
