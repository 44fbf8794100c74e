"""Copies chunks between slots and the pages of vLLM's cache, in host memory or on a GPU. Imports no engine.

vLLM gives the cache of a group of layers as tables [block, page], one for each layer or for several. A chunk lies in a
rank's shard of a slot table by table, and within a table block by block::

    shard  | table 0: block 0, block 1, ... | table 1: block 0, block 1, ... | ... | not used |
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.vllm.cuda_threads import CudaThreads
from tokenlake_client.engines.vllm.offloading.chunks import ChunkPart

__all__ = ["CudaPages", "HostPages", "PageTable", "chunk_bytes"]


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of some layers."""

    pages: Any
    """Tensor [block, bytes] of one-byte elements."""
    nbytes: int
    """The number of bytes of a page that are used, from its beginning on."""


def chunk_bytes(groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> int:
    """The bytes of the largest chunk of all groups on this rank."""
    return max(chunk_blocks * sum(table.nbytes for table in group) for group in groups)


class _Pages:
    """The pages of all cache groups of a rank."""

    def __init__(self, groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> None:
        """`groups`: the tables of each cache group, in the order of vLLM's jobs."""
        self._groups = groups
        self._blocks = chunk_blocks

    def _gather(self, chunk: Any, part: ChunkPart) -> int:
        """Copy the blocks of `part` into `chunk`, a tensor of bytes; returns the number of bytes."""
        return sum(self._each(chunk, part, _read))

    def _scatter(self, chunk: Any, part: ChunkPart) -> int:
        """Copy the bytes of `chunk` into the blocks of `part`; returns the number of bytes."""
        return sum(self._each(chunk, part, _write))

    def _each(self, chunk: Any, part: ChunkPart, copy: Callable[[Any, Any, Any], None]) -> Iterator[int]:
        """Call `copy(pages [block, bytes], numbers of the part's blocks, their bytes in chunk [block, bytes])` for each
        table of the part's group, and yield the number of bytes."""
        at = 0
        for table in self._groups[part.group]:
            blocks = torch.tensor(part.blocks, device=table.pages.device)
            first = at + part.skip * table.nbytes
            own = chunk[first : first + len(part.blocks) * table.nbytes]
            copy(table.pages[:, : table.nbytes], blocks, own.view(table.pages.dtype).view(-1, table.nbytes))
            yield own.numel()
            at += self._blocks * table.nbytes


class HostPages(_Pages):
    """Copies between slots and a cache in host memory. Several threads may use it for different blocks."""

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        return self._gather(_tensor(shard), part)

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        return self._scatter(_tensor(shard), part)

    def computed(self) -> Callable[[], None]:
        """As of `worker.Pages`: on a CPU the results of a step are there at once."""
        return _nothing


class CudaPages(_Pages):
    """Copies between slots and a cache on a GPU: a chunk is gathered into a buffer on the GPU, which is copied over the
    bus, and the reverse. Several threads may use it for different blocks."""

    def __init__(self, groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> None:
        super().__init__(groups, chunk_blocks)
        device = groups[0][0].pages.device
        self._threads = CudaThreads(device, (chunk_bytes(groups, chunk_blocks),), torch.uint8)

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        with self._threads.work() as buffer:
            nbytes = self._gather(buffer, part)
            _tensor(self._threads.locked(shard))[:nbytes].copy_(buffer[:nbytes], non_blocking=True)
        self._threads.finish()
        return nbytes

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        nbytes = self._blocks * sum(table.nbytes for table in self._groups[part.group])
        with self._threads.work() as buffer:
            buffer[:nbytes].copy_(_tensor(self._threads.locked(shard))[:nbytes], non_blocking=True)
            filled = self._scatter(buffer, part)
        self._threads.finish()
        return filled

    def computed(self) -> Callable[[], None]:
        """As of `worker.Pages`."""
        return self._threads.computed()


def _read(pages: Any, blocks: Any, own: Any) -> None:
    torch.index_select(pages, 0, blocks, out=own)


def _write(pages: Any, blocks: Any, own: Any) -> None:
    pages.index_copy_(0, blocks, own)


def _tensor(array: NDArray[np.uint8]) -> Any:
    """`array`, which is contiguous, as a tensor over the same memory, which it does not own."""
    # The memory is passed to torch by its address: torch would warn about a read-only array, because it has no
    # read-only tensors.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


def _nothing() -> None:
    """A copy in host memory waits for nothing."""
