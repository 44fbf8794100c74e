"""Copies segments between slots of the arena and vLLM's blocks in GPU memory.

A save gathers a segment into a buffer on the GPU in the order of the slot, with one kernel per block and side (keys or
values), and then copies the buffer over the bus. A load does the reverse. Each thread uses its own CUDA stream. The
mapping of the arena is page-locked, so that copies need neither staging memory nor a CPU. A page lock belongs to one
mapping and ends before the memory is unmapped (`tokenlake_client.mapped_memory`).

::

    step's stream    | forward ... |e|                       e: event, the blocks hold what was computed
    copy stream                      wait e | gather | copy to the slot | the saving thread waits for this point
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import SLOT_DTYPES, slot_flat
from tokenlake_client.engines.vllm.blocks import PagedLayers
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.mapped_memory import mapped_memory_of

__all__ = ["CudaCopy"]

READ_ONLY = 8
"""CUDA's flag cudaHostRegisterReadOnly, which page-locks a read-only mapping; CUDA cannot lock such a mapping for
writing."""
PORTABLE = 1


class CudaCopy:
    """Copies this rank's shards of segments between slots and GPU blocks. Several threads may use it; each has its own
    stream and buffer."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers]) -> None:
        self._layout = layout
        self._shards = shards
        self._stacks = stacks
        self._device = stacks[0].tensor.device
        self._local = threading.local()

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with the segment in `blocks`. The copy is complete on return."""
        # The call of `_mine` comes first, because it sets the CUDA device of this thread.
        stream, buffer = self._mine()
        self._lock_pages(slot)
        with torch.cuda.stream(stream):
            for mine, theirs in self._pairs(buffer, blocks, 0):
                mine.copy_(theirs)
            self._host(slot).copy_(buffer, non_blocking=True)
        stream.synchronize()

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the tokens of the segment in `slot`, from its token `skip` on. The copy is complete after
        `finish`."""
        # The call of `_mine` comes first, because it sets the CUDA device of this thread.
        stream, buffer = self._mine()
        self._lock_pages(slot)
        with torch.cuda.stream(stream):
            buffer.copy_(self._host(slot), non_blocking=True)
            for mine, theirs in self._pairs(buffer, blocks, skip):
                theirs.copy_(mine)

    def finish(self) -> None:
        """Wait until all copies of this thread are complete. The slots that they read may be released afterwards."""
        self._mine()[0].synchronize()

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function that the saving thread calls before it
        reads the results of the step."""
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._mine()[0].wait_event(event)

    def mark(self) -> Any:
        """Record a timestamp in the CUDA stream of the step, for `between`."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps in the CUDA stream of the step; None while the device has not reached the
        second."""
        return float(first.elapsed_time(last)) / 1e3 if last.query() else None

    def _mine(self) -> tuple[Any, Any]:
        """This thread's CUDA stream and GPU buffer [shard, elements of one shard]."""
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
            count = self._shards.stop - self._shards.first
            dtype = SLOT_DTYPES[self._layout.dtype]
            elements = self._layout.shard_bytes // dtype.itemsize
            self._local.buffer = torch.empty((count, elements), dtype=dtype, device=self._device)
        return self._local.stream, self._local.buffer

    def _host(self, slot: NDArray[np.uint8]) -> Any:
        """This rank's shards of the slot in host memory, as a tensor [shard, elements of one shard]."""
        whole = slot_flat(slot, self._layout).view(self._layout.shards, -1)
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

    def _lock_pages(self, slot: NDArray[np.uint8]) -> None:
        """Page-lock the mapping in which `slot` lies, unless it was done before. If the lock fails, copies go through
        the driver's staging memory and are slower."""
        pages = mapped_memory_of(slot)
        if pages is not None:
            pages.register("cuda", partial(_lock, self._device))


def _lock(device: Any, address: int, nbytes: int) -> Callable[[], None] | None:
    runtime = torch.cuda.cudart()
    for flags in (PORTABLE, PORTABLE | READ_ONLY):
        if int(runtime.cudaHostRegister(address, nbytes, flags)) == 0:
            return partial(_unlock, runtime, device, address)
    return None


def _unlock(runtime: Any, device: Any, address: int) -> None:
    # The lock's end may run in any thread. Without `device` the call would initialise the thread's default GPU.
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)
