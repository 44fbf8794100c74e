"""The driver of a device that computes and has memory of its own, which the host cannot access.

::

    engine's stream   | forward ... |e|                       e: `computed`, the point behind the forward pass
    stream            wait e | run: gather | to_host: over the bus | <- `synchronize` returns

`cuda.CudaDevice` is the implementation for GPUs; `tokenlake_testing.cpu_device.CpuDevice` the one that tests use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class DeviceFailed(RuntimeError):
    """A call of the device's driver failed; the message has the call and the driver's name of the error."""


class Stream(Protocol):
    """Operations on a device, which are executed one after the other in the order in which they were queued. A stream
    belongs to one thread.

    An operation may fail when it is queued or later. A later failure is raised by the next `synchronize`, and by all
    operations after it. The contents of the memory that failed operations write are undefined.
    """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor in the memory of the device, with any contents, for operations of this stream alone."""
        ...

    def run(self, kernels: Callable[[], None]) -> None:
        """Queue the operations on tensors of the device that `kernels` calls. They may use no memory of the host."""
        ...

    def to_device(self, target: Any, source: NDArray[np.uint8]) -> None:
        """Queue a copy of `source`, contiguous host memory, into `target`, a contiguous tensor of the device with as
        many bytes. The caller leaves both as they are until `synchronize` has returned or raised."""
        ...

    def to_host(self, target: NDArray[np.uint8], source: Any) -> None:
        """Queue a copy of `source` into `target`; otherwise as `to_device`."""
        ...

    def wait(self, point: Any) -> None:
        """Let later operations begin after `point`, which `Device.computed` returned in any thread."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued operations have ended; none of them accesses memory any more, also where this
        raises."""
        ...


class DeviceMemory(Protocol):
    """Memory of a device that several processes of the node may map."""

    @property
    def tensor(self) -> Any:
        """The memory, as a tensor uint8 [bytes]. Valid until `close`."""
        ...

    def handle(self) -> bytes:
        """The name under which another process opens the memory (`Device.open`). Only where it was allocated."""
        ...

    def close(self) -> None:
        """Free the memory, or unmap it where it was opened. The process that allocated it closes it last, and each
        process after its operations on it have ended. Idempotent."""
        ...


class Device(Protocol):
    """One device, for all threads of this process."""

    @property
    def place(self) -> str:
        """The name of the memory's place (`tokenlake.where`)."""
        ...

    def stream(self) -> Stream:
        """A new stream, for this thread."""
        ...

    def computed(self) -> Any:
        """The point in the stream of the engine behind the operations that it has queued so far. To be called in the
        engine's thread."""
        ...

    def mark(self) -> Any:
        """Returns a mark as `computed` does, which also records the time at which the device reaches it."""
        ...

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds between two points that `mark` returned; None while the device has not reached the second."""
        ...

    def lock(self, address: int, nbytes: int, *, write: bool) -> Callable[[], None] | None:
        """Lock mapped memory of the host, so that copies need no staging memory. `write`: it is mapped writable.
        Returns the function that ends the lock, for any thread; None where the memory cannot be locked: copies are
        slower then. The lock ends before the memory is unmapped (`tokenlake_client.mapped_memory`)."""
        ...

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate memory that other processes can open. Raises `DeviceFailed`."""
        ...

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """Map memory that another process of the node allocated, of which `handle` is the name and `nbytes` the size.
        Raises `DeviceFailed`."""
        ...
