"""The daemon's memory as this process sees it: one read-only mapping per region, one writable where it writes."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenlake.store.region import GENERATION_BYTES, RegionShape
from tokenlake.wire.slots import SlotRef

__all__ = ["Mapping", "Regions"]

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Not named by Python 3.11."""


class Mapping:
    """One mapping of one region; unmapped when the last array over it is gone."""

    def __init__(self, descriptor: int, region_bytes: int, slot_bytes: int, *, write: bool) -> None:
        """Takes `descriptor` over."""
        self.shape = RegionShape(region_bytes, slot_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        try:
            self._map = mmap.mmap(descriptor, region_bytes, mmap.MAP_SHARED, protection)
        finally:
            os.close(descriptor)
        # A forked child would keep the memory after its parent, which the daemon watches, is dead.
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):
            # Page tables now, not at the first read of each page; kernels before 5.14 do not know it.
            self._map.madvise(MADV_POPULATE_WRITE if write else MADV_POPULATE_READ)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._generations = self.bytes[: self.shape.slots * GENERATION_BYTES].view(np.uint64)

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot, shape [slot_bytes]; no copy."""
        start = self.shape.offset(slot)
        return self.bytes[start : start + self.shape.slot_bytes]

    def generation(self, slot: int) -> int:
        """Which use of the slot is current."""
        return int(self._generations[slot])


class Regions:
    """Mappings by region, made when first needed. `open_region(number, write)` asks the daemon."""

    def __init__(self, open_region: Callable[[int, bool], Mapping]) -> None:
        self._open = open_region
        self._mapped: dict[tuple[int, bool], Mapping] = {}

    def get(self, place: SlotRef, *, write: bool = False) -> Mapping:
        """The mapping that `place` lies in. Raises what asking the daemon raises."""
        mapping = self._mapped.get((place.region, write))
        if mapping is None:
            mapping = self._mapped[place.region, write] = self._open(place.region, write)
        return mapping


def address_interface(address: int, nbytes: int) -> dict[str, object]:
    """`__array_interface__` of read-only bytes at an address of this process."""
    return {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, True)}
