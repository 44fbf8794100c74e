"""A device for machines without one: `Device` in memory of the host that the host cannot access.

::

    host thread     | run, to_host, ... queue an operation |         synchronize waits |
    stream's thread            | wait | gather | copy |    each operation runs here, later

The tensors of the device (`DeviceTensor`) may be viewed anywhere, as those of a GPU; their contents may be used by
operations of a stream alone. Copies to and from the host's memory are explicit. A test can hold the device, and make
operations fail as those of a GPU do.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.devices.base import DeviceFailed, DeviceMemory
from tokenlake_testing.pinned_memory import PinnedMemory

_VIEWS = frozenset(
    (
        *("as_strided", "chunk", "expand", "flatten", "narrow", "permute", "reshape", "select", "split", "squeeze"),
        *("t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "__getitem__", "detach"),
        *("data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "storage_offset", "stride"),
        *("untyped_storage", "as_subclass", "__get__", "__len__"),
    )
)
"""The functions of torch that view a tensor, or tell its shape, and do not use its contents."""
_thread = threading.local()
"""`running`: True in a thread while it executes an operation of a stream."""


class DeviceTensor(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A tensor in the memory of a `CpuDevice`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse operations on the contents outside of a stream, and copies from the host's memory in `run`."""
        name = getattr(func, "__name__", "")
        running = getattr(_thread, "running", False)
        if name not in _VIEWS and not running:
            raise DeviceFailed(f"{name}: the host cannot access the memory of the device")
        if name == "copy_" and not all(isinstance(each, DeviceTensor) for each in args[:2]):
            raise DeviceFailed("copy_: a kernel accesses memory of the host")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Point(NamedTuple):
    """A point in a stream, which is reached when `reached` is set; `at` then has the time."""

    reached: threading.Event
    at: list[float]


