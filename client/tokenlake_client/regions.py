"""The daemon's memory as this process maps it: one read-only mapping per region, and a writable one where it writes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenlake.store.region import GENERATION_BYTES, RegionShape
from tokenlake_client.mapped_memory import MappedMemory

__all__ = ["Mapping", "Regions", "Window"]

IDLE_S = 60.0
"""A mapping that was not used for this long is dropped when another one is made. To map 64 MiB again takes some
milliseconds."""


class Mapping:
    """One mapping of one region. It is unmapped with the last array over it."""

    def __init__(self, descriptor: int, region_bytes: int, slot_bytes: int, *, write: bool) -> None:
        """Takes over `descriptor`. Raises `OSError`, `OverflowError` or `ValueError` where it cannot be mapped."""
        self.shape = RegionShape(region_bytes, slot_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        try:
            self.memory = MappedMemory(mmap.mmap(descriptor, region_bytes, mmap.MAP_SHARED, protection), write=write)
        finally:
            os.close(descriptor)
        self.memory.populate()
        whole: NDArray[np.uint8] = np.asarray(self.memory)
        shape = self.shape
        rows = whole[shape.header_bytes : shape.header_bytes + shape.slots * shape.stride]
        self.slots = rows.reshape(shape.slots, shape.stride)[:, :slot_bytes]
        """The bytes of each slot, shape [slots, slot_bytes]; no copy."""
        interface = self.slots.__array_interface__
        self.read_only = interface | {"data": (interface["data"][0], True)}
        """`__array_interface__` of `slots`, read-only."""
        self.generations = whole[: shape.slots * GENERATION_BYTES].view(np.uint64)
        """The generation of each slot, shape [slots]: the daemon changes it when the slot gets another segment."""


class Window:
    """The base of a read-only array over all slots of a mapping, shape [slots, slot_bytes], and of every view of it. It
    keeps `owner` and the mapping while any view lives. A finaliser of the array itself would run while views of it
    live."""

    __slots__ = ("__array_interface__", "_owner", "memory")

    def __init__(self, mapping: Mapping, owner: object) -> None:
        self.__array_interface__ = mapping.read_only
        self.memory = mapping.memory
        self._owner = owner


class Regions:
    """Mappings by region, made when first needed and dropped when not used for `IDLE_S`. A region that gets another
    tenant has another number, and the kernel frees its former memory when no process maps it. Arrays over a dropped
    mapping keep it."""

    def __init__(
        self, open_region: Callable[[int, bool], Mapping], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_region(number, write)` asks the daemon."""
        self._open = open_region
        self._clock = clock
        self._mapped: dict[tuple[int, bool], Mapping] = {}
        self._used: dict[tuple[int, bool], float] = {}

    def get(self, region: int, *, write: bool = False) -> Mapping:
        """The mapping of a region. Raises the errors of `open_region`."""
        key, now = (region, write), self._clock()
        mapping = self._mapped.get(key)
        if mapping is None:
            for idle in [other for other, used in list(self._used.items()) if now - used > IDLE_S]:
                self._mapped.pop(idle, None)
                self._used.pop(idle, None)
            mapping = self._mapped[key] = self._open(region, write)
        self._used[key] = now
        return mapping
