"""A GPU as a `Device`: torch's streams and events, and `cuda_driver` for page locks and memory of several processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.common.slots import host_tensor
from tokenlake_client.engines.devices.base import DeviceFailed, DeviceMemory, Stream
from tokenlake_client.engines.devices.cuda_driver import CudaDriver

log = logging.getLogger(__name__)


class _CudaStream:
    """See `Stream`. An operation that fails on the GPU ends the context of this process there: the next call of torch
    that asks for errors raises, and all calls after it do."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # torch's pool gives streams with cudaStreamNonBlocking, which do not wait for the default stream.
        self._stream = torch.cuda.Stream(device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """torch's allocator gives the memory that tensors of a stream have freed to other tensors of this stream while
        operations on it are queued. So the tensor is allocated with this stream as the current one: memory of the
        engine's stream might still be in use there."""
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def run(self, kernels: Callable[[], None]) -> None:
        """torch's context makes the stream and its GPU current in this thread: kernels are launched there, and memory
        that they allocate belongs to the stream (see `empty`)."""
        with torch.cuda.stream(self._stream):
            kernels()

    def to_device(self, target: Any, source: NDArray[np.uint8]) -> None:
        """cudaMemcpyAsync between contiguous memory of equal size, on this stream: one copy, without a temporary. From
        memory that is not page-locked it may return before or after the copy."""
        with torch.cuda.stream(self._stream):
            _flat(target).copy_(host_tensor(source), non_blocking=True)

    def to_host(self, target: NDArray[np.uint8], source: Any) -> None:
        """See `to_device`. A copy into memory that is not page-locked is complete on return."""
        with torch.cuda.stream(self._stream):
            host_tensor(target).copy_(_flat(source), non_blocking=True)

    def wait(self, point: Any) -> None:
        """cudaStreamWaitEvent: the event was recorded before, in the thread that called `computed`; one that was not
        recorded would not be waited for."""
        self._stream.wait_event(point)

    def synchronize(self) -> None:
        """cudaStreamSynchronize. Where it raises, the context is lost, and none of its operations runs any more."""
        self._stream.synchronize()


class _CudaMemory:
    def __init__(
        self,
        device: Any,
        address: int,
        nbytes: int,
        end: Callable[[int], None],
        handle: Callable[[int], bytes] | None = None,
    ) -> None:
        self._address = address
        self._end: Callable[[int], None] | None = end
        self._handle = handle
        self._tensor = torch.as_tensor(_Interface(address, nbytes), device=device)

    @property
    def tensor(self) -> Any:
        return self._tensor

    def handle(self) -> bytes:
        if self._handle is None or self._end is None:
            raise DeviceFailed("only the process that allocated memory has its handle, until it closes it")
        return self._handle(self._address)

    def close(self) -> None:
        end, self._end, self._tensor = self._end, None, None
        if end is not None:
            end(self._address)


class _Interface:
    """Memory of a GPU for `torch.as_tensor`, which neither copies nor frees it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 2,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


class CudaDevice:
    """A GPU. See `Device`."""

    def __init__(self, device: Any) -> None:
        """`device`: of a tensor on the GPU, with its number."""
        self._device = torch.device(device)
        self.place = f"cuda:{self._device.index}"
        self._driver: CudaDriver | None = None
        self._told: set[str] = set()
        """The reasons in the log for which memory was not locked."""

    @property
    def driver(self) -> CudaDriver:
        """The GPU in the driver API. Raises `DeviceFailed` where libcuda cannot be used."""
        if self._driver is None:
            self._driver = CudaDriver(self._device.index)
        return self._driver

    def stream(self) -> Stream:
        return _CudaStream(self._device)

    def computed(self) -> Any:
        """See `Device`: cudaEventRecord in the current stream of this thread."""
        return torch.cuda.current_stream(self._device).record_event()

    def mark(self) -> Any:
        """See `Device`. cudaEventElapsedTime requires events that record times, which torch's default ones do not."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def between(self, first: Any, last: Any) -> float | None:
        """See `Device`. cudaEventElapsedTime requires that both events have been reached: they are of one stream, and
        the second is asked."""
        return float(first.elapsed_time(last)) / 1e3 if last.query() else None

    def lock(self, address: int, nbytes: int, *, write: bool) -> Callable[[], None] | None:
        try:
            self.driver.lock(address, nbytes, write=write)
        except DeviceFailed as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                log.warning("memory of the pool is not page-locked for %s; copies are slower: %s", self.place, error)
            return None
        return partial(self.driver.unlock, address)

    def allocate(self, nbytes: int) -> DeviceMemory:
        driver = self.driver
        return _CudaMemory(self._device, driver.allocate(nbytes), nbytes, driver.free, driver.handle)

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        return _CudaMemory(self._device, self.driver.open(handle), nbytes, self.driver.close)


def _flat(tensor: Any) -> Any:
    return tensor.view(-1).view(torch.uint8)
