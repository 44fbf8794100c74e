"""Copies chunks between slots and the pages of vLLM's cache in host memory. Imports no engine.

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

from tokenlake_client.engines.vllm.offloading.chunks import ChunkPart

__all__ = ["HostPages", "PageTable", "chunk_bytes"]


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


class HostPages:
    """Copies between slots and a cache in host memory. Several threads may use it for different blocks."""

    def __init__(self, groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> None:
        """`groups`: the tables of each cache group, in the order of vLLM's jobs."""
        self._groups = groups
        self._blocks = chunk_blocks

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        blocks = torch.tensor(part.blocks)
        nbytes = 0
        for table, mine in self._pairs(shard, part):
            torch.index_select(table, 0, blocks, out=mine)
            nbytes += mine.numel()
        return nbytes

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """As of `worker.Pages`."""
        blocks = torch.tensor(part.blocks)
        nbytes = 0
        for table, mine in self._pairs(shard, part):
            table.index_copy_(0, blocks, mine)
            nbytes += mine.numel()
        return nbytes

    def computed(self) -> Callable[[], None]:
        """As of `worker.Pages`: on a CPU the results of a step are there at once."""
        return _nothing

    def _pairs(self, shard: NDArray[np.uint8], part: ChunkPart) -> Iterator[tuple[Any, Any]]:
        """For each table of the part's group: (its pages [block, bytes], the part's bytes in `shard`, alike)."""
        at = 0
        for table in self._groups[part.group]:
            first = at + part.skip * table.nbytes
            own = shard[first : first + len(part.blocks) * table.nbytes]
            yield table.pages[:, : table.nbytes], _tensor(own).view(table.pages.dtype).view(-1, table.nbytes)
            at += self._blocks * table.nbytes


def _tensor(array: NDArray[np.uint8]) -> Any:
    """`array`, which is contiguous, as a tensor over the same memory, which it does not own."""
    # The memory is passed to torch by its address: torch would warn about a read-only array, because it has no
    # read-only tensors.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


def _nothing() -> None:
    """A copy in host memory waits for nothing."""
