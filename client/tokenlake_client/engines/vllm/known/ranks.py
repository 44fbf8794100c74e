"""The KV heads of a tensor-parallel rank, and thus its shards of a segment. Arithmetic only.

Tensor parallelism over more ranks than KV heads, here 16 on 8::

    rank    0  1  2  3  4  5  ...  14  15
    head    0  0  1  1  2  2  ...   7   7
    writes  x     x     x     ...   x
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards of a segment that one rank reads and writes: the rank's cache holds shards [first, stop), in the order
    of its heads."""

    first: int
    stop: int
    writers: int
    """The number of ranks of the engine that store segments; each stores its own shards."""
    writes: bool
    """True: this rank stores its shards. Of several ranks with the same heads, the first one does."""

    @property
    def mask(self) -> int:
        """The bit mask of the shards of a segment that the rank reads and writes."""
        return (1 << self.stop) - (1 << self.first)


def rank_shards(layout: Layout, rank: int, size: int) -> RankShards:
    """The shards of rank `rank` of `size`. vLLM gives each rank the same number of consecutive heads, and copies of
    heads where there are more ranks than heads. Raises `LayoutRefused` where a rank's heads are not whole shards."""
    heads, per_shard = layout.kv_heads, layout.heads_per_shard
    if heads >= size:
        own, copies = heads // size, 1
    else:
        own, copies = 1, size // heads
    if own * size != heads * copies or own % per_shard:
        raise LayoutRefused(
            f"tensor parallel size {size} gives each rank {own} of {heads} KV heads, which are kept in groups of "
            f"{per_shard}: a rank's heads are not whole groups"
        )
    first = rank // copies * own // per_shard
    return RankShards(first, first + own // per_shard, size // copies, rank % copies == 0)