class CpuStream:
    """A stream, whose operations a thread of its own executes. See `Stream`."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._execute, name="tokenlake-device", daemon=True).start()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """See `Stream`. The contents are not zero."""
        count = int(np.prod(shape, dtype=np.int64)) * torch.empty((), dtype=dtype).element_size()
        return self._device.tensor(torch.full((count,), 0xA5, dtype=torch.uint8).view(dtype).view(shape))

    def run(self, kernels: Callable[[], None]) -> None:
        self._queued("run", kernels)

    def to_device(self, target: Any, source: NDArray[np.uint8]) -> None:
        _check_sizes(target, source)
        self._queued("to_device", lambda: _bytes_of(target).copy_(torch.from_numpy(self._reached(source).copy())))

    def to_host(self, target: NDArray[np.uint8], source: Any) -> None:
        _check_sizes(source, target)
        self._queued("to_host", lambda: np.copyto(self._reached(target), _bytes_of(source).numpy()))

    def wait(self, point: Any) -> None:
        self._queue.put(point.reached.wait)

    def point(self) -> Any:
        """The point behind the operations that were queued so far."""
        point = _Point(threading.Event(), [])

        def reach() -> None:
            point.at.append(time.perf_counter())
            point.reached.set()

        self._queue.put(reach)
        return point

    def synchronize(self) -> None:
        """See `Stream`. As with CUDA, an error of an operation of any stream is raised, now and later."""
        self.point().reached.wait()
        self._device.check()

    def _reached(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self._device.locks.reached(array)

    def _queued(self, name: str, operation: Callable[[], object]) -> None:
        self._device.check()
        self._device.attempt(f"queue {name}")

        def execute() -> None:
            self._device.held.wait()
            if self._device.error is not None:
                return
            try:
                self._device.attempt(name)
                operation()
            except Exception as error:
                self._device.error = error

        self._queue.put(execute)

    def _execute(self) -> None:
        while True:
            operation = self._queue.get()
            _thread.running = True
            try:
                operation()
            finally:
                _thread.running = False
            # The operation refers to arrays, which must not live until the next one.
            del operation


class _Memory:
    """Memory that other processes can open: a file without a name, which the handle names by process and descriptor."""

    def __init__(self, device: CpuDevice, descriptor: int, nbytes: int, *, owned: bool) -> None:
        self._descriptor = descriptor
        self._owned = owned
        self._closed = False
        self._tensor: Any = device.tensor(torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8))

    @property
    def tensor(self) -> Any:
        return self._tensor

    def handle(self) -> bytes:
        if not self._owned or self._closed:
            raise DeviceFailed("only the process that allocated memory has its handle, until it closes it")
        return f"{os.getpid()}:{self._descriptor}".encode()

    def close(self) -> None:
        if not self._closed:
            self._closed, self._tensor = True, None
            os.close(self._descriptor)


class CpuDevice:
    """See `Device`. `engine` is the stream of the engine."""

    def __init__(self, place: str = "cuda:0") -> None:
        self.place = place
        self.locks = PinnedMemory()
        self.engine = CpuStream(self)
        self.held = threading.Event()
        """Set while the device executes operations; a test clears it."""
        self.held.set()
        self.error: Exception | None = None
        """The error of an operation; no later operation is executed."""
        self._failing: dict[str, int] = {}

    def fail(self, name: str, after: int = 0) -> None:
        """Let the call or operation `name` fail once, after `after` successes: `run`, `to_host`, `to_device` when it is
        executed, `queue run` and so on when it is queued, `lock`, `allocate`, `open`."""
        self._failing[name] = after

    def attempt(self, name: str) -> None:
        """Raises DeviceFailed where a test asked for it."""
        left = self._failing.get(name)
        if left is not None:
            self._failing[name] = left - 1
            if not left:
                del self._failing[name]
                raise DeviceFailed(f"{name}: failed, as the test asked")

    def check(self) -> None:
        """Raises DeviceFailed after an operation has failed."""
        if self.error is not None:
            raise DeviceFailed(str(self.error)) from self.error

    def tensor(self, memory: Any) -> Any:
        """`memory`, a tensor of the host, as memory of the device, which the caller gives up."""
        return memory.as_subclass(DeviceTensor)

    def stream(self) -> CpuStream:
        return CpuStream(self)

    def computed(self) -> Any:
        return self.engine.point()

    def mark(self) -> Any:
        return self.engine.point()

    def between(self, first: Any, last: Any) -> float | None:
        return float(last.at[0] - first.at[0]) if last.reached.is_set() else None

    def lock(self, address: int, nbytes: int, *, write: bool) -> Callable[[], None] | None:
        try:
            self.attempt("lock")
        except DeviceFailed:
            return None
        locks = self.locks
        return (lambda: locks.unpin(address)) if locks.pin(address, nbytes, write=write) else None

    def allocate(self, nbytes: int) -> DeviceMemory:
        self.attempt("allocate")
        descriptor = os.memfd_create("device")
        os.ftruncate(descriptor, nbytes)
        return _Memory(self, descriptor, nbytes, owned=True)

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """See `Device`. As with CUDA, the process that allocated the memory cannot open it."""
        self.attempt("open")
        process, _, number = handle.decode().partition(":")
        if int(process) == os.getpid():
            raise DeviceFailed("open: the memory belongs to this process")
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise DeviceFailed(f"open: {error}") from error
        if os.fstat(descriptor).st_size < nbytes:
            os.close(descriptor)
            raise DeviceFailed("open: the memory is smaller")
        return _Memory(self, descriptor, nbytes, owned=False)


def _bytes_of(tensor: Any) -> Any:
    """The bytes of a contiguous tensor of the device, for an operation."""
    return tensor.as_subclass(torch.Tensor).view(-1).view(torch.uint8)


def _check_sizes(tensor: Any, array: NDArray[np.uint8]) -> None:
    if not isinstance(tensor, DeviceTensor) or not tensor.is_contiguous():
        raise DeviceFailed("expected a contiguous tensor of the device")
    if not array.flags.c_contiguous or array.nbytes != tensor.numel() * tensor.element_size():
        raise DeviceFailed("expected contiguous memory of equal size")
