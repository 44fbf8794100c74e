"""Copies between slots of the arena and a device: a stream and a buffer for each thread that copies."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake_client.engines.devices.base import Device, Stream
from tokenlake_client.mapped_memory import MappedMemory, mapped_memory_of


class Staging:
    """The stream and the buffer of each thread that copies. Several threads may use it.

    The mapping of the arena is locked for the device when a thread first copies from or to it, so that the copies need
    neither staging memory of the host nor a processor.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: Any) -> None:
        """`shape`, `dtype`: of the buffer of each thread, in the device's memory."""
        self._device = device
        self._shape = shape
        self._dtype = dtype
        self._local = threading.local()
        self._guard = threading.Lock()
        """Guards the field below."""
        self._locked: weakref.WeakSet[MappedMemory] = weakref.WeakSet()
        """The mappings that copies have used."""

    @contextlib.contextmanager
    def work(self) -> Iterator[tuple[Stream, Any]]:
        """Context in which operations are queued on this thread's stream; yields the stream and this thread's buffer.
        The operations are complete after `finish`. Where the context raises, they have ended: the caller may give away
        what they read and write."""
        stream = self._stream()
        try:
            yield stream, self._local.buffer
        except BaseException:
            with contextlib.suppress(Exception):
                stream.synchronize()
            raise

    def to_device(self, target: Any, source: NDArray[np.uint8]) -> None:
        """Queue a copy from a slot; within `work`. See `Stream.to_device`."""
        self._lock(source)
        self._stream().to_device(target, source)

    def to_host(self, target: NDArray[np.uint8], source: Any) -> None:
        """Queue a copy to a slot; within `work`. See `Stream.to_host`."""
        self._lock(target)
        self._stream().to_host(target, source)

    def finish(self) -> None:
        """Wait until all operations that this thread queued are complete. Raises the error of one that failed."""
        self._stream().synchronize()

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function by which another thread lets its stream
        wait for the operations of all steps so far."""
        point = self._device.computed()
        return lambda: self._stream().wait(point)

    def release_locks(self) -> None:
        """End the page locks of the device, while no thread copies. Raises the errors of the device."""
        for memory in self._memories():
            memory.unregister(self._device.place)

    def take_locks(self) -> None:
        """Lock the mappings again that `release_locks` released, before the first copy would."""
        for memory in self._memories():
            self._register(memory)

    def _memories(self) -> list[MappedMemory]:
        with self._guard:
            return list(self._locked)

    def _lock(self, array: NDArray[np.uint8]) -> None:
        memory = mapped_memory_of(array)
        if memory is not None:
            with self._guard:
                self._locked.add(memory)
            self._register(memory)

    def _register(self, memory: MappedMemory) -> None:
        memory.register(self._device.place, partial(self._device.lock, write=memory.write))

    def _stream(self) -> Stream:
        if not hasattr(self._local, "stream"):
            stream = self._device.stream()
            self._local.buffer = stream.empty(self._shape, self._dtype)
            self._local.stream = stream
        own: Stream = self._local.stream
        return own
