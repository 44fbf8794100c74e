"""A pool of an exact number of segments: its layout and the memory of each node.

The baselines are caches of a number of segments; a pool that is compared with them must hold exactly as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake.disk import slab_bytes
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake.memory.region import RegionShape

PAGE: Final = 4096
SMALLEST_MEMORY: Final = 64 << 10
"""Smallest number of bytes that a daemon takes as its memory."""
SMALLEST_SEGMENT: Final = 2 * PAGE
"""Smallest number of bytes of a segment here. A node's memory is rounded up to a multiple of a page, which adds no slot
if slots are larger than a page."""
FLOAT16_PAIR: Final = 4
"""Bytes that one key element and one value element take together."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of the pool's nodes: with `memory` bytes each node holds exactly `node_segments` segments of `layout`, in
    one region."""

    nodes: int
    node_segments: int
    layout: Layout
    memory: int

    def window(self, most: int) -> int:
        """Number of segments that an engine reads at a time: at most `most`, and at most 3 % of those of a node, where
        they take slots beside the segments that the pool keeps."""
        return max(1, min(most, int(0.03 * self.node_segments)))

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit into the whole pool."""
        return self.nodes * self.node_segments * self.layout.segment_tokens


def layout_of(
    model_id: str,
    segment_tokens: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    layers: int = 1,
    kv_heads: int = 1,
    dtype: str = "float16",
) -> Layout:
    """A layout of random contents, which has no positions. `value_dim`: None: `key_dim`."""
    return Layout(
        model_id=model_id,
        weights_digest="00",
        dtype=dtype,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=key_dim if value_dim is None else value_dim,
        position="none",
        segment_tokens=segment_tokens,
    )


def bench_layout(segment_tokens: int) -> Layout:
    """A layout with one layer and one KV head whose segments have 16 bytes per token, or more where a segment would be
    smaller than `SMALLEST_SEGMENT`."""
    if not 1 <= segment_tokens <= 1 << 20:
        raise ConfigurationError("segment_tokens", segment_tokens, f"1 to {1 << 20}")
    return layout_of("tokenlake-bench", segment_tokens, max(4, -(-SMALLEST_SEGMENT // (segment_tokens * FLOAT16_PAIR))))


def disk_bytes(tokens: int, layout: Layout) -> int:
    """Bytes that the segments of so many tokens take on a device."""
    return slab_bytes(layout.segment_bytes, tokens // layout.segment_tokens)


def pool_size(nodes: int, capacity_tokens: int, layout: Layout) -> PoolSize:
    """Layout and memory of a pool whose capacity is split evenly over `nodes`, rounded down to whole segments as in the
    caches that it is compared with."""
    if nodes < 1:
        raise ConfigurationError("nodes", nodes, "at least 1")
    segments = capacity_tokens // nodes // layout.segment_tokens
    least = SMALLEST_MEMORY // layout.segment_bytes + 1
    if segments < least:
        raise ConfigurationError(
            "capacity_tokens",
            capacity_tokens,
            f"at least {nodes * least * layout.segment_tokens}: {least} segments of {layout.segment_tokens} tokens "
            f"for each of {nodes} nodes",
        )
    memory = -(-segments * layout.segment_bytes // PAGE) * PAGE
    while RegionShape(memory, layout.segment_bytes).slots < segments:
        memory += PAGE
    assert RegionShape(memory, layout.segment_bytes).slots == segments
    return PoolSize(nodes, segments, layout, memory)
