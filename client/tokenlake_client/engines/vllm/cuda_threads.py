"""CUDA in the background threads that copy between slots of the arena and GPU memory.

Each thread has a CUDA stream and a buffer on the GPU. The mapping of the arena is page-locked, so that copies need
neither staging memory nor a CPU. A page lock belongs to one mapping and ends before the memory is unmapped
(`tokenlake_client.mapped_memory`).

::

    step's stream    | forward ... |e|                       e: event, the blocks hold what was computed
    thread's stream                  wait e | gather | copy to the slot | the thread waits for this point
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.mapped_memory import mapped_memory_of

__all__ = ["CudaThreads"]

READ_ONLY = 8
"""CUDA's flag cudaHostRegisterReadOnly, which page-locks a read-only mapping; CUDA cannot lock such a mapping for
writing."""
PORTABLE = 1


class CudaThreads:
    """The CUDA stream and the GPU buffer of each thread. Several threads may use it."""

    def __init__(self, device: Any, shape: tuple[int, ...], dtype: Any) -> None:
        """`shape`, `dtype`: of the buffer of each thread."""
        self._device = device
        self._shape = shape
        self._dtype = dtype
        self._local = threading.local()

    @contextlib.contextmanager
    def work(self) -> Iterator[Any]:
        """Context in which operations are queued on this thread's stream; yields this thread's buffer. The operations
        are complete after `finish`."""
        # The call of `_stream` comes first, because it sets the CUDA device of this thread.
        with torch.cuda.stream(self._stream()):
            yield self._local.buffer

    def finish(self) -> None:
        """Wait until all operations that this thread queued are complete."""
        self._stream().synchronize()

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function by which another thread lets its stream
        wait for the results of the step."""
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._stream().wait_event(event)

    def locked(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns `array`, an array over the arena, after page-locking the mapping in which it lies. If the lock fails,
        copies go through the driver's staging memory and are slower. Only within `work`."""
        pages = mapped_memory_of(array)
        if pages is not None:
            pages.register("cuda", partial(_lock, self._device))
        return array

    def _stream(self) -> Any:
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
            self._local.buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._local.stream


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
