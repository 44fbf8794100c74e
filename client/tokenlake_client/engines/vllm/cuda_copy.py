"""Copies segments between slots of the arena and vLLM's blocks in GPU memory.

A save gathers a segment into a buffer on the GPU in the order of the slot, with one kernel per block and side (keys or
values), and then copies the buffer over the bus (`cuda_threads`). A load does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import SLOT_DTYPES, slot_flat
from tokenlake_client.engines.vllm.blocks import PagedLayers
from tokenlake_client.engines.vllm.cuda_threads import CudaThreads
from tokenlake_client.engines.vllm.ranks import RankShards

__all__ = ["CudaCopy"]


class CudaCopy:
    """Copies this rank's shards of segments between slots and GPU blocks. Several threads may use it; each has its own
    stream and a buffer [shard, elements of one shard]."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers]) -> None:
        self._layout = layout
        self._shards = shards
        self._stacks = stacks
        self._device = stacks[0].tensor.device
        dtype = SLOT_DTYPES[layout.dtype]
        shape = (shards.stop - shards.first, layout.shard_bytes // dtype.itemsize)
        self._threads = CudaThreads(self._device, shape, dtype)

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with the segment in `blocks`, and with zeros behind its last block. The
        copy is complete on return."""
        with self._threads.work() as buffer:
            if len(blocks) * self._stacks[0].block_tokens < self._layout.segment_tokens:
                buffer.zero_()
            for mine, theirs in self._pairs(buffer, blocks, 0):
                mine.copy_(theirs)
            self._host(slot).copy_(buffer, non_blocking=True)
        self._threads.finish()

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the tokens of the segment in `slot`, from its token `skip` on. The copy is complete after
        `finish`."""
        with self._threads.work() as buffer:
            buffer.copy_(self._host(slot), non_blocking=True)
            for mine, theirs in self._pairs(buffer, blocks, skip):
                theirs.copy_(mine)

    def finish(self) -> None:
        """Wait until all copies of this thread are complete. The slots that they read may be released afterwards."""
        self._threads.finish()

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function that the saving thread calls before it
        reads the results of the step."""
        return self._threads.computed()

    def mark(self) -> Any:
        """Record a timestamp in the CUDA stream of the step, for `between`."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps in the CUDA stream of the step; None while the device has not reached the
        second."""
        return float(first.elapsed_time(last)) / 1e3 if last.query() else None

    def _host(self, slot: NDArray[np.uint8]) -> Any:
        """This rank's shards of the slot in page-locked host memory, as a tensor [shard, elements of one shard]."""
        whole = slot_flat(self._threads.locked(slot), self._layout).view(self._layout.shards, -1)
        return whole[self._shards.first : self._shards.stop]

    def _pairs(self, buffer: Any, blocks: Sequence[int], skip: int) -> list[tuple[Any, Any]]:
        """The parts of the buffer that are copied from or to each block: pairs (view of the buffer, view of a block),
        each [group, layer, head in group, token, dim]."""
        layout = self._layout
        count = buffer.shape[0]
        sides = buffer.view(count, layout.layers, 2, layout.heads_per_shard, layout.segment_tokens, layout.key_dim)
        pairs = []
        for stack in self._stacks:
            at = skip
            for number in blocks:
                for part in stack.block(number):
                    tokens = slice(at, at + stack.part_tokens)
                    at += stack.part_tokens
                    for side, block in enumerate(part):
                        mine = sides[:, stack.layers, side, :, tokens]
                        pairs.append((mine, block.unflatten(1, (count, -1)).transpose(0, 1)))
        return pairs
