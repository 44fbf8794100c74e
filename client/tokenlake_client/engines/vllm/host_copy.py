"""Segments between a pool's slots and vLLM's blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.slots import LayerPair, slot_tensors
from tokenlake_client.engines.vllm.paged import PagedLayer
from tokenlake_client.engines.vllm.ranks import RankShards

__all__ = ["HostCopy"]


class HostCopy:
    """Copies this rank's shards. Usable from several threads, for different blocks."""

    def __init__(self, layout: Layout, shards: RankShards, layers: Sequence[PagedLayer], block_tokens: int) -> None:
        self._layout = layout
        self._shards = slice(shards.first, shards.stop)
        self._count = shards.stop - shards.first
        self._layers = layers
        self._block = block_tokens

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with one segment, which lies in `blocks`."""
        for slot_layer, layer in zip(slot_tensors(slot, self._layout), self._layers, strict=True):
            for mine, theirs in self._pairs(slot_layer, layer, blocks, 0):
                mine.copy_(theirs)

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the segment's tokens from token `skip` on, a multiple of the block size."""
        for slot_layer, layer in zip(slot_tensors(slot, self._layout), self._layers, strict=True):
            for mine, theirs in self._pairs(slot_layer, layer, blocks, skip):
                theirs.copy_(mine)

    def finish(self) -> None:
        """Everything copied so far is where it belongs."""

    def computed(self) -> Callable[[], None]:
        """What to call before reading blocks that the step just computed: on a CPU they are there."""
        return _nothing

    def _pairs(
        self, slot_layer: LayerPair, layer: PagedLayer, blocks: Sequence[int], skip: int
    ) -> list[tuple[Any, Any]]:
        """(view of the slot, view of a block), each [group, head in group, tokens, dim]."""
        keys, values = (side[self._shards] for side in slot_layer)
        pairs = []
        at = skip
        for number in blocks:
            for block_keys, block_values in layer.block(number):
                tokens = slice(at, at + layer.part_tokens)
                at += layer.part_tokens
                pairs.append((keys[:, :, tokens], block_keys.unflatten(0, (self._count, -1))))
                pairs.append((values[:, :, tokens], block_values.unflatten(0, (self._count, -1))))
        return pairs


def _nothing() -> None: ...
