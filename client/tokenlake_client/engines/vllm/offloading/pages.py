"""Copies chunks between slots and the pages of vLLM's cache, in host memory or on a device. Imports no engine.

vLLM gives the cache of a group of layers as tables [block, page], one for each layer or for several. A chunk lies in a
rank's shard of a slot table by table, and within a table block by block::

    shard  | table 0: block 0, block 1, ... | table 1: block 0, block 1, ... | ... | not used |
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.devices.staging import Staging
from tokenlake_client.engines.vllm.offloading.chunks import ChunkPart


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

    def _gather(self, chunk: Any, part: ChunkPart) -> None:
        """Copy the blocks of `part` into `chunk`, a tensor of bytes."""
        self._each(chunk, part, _read)

    def _scatter(self, chunk: Any, part: ChunkPart) -> None:
        """Copy the bytes of `chunk` into the blocks of `part`."""
        self._each(chunk, part, _write)

    def _page_bytes(self, part: ChunkPart) -> int:
        """The bytes of one block in all tables of the part's group."""
        return sum(table.nbytes for table in self._groups[part.group])

    def _part_bytes(self, part: ChunkPart) -> int:
        """The bytes of the blocks of `part`."""
        return len(part.blocks) * self._page_bytes(part)

    def _each(self, chunk: Any, part: ChunkPart, copy: Callable[[Any, Any, Any], None]) -> None:
        """Call `copy(pages [block, bytes], numbers of the part's blocks, their bytes in chunk [block, bytes])` for each
        table of the part's group."""
        at = 0
        for table in self._groups[part.group]:
            blocks = torch.tensor(part.blocks, device=table.pages.device)
            first = at + part.skip * table.nbytes
            own = chunk[first : first + len(part.blocks) * table.nbytes]
            copy(table.pages[:, : table.nbytes], blocks, own.view(table.pages.dtype).view(-1, table.nbytes))
            at += self._blocks * table.nbytes


class HostPages(_Pages):
    """Copies between slots and a cache in host memory. Several threads may use it for different blocks."""

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """See `worker.Pages`."""
        self._gather(_tensor(shard), part)
        return self._part_bytes(part)

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """See `worker.Pages`."""
        self._scatter(_tensor(shard), part)
        return self._part_bytes(part)

    def computed(self) -> Callable[[], None]:
        """See `worker.Pages`: on a CPU the results of a step are there at once."""
        return _nothing


class DevicePages(_Pages):
    """Copies between slots and a cache in the memory of a device: a chunk is gathered into a buffer on the device,
    which is copied over the bus, and the reverse. Several threads may use it for different blocks."""

    def __init__(self, groups: Sequence[Sequence[PageTable]], chunk_blocks: int, device: Device) -> None:
        """`groups`: tables in the memory of `device`."""
        super().__init__(groups, chunk_blocks)
        self._staging = Staging(device, (chunk_bytes(groups, chunk_blocks),), torch.uint8)

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """See `worker.Pages`."""
        nbytes = self._part_bytes(part)
        with self._staging.work() as (stream, buffer):
            stream.run(lambda: self._gather(buffer, part))
            self._staging.to_host(shard[:nbytes], buffer[:nbytes])
        self._staging.finish()
        return nbytes

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """See `worker.Pages`."""
        nbytes = self._blocks * self._page_bytes(part)
        with self._staging.work() as (stream, buffer):
            self._staging.to_device(buffer[:nbytes], shard[:nbytes])
            stream.run(lambda: self._scatter(buffer, part))
        self._staging.finish()
        return self._part_bytes(part)

    def computed(self) -> Callable[[], None]:
        """See `worker.Pages`."""
        return self._staging.computed()


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
