"""The places of opaque segments in the pages of vLLM's cache. Imports no engine.

vLLM gives the cache of a group of layers as tables [block, page], one for each layer or for several. A chunk lies in a
rank's shard of a slot table by table, and within a table block by block::

    shard  | table 0: block 0, block 1, ... | table 1: block 0, block 1, ... | ... | not used |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenlake_client.engines.vllm.parts import Part


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of some layers."""

    pages: Any
    """Tensor [block, bytes] of one-byte elements."""
    nbytes: int
    """The number of bytes of a page that are used, from its beginning on."""


class PageCache:
    """The pages of all cache groups of a rank (`copies.Cache`)."""

    rank = slice(None)
    """The worker passes the rank's shard of a slot, whose size the scheduler's side knows."""

    def __init__(self, groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> None:
        """`groups`: the tables of each cache group, in the order of vLLM's jobs. `chunk_blocks`: blocks of a chunk."""
        self.groups = groups
        self._blocks = chunk_blocks
        self._page_bytes = [sum(table.nbytes for table in group) for group in groups]
        self.shard_bytes = chunk_blocks * max(self._page_bytes)
        """The bytes of the largest chunk of all groups on this rank."""

    @property
    def devices(self) -> set[Any]:
        """The devices of all tables."""
        return {table.pages.device for group in self.groups for table in group}

    def used(self, part: Part) -> int:
        """See `copies.Cache`."""
        return self._blocks * self._page_bytes[part.group]

    def nbytes(self, part: Part) -> int:
        """See `copies.Cache`."""
        return len(part.blocks) * self._page_bytes[part.group]

    def gather(self, shard: Any, part: Part) -> None:
        """See `copies.Cache`."""
        self._each(shard, part, lambda pages, blocks, own: torch.index_select(pages, 0, blocks, out=own))

    def scatter(self, shard: Any, part: Part) -> None:
        """See `copies.Cache`."""
        self._each(shard, part, lambda pages, blocks, own: pages.index_copy_(0, blocks, own))

    def _each(self, shard: Any, part: Part, copy: Callable[[Any, Any, Any], Any]) -> None:
        """Call `copy(pages [block, bytes], numbers of the part's blocks, their bytes in shard [block, bytes])` for each
        table of the part's group."""
        at = 0
        for table in self.groups[part.group]:
            blocks = torch.tensor(part.blocks, device=table.pages.device)
            first = at + part.skip * table.nbytes
            own = shard[first : first + len(part.blocks) * table.nbytes]
            copy(table.pages[:, : table.nbytes], blocks, own.view(table.pages.dtype).view(-1, table.nbytes))
            at += self._blocks * table.nbytes
