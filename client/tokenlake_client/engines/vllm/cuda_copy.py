"""Segments between a pool's slots and vLLM's blocks in GPU memory.

A segment is gathered into one buffer on the GPU in the slot's order, by one kernel per block and side, and crosses the
bus in one copy per shard; loading is the reverse. All of it runs on a stream of its own. The arena is page-locked where
this process maps it, so that copies need no staging and no CPU; each lock belongs to one mapping and ends before it
(`tokenlake_client.mapped_memory`).

::

    step's stream    | forward ... |e|                       e: event, the blocks hold what was computed
    our stream                       wait e | gather | copy to the slot | event, waited for by the writer's thread
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
from tokenlake_client.engines.slots import TORCH_DTYPES, slot_flat
from tokenlake_client.engines.vllm.paged import PagedLayers
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.mapped_memory import mapped_memory_of

__all__ = ["CudaCopy"]

READ_ONLY = 8
"""cudaHostRegisterReadOnly: what is mapped for reading cannot be locked for writing."""
PORTABLE = 1


class CudaCopy:
    """Copies this rank's shards. Usable from several threads; each has its own stream and buffer."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers]) -> None:
        self._layout = layout
        self._shards = shards
        self._stacks = stacks
        self._device = stacks[0].tensor.device
        self._local = threading.local()

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with one segment, which lies in `blocks`; it is there on return."""
        # First: it makes this rank's device the one of this thread.
        stream, buffer = self._mine()
        self._lock_pages(slot)
        with torch.cuda.stream(stream):
            for mine, theirs in self._pairs(buffer, blocks, 0):
                mine.copy_(theirs)
            self._host(slot).copy_(buffer, non_blocking=True)
        stream.synchronize()

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the segment's tokens from token `skip` on; they are there after `finish`, and for the
        stream that computes."""
        # First: it makes this rank's device the one of this thread.
        stream, buffer = self._mine()
        self._lock_pages(slot)
        with torch.cuda.stream(stream):
            buffer.copy_(self._host(slot), non_blocking=True)
            for mine, theirs in self._pairs(buffer, blocks, skip):
                theirs.copy_(mine)

    def finish(self) -> None:
        """Everything this thread copied is where it belongs; slots may be given back."""
        self._mine()[0].synchronize()

    def computed(self) -> Callable[[], None]:
        """Called by the step's thread: what the writer's thread calls before it reads what the step computed."""
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._mine()[0].wait_event(event)

    def mark(self) -> Any:
        """This place in the step's stream, for `between`."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds that computing took from one mark to another; None while the second is still to come."""
        return float(first.elapsed_time(last)) / 1e3 if last.query() else None

    def _mine(self) -> tuple[Any, Any]:
        """This thread's stream and buffer [shard, elements of one shard]."""
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
            count = self._shards.stop - self._shards.first
            dtype = TORCH_DTYPES[self._layout.dtype]
            elements = self._layout.shard_bytes // dtype.itemsize
            self._local.buffer = torch.empty((count, elements), dtype=dtype, device=self._device)
        return self._local.stream, self._local.buffer

    def _host(self, slot: NDArray[np.uint8]) -> Any:
        """This rank's shards of the slot, [shard, elements of one shard]."""
        whole = slot_flat(slot, self._layout).view(self._layout.shards, -1)
        return whole[self._shards.first : self._shards.stop]

    def _pairs(self, buffer: Any, blocks: Sequence[int], skip: int) -> list[tuple[Any, Any]]:
        """(view of the buffer, view of a block), each [group, layer, head in group, token, dim]."""
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
        """Page-lock the mapping that `slot` lies in, once. What cannot be locked is copied through the driver's own
        staging memory, right but slower."""
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
    # In whatever thread the mapping ends: without its device the call would set up another GPU.
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)
