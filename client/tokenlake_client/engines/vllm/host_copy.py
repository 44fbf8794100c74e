"""Copies segments between slots of the arena and vLLM's blocks in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import slot_whole
from tokenlake_client.engines.vllm.blocks import PagedLayers, block_pairs
from tokenlake_client.engines.vllm.ranks import RankShards


class HostCopy:
    """Copies this rank's shards of segments between slots and blocks in host memory. Several threads may use it for
    different blocks."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers]) -> None:
        self._layout = layout
        self._shards = slice(shards.first, shards.stop)
        self._stacks = stacks

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with the segment in `blocks`, and with zeros behind its last block."""
        for mine, theirs in self._pairs(slot, blocks, 0):
            mine.copy_(theirs)
        end = len(blocks) * self._stacks[0].block_tokens
        for side in slot_whole(slot, self._layout):
            side[self._shards, :, :, end:].zero_()

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the tokens of the segment in `slot`, from its token `skip` on, which is a multiple of the
        block size."""
        for mine, theirs in self._pairs(slot, blocks, skip):
            theirs.copy_(mine)

    def finish(self) -> None:
        """Does nothing: a copy is complete when its call returns."""

    def computed(self) -> Callable[[], None]:
        """A function to call before the results of the engine's step are read; on a CPU the results are there at once,
        so it does nothing."""
        return self.finish

    def mark(self) -> Any:
        """A timestamp, to be passed to `between`, in seconds."""
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps that `mark` returned."""
        return float(last - first)

    def _pairs(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> Iterator[tuple[Any, Any]]:
        keys, values = slot_whole(slot, self._layout)
        return block_pairs(self._stacks, (keys[self._shards], values[self._shards]), blocks, skip)
