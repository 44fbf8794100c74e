"""Copies segments between slots of the arena and vLLM's blocks, in host memory or in the memory of a device.

`Cache` knows where the bytes of a segment lie in vLLM's blocks: `blocks.BlockCache` for a layout that the pool knows,
`pages.PageCache` for an opaque one. On a device a segment is gathered into a buffer there, in the order of the slot,
and the buffer is copied over the bus (`devices.staging`); a load does the reverse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.common.slots import host_tensor
from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_client.engines.devices.staging import Staging
from tokenlake_client.engines.vllm.parts import Part


class Cache(Protocol):
    """The places of segments in the blocks of a rank."""

    rank: slice
    """The bytes of a slot that this rank reads and writes."""
    shard_bytes: int
    """The largest number of these bytes."""

    def used(self, part: Part) -> int:
        """The bytes of the rank's shard, from the first on, that the segment of `part` takes."""
        ...

    def nbytes(self, part: Part) -> int:
        """The bytes of the blocks of `part`."""
        ...

    def gather(self, shard: Any, part: Part) -> None:
        """Fill `shard`, a tensor of bytes, with the segment in the blocks of `part`, which begins with its first
        block."""
        ...

    def scatter(self, shard: Any, part: Part) -> None:
        """Fill the blocks of `part` with the bytes of `shard`."""
        ...


class HostCopy:
    """Copies between slots and blocks in host memory. Several threads may use it for different blocks."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def to_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        """Fill this rank's bytes of `slot` with a segment, and with zeros behind its last block. Returns the bytes of
        its blocks. The copy is complete on return."""
        self._cache.gather(host_tensor(slot[self._cache.rank]), part)
        return self._cache.nbytes(part)

    def from_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        """Fill the blocks of `part`; returns their bytes. The copy is complete after `finish`."""
        self._cache.scatter(host_tensor(slot[self._cache.rank]), part)
        return self._cache.nbytes(part)

    def finish(self) -> None:
        """Wait until all copies of this thread are complete. The slots that they read may be released afterwards."""

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function that another thread calls before it reads
        the results of the step, or writes blocks that this or an earlier step uses."""
        return self.finish

    def mark(self) -> Any:
        """A timestamp on the device that computes the steps, after all work that was queued so far."""
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two timestamps; None while the device has not reached the second."""
        return float(last - first)

    def release_locks(self) -> None:
        """End the page locks of the arena, while no thread copies. Raises the errors of the device."""

    def take_locks(self) -> None:
        """Lock again what `release_locks` released."""


class DeviceCopy:
    """Copies between slots and blocks in the memory of a device; the methods are those of `HostCopy`. Several threads
    may use it; each has its own stream and buffer."""

    def __init__(self, cache: Cache, device: Device) -> None:
        self._cache = cache
        self._device = device
        self._staging = Staging(device, (cache.shard_bytes,), torch.uint8)

    def to_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        """See `HostCopy`."""
        shard = slot[self._cache.rank][: self._cache.used(part)]
        with self._staging.work() as (stream, buffer):
            stream.run(lambda: self._cache.gather(buffer, part))
            self._staging.to_host(shard, buffer[: len(shard)])
        self._staging.finish()
        return self._cache.nbytes(part)

    def from_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        """See `HostCopy`."""
        shard = slot[self._cache.rank][: self._cache.used(part)]
        with self._staging.work() as (stream, buffer):
            self._staging.to_device(buffer[: len(shard)], shard)
            stream.run(lambda: self._cache.scatter(buffer, part))
        return self._cache.nbytes(part)

    def finish(self) -> None:
        """See `HostCopy`."""
        self._staging.finish()

    def computed(self) -> Callable[[], None]:
        """See `HostCopy`."""
        return self._staging.computed()

    def mark(self) -> Any:
        """See `HostCopy`."""
        return self._device.mark()

    def between(self, first: Any, last: Any) -> float | None:
        """See `HostCopy`."""
        return self._device.between(first, last)

    def release_locks(self) -> None:
        """See `HostCopy`."""
        self._staging.release_locks()

    def take_locks(self) -> None:
        """See `HostCopy`."""
        self._staging.take_locks()


Copy = HostCopy | DeviceCopy


def copy_for(cache: Cache, devices: set[Any]) -> Copy:
    """The copies of a cache whose tensors lie on `devices`. Raises `LayoutRefused` unless that is one CPU or GPU."""
    device = next(iter(devices))
    if len(devices) == 1 and device.type == "cpu":
        return HostCopy(cache)
    if len(devices) == 1 and device.type == "cuda":
        return DeviceCopy(cache, CudaDevice(device))
    raise LayoutRefused(f"the cache is on {', '.join(sorted(map(str, devices)))}; supported: one cpu or cuda device")
