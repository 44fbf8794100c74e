"""The daemon's memory as this process maps it: one read-only mapping per region that it reads, and a writable one per
region that it writes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tokenlake.memory.region import GENERATION_BYTES, RegionShape
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_client.process_lock import ProcessLock

IDLE_S = 60.0
"""Seconds: a mapping of a region that was not used for this long is dropped when another mapping is made. Mapping the
region again when it is needed takes some milliseconds per 64 MiB."""


class Mapping:
    """This process's mapping of one region of the daemon's arena. The memory is unmapped when this object and the last
    array over it are gone."""

    def __init__(
        self,
        descriptor: int,
        region_bytes: int,
        slot_bytes: int,
        *,
        write: bool,
        lock: ProcessLock | None = None,
    ) -> None:
        """`descriptor`: the region's file descriptor, which the mapping owns from now on. `lock`: see
        `MappedMemory`. Raises `OSError`, `OverflowError` or `ValueError` where the region cannot be mapped."""
        self.shape = RegionShape(region_bytes, slot_bytes)
        try:
            self.memory = MappedMemory(descriptor, self.shape.file_bytes, write=write, lock=lock)
        finally:
            os.close(descriptor)
        self.memory.populate()
        whole: NDArray[np.uint8] = np.asarray(self.memory)
        shape = self.shape
        rows = whole[shape.header_bytes : shape.header_bytes + shape.slots * shape.stride]
        self.slots = rows.reshape(shape.slots, shape.stride)[:, :slot_bytes]
        """The bytes of each slot of the region, shape [slots, slot_bytes]; an array over the mapping, not a copy."""
        interface = self.slots.__array_interface__
        self.read_only = interface | {"data": (interface["data"][0], True)}
        """The `__array_interface__` of `slots`, changed to read-only."""
        self.generations = whole[: shape.slots * GENERATION_BYTES].view(np.uint64)
        """The generation of each slot of the region, shape [slots]: the daemon changes it when the slot gets another
        segment."""


class Window:
    """The base object of a read-only array over all slots of a mapping, shape [slots, slot_bytes], and of every view of
    that array: `owner` and the mapping live as long as any of these views. `owner` cannot be tied to the array itself,
    which may be collected while views of it live."""

    __slots__ = ("__array_interface__", "_owner", "memory")

    def __init__(self, mapping: Mapping, owner: object, slots: Callable[[], Iterable[int]]) -> None:
        """`slots`: returns the slots of which the caller makes views. Raises `Unreachable` for a mapping of a daemon
        that has ended."""
        shape = mapping.shape

        def spans() -> list[tuple[int, int]]:
            starts = [shape.offset(slot) for slot in slots()]
            return [(start, start + shape.slot_bytes) for start in starts]

        self.__array_interface__ = mapping.read_only
        self.memory = mapping.memory
        self._owner = owner
        self.memory.cover(id(self), spans)

    def __del__(self) -> None:
        self.memory.uncover(id(self))


class Regions:
    """The mappings of the daemon's regions by number. Each is made when it is first needed, and dropped when the daemon
    has closed the region, or when it was not used for `IDLE_S`. A dropped mapping lives on while arrays over it
    live."""

    def __init__(
        self, open_region: Callable[[int, bool], Mapping], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_region(number, write)` asks the daemon for the region and maps it."""
        self._open = open_region
        self._clock = clock
        self._mapped: dict[tuple[int, bool], Mapping] = {}
        self._used: dict[tuple[int, bool], float] = {}
        self._memories: list[weakref.ref[MappedMemory]] = []

    def memories(self) -> list[MappedMemory]:
        """The memory of each mapping that was made, also of those that were dropped, as long as arrays over it live."""
        return [memory for each in list(self._memories) if (memory := each()) is not None]

    def get(self, region: int, *, write: bool = False) -> Mapping:
        """This process's mapping of the region with that number, made where there is none. Raises the errors of
        `open_region`."""
        key, now = (region, write), self._clock()
        mapping = self._mapped.get(key)
        if mapping is None:
            for idle in [other for other, used in list(self._used.items()) if now - used > IDLE_S]:
                self._mapped.pop(idle, None)
                self._used.pop(idle, None)
            mapping = self._mapped[key] = self._open(region, write)
            self._memories.append(weakref.ref(mapping.memory, self._memories.remove))
        self._used[key] = now
        return mapping

    def take(self, earlier: Regions) -> None:
        """Take over the mappings of an earlier connection to the same memory."""
        self._mapped |= earlier._mapped
        self._used |= earlier._used
        for memory in earlier.memories():
            self._memories.append(weakref.ref(memory, self._memories.remove))

    def drop(self, region: int) -> None:
        """Drop the mappings of a region that the daemon has closed."""
        for write in (False, True):
            self._mapped.pop((region, write), None)
            self._used.pop((region, write), None)
