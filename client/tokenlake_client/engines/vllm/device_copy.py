"""Copies segments between slots of the arena and vLLM's blocks in the memory of a device.

A save gathers a segment into a buffer on the device in the order of the slot, with one kernel per block and side (keys
or values), and then copies the buffer over the bus (`devices.staging`). A load does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import SLOT_DTYPES, sides_of
from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.devices.staging import Staging
from tokenlake_client.engines.vllm.blocks import PagedLayers, block_pairs
from tokenlake_client.engines.vllm.ranks import RankShards


class DeviceCopy:
    """Copies this rank's shards of segments between slots and blocks. Several threads may use it; each has its own
    stream and a buffer [shard, elements of one shard]."""

    def __init__(self, layout: Layout, shards: RankShards, stacks: Sequence[PagedLayers], device: Device) -> None:
        """`stacks`: tensors in the memory of `device`."""
        self._layout = layout
        self._stacks = stacks
        self._device = device
        self._rank = slice(shards.first * layout.shard_bytes, shards.stop * layout.shard_bytes)
        """The bytes of this rank's shards in a slot."""
        dtype = SLOT_DTYPES[layout.dtype]
        shape = (shards.stop - shards.first, layout.shard_bytes // dtype.itemsize)
        self._staging = Staging(device, shape, dtype)

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """Fill this rank's shards of `slot` with the segment in `blocks`, and with zeros behind its last block. The
        copy is complete on return."""

        def gather() -> None:
            if len(blocks) * self._stacks[0].block_tokens < self._layout.segment_tokens:
                buffer.zero_()
            for mine, theirs in self._pairs(buffer, blocks, 0):
                mine.copy_(theirs)

        with self._staging.work() as (stream, buffer):
            stream.run(gather)
            self._staging.to_host(slot[self._rank], buffer)
        self._staging.finish()

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        """Fill `blocks` with the tokens of the segment in `slot`, from its token `skip` on. The copy is complete after
        `finish`."""

        def scatter() -> None:
            for mine, theirs in self._pairs(buffer, blocks, skip):
                theirs.copy_(mine)

        with self._staging.work() as (stream, buffer):
            self._staging.to_device(buffer, slot[self._rank])
            stream.run(scatter)

    def finish(self) -> None:
        """Wait until all copies of this thread are complete. The slots that they read may be released afterwards."""
        self._staging.finish()

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function that another thread calls before it reads
        the results of the step, or writes blocks that this or an earlier step uses."""
        return self._staging.computed()

    def mark(self) -> Any:
        """A timestamp in the stream of the step, for `between`."""
        return self._device.mark()

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps in the stream of the step; None while the device has not reached the
        second."""
        return self._device.between(first, last)

    def _pairs(self, buffer: Any, blocks: Sequence[int], skip: int) -> Iterator[tuple[Any, Any]]:
        return block_pairs(self._stacks, sides_of(buffer, self._layout), blocks, skip)
