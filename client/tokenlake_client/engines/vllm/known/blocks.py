"""vLLM's paged cache as keys and values, with a table of the memory layouts that are known.

vLLM gives each layer a tensor [blocks, KV heads, tokens, 2 * head dim] for every order in memory: NHD and HND differ in
the strides only. The contents of the last two dimensions depend on the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import SLOT_DTYPES, LayerPair, sides_of, stacked
from tokenlake_client.engines.vllm.known.ranks import RankShards
from tokenlake_client.engines.vllm.parts import Part

BlockViews = Callable[[Any], LayerPair]
"""A function from one block of some layers, [layers, KV heads, tokens, 2 * head dim], to views (keys, values), each
[layers, KV heads, tokens, head dim]."""


def _side_by_side(block: Any) -> LayerPair:
    """The keys and values of a block of FlashAttention or FlashInfer, where the key of each token is followed by its
    value."""
    keys, values = block.chunk(2, dim=-1)
    return keys, values


def _transposed_keys(block: Any) -> LayerPair:
    """The keys and values of a block of vLLM's CPU kernels, which holds for each head all keys as [head dim, tokens],
    then all values as [tokens, head dim]."""
    *outer, tokens, width = block.shape
    halves = block.view(*outer, 2, tokens * width // 2)
    keys = halves[..., 0, :].unflatten(-1, (width // 2, tokens)).transpose(-1, -2)
    return keys, halves[..., 1, :].unflatten(-1, (tokens, width // 2))


BLOCK_VIEWS: dict[str, BlockViews] = {
    "CPU_ATTN/vec": _transposed_keys,
    "CPU_ATTN/vec16": _transposed_keys,
    "FLASH_ATTN": _side_by_side,
    "FLASHINFER": _side_by_side,
}
"""For each attention backend whose memory layout is known, the function that splits its blocks into keys and values. On
a CPU the name of the backend also states the instruction set, because the kernels for different sets pack the cache
differently."""


def block_views(backend: str) -> BlockViews:
    """Returns the function that splits a block of an attention backend into keys and values. Raises `LayoutRefused`,
    which names the backend, if its memory layout is unknown."""
    if backend not in BLOCK_VIEWS:
        raise LayoutRefused(
            f"attention backend {backend!r} keeps its cache in an unknown layout; known: {', '.join(BLOCK_VIEWS)}"
        )
    return BLOCK_VIEWS[backend]


class PagedLayers:
    """One tensor over consecutive layers of vLLM's paged cache."""

    def __init__(self, tensor: Any, first: int, blocks: int, views: BlockViews) -> None:
        """`tensor`: [layers, kernel blocks, KV heads, tokens, 2 * head dim], of the layers from `first` on. `blocks`:
        the number of blocks as the scheduler counts them; a kernel may divide each into several kernel blocks."""
        self.tensor = tensor
        self.layers = slice(first, first + tensor.shape[0])
        self.parts = tensor.shape[1] // blocks
        """The number of blocks of the attention kernel that one block of vLLM's scheduler consists of."""
        self.part_tokens = int(tensor.shape[3])
        self.block_tokens = self.parts * self.part_tokens
        """The number of tokens of a block of vLLM's scheduler."""
        self._views = views

    def block(self, number: int) -> list[LayerPair]:
        """The keys and values of the scheduler's block `number` as views, one pair per block of the kernel, each
        [layers, KV heads, tokens, head dim]."""
        start = number * self.parts
        return [self._views(self.tensor[:, at]) for at in range(start, start + self.parts)]


def stack_layers(tensors: Sequence[Any], blocks: int, views: BlockViews) -> list[PagedLayers]:
    """The tensors of the layers, in stacks that one operation copies."""
    paged, first = [], 0
    for whole in stacked(tensors):
        paged.append(PagedLayers(whole, first, blocks, views))
        first += whole.shape[0]
    return paged


class BlockCache:
    """The blocks of a rank for a layout that the pool knows (`copies.Cache`)."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers]) -> None:
        self._layout = layout
        self._stacks = stacks
        self._dtype = SLOT_DTYPES[layout.dtype]
        self._shards = shards.stop - shards.first
        self.rank = slice(shards.first * layout.shard_bytes, shards.stop * layout.shard_bytes)
        self.shard_bytes = self._shards * layout.shard_bytes

    def used(self, part: Part) -> int:
        """See `copies.Cache`."""
        return self.shard_bytes

    def nbytes(self, part: Part) -> int:
        """See `copies.Cache`."""
        tokens: int = len(part.blocks) * self._stacks[0].block_tokens
        return self.shard_bytes * tokens // self._layout.segment_tokens

    def gather(self, shard: Any, part: Part) -> None:
        """See `copies.Cache`. The bytes behind the last block are zeros."""
        sides = self._sides(shard)
        for mine, theirs in self._pairs(sides, part):
            mine.copy_(theirs)
        for side in sides:
            side[:, :, :, len(part.blocks) * self._stacks[0].block_tokens :].zero_()

    def scatter(self, shard: Any, part: Part) -> None:
        """See `copies.Cache`."""
        for mine, theirs in self._pairs(self._sides(shard), part):
            theirs.copy_(mine)

    def _sides(self, shard: Any) -> LayerPair:
        return sides_of(shard.view(self._dtype).view(self._shards, -1), self._layout)

    def _pairs(self, sides: LayerPair, part: Part) -> Iterator[tuple[Any, Any]]:
        """The parts of a segment that are copied from or to each block of `part`: pairs (view of the segment, view of a
        block), each [group, layer, head in group, token, dim]. `sides`: the segment's keys and values."""
        for stack in self._stacks:
            at = part.skip * stack.block_tokens
            for number in part.blocks:
                for block in stack.block(number):
                    tokens = slice(at, at + stack.part_tokens)
                    at += stack.part_tokens
                    for side, theirs in zip(sides, block, strict=True):
                        mine = side[:, stack.layers, :, tokens]
                        yield mine, theirs.unflatten(1, (mine.shape[0], -1)).transpose(0, 1)


def check_tensors(tensors: Mapping[str, Any], heads: int, width: int, dtype: Any, blocks: int) -> list[str]:
    """Check the shapes and the dtype of the layers' cache tensors, and return the names of the layers in order. Raises
    `LayoutRefused` for a tensor of another shape or dtype than expected."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if len(shape) != 4 or shape[1] != heads or shape[3] != width or shape[0] % blocks or tensor.dtype != dtype:
            raise LayoutRefused(
                f"the cache of {name} is {shape} of {tensor.dtype}; "
                f"expected [a multiple of {blocks}, {heads}, tokens, {width}] of {dtype}"
            )
    return list(tensors)
