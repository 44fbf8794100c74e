"""vLLM's paged cache as keys and values: one table of memory layouts.

vLLM gives each layer a tensor [blocks, KV heads, tokens, 2 * head dim], whatever the order in memory is: NHD and HND
differ in its strides alone. What lies in the last dimension depends on the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.slots import LayerPair

__all__ = ["BLOCK_VIEWS", "PagedLayer", "block_views"]

BlockViews = Callable[[Any], LayerPair]
"""One block [KV heads, tokens, 2 * head dim] to views (keys, values), each [KV heads, tokens, head dim]."""


def _side_by_side(block: Any) -> LayerPair:
    """FlashAttention and FlashInfer: each token has its key, then its value."""
    keys, values = block.chunk(2, dim=-1)
    return keys, values


def _transposed_keys(block: Any) -> LayerPair:
    """vLLM's CPU kernels: each head has all keys as [head dim, tokens], then all values as [tokens, head dim]."""
    heads, tokens, width = block.shape
    halves = block.view(heads, 2, tokens * width // 2)
    keys = halves[:, 0].unflatten(1, (width // 2, tokens)).transpose(1, 2)
    return keys, halves[:, 1].unflatten(1, (tokens, width // 2))


BLOCK_VIEWS: dict[str, BlockViews] = {
    "CPU_ATTN/vec": _transposed_keys,
    "CPU_ATTN/vec16": _transposed_keys,
    "FLASH_ATTN": _side_by_side,
    "FLASHINFER": _side_by_side,
}
"""By attention backend; on a CPU also by instruction set, because its kernels pack the cache differently."""


def block_views(backend: str) -> BlockViews:
    """Raises `LayoutRefused` naming a backend whose memory layout is not known."""
    if backend not in BLOCK_VIEWS:
        raise LayoutRefused(
            f"attention backend {backend!r} keeps its cache in an unknown layout; known: {', '.join(BLOCK_VIEWS)}"
        )
    return BLOCK_VIEWS[backend]


class PagedLayer:
    """One layer's cache."""

    def __init__(self, tensor: Any, blocks: int, views: BlockViews) -> None:
        """`blocks`: as the scheduler counts them; a kernel may divide each into several."""
        self.tensor = tensor
        self.parts = tensor.shape[0] // blocks
        """Kernel blocks in a block."""
        self.part_tokens = int(tensor.shape[2])
        self._views = views

    def block(self, number: int) -> list[LayerPair]:
        """Views (keys, values) of block `number`, one per kernel block, each [KV heads, tokens, head dim]."""
        start = number * self.parts
        return [self._views(self.tensor[at]) for at in range(start, start + self.parts)]


def check_tensors(tensors: Mapping[str, Any], heads: int, width: int, dtype: Any, blocks: int) -> Sequence[str]:
    """The layers' names in order. Raises `LayoutRefused` for a tensor that is not what the layout says."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if len(shape) != 4 or shape[1] != heads or shape[3] != width or shape[0] % blocks or tensor.dtype != dtype:
            raise LayoutRefused(
                f"the cache of {name} is {shape} of {tensor.dtype}; "
                f"expected [a multiple of {blocks}, {heads}, tokens, {width}] of {dtype}"
            )
    return list(tensors)
