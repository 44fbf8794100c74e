"""The daemon's memory as this process sees it: one read-only mapping per region, one writable where it writes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenlake.store.region import GENERATION_BYTES, RegionShape
from tokenlake_client.pages import Pages

__all__ = ["Mapping", "Regions", "Window"]

IDLE_S = 60.0
"""A mapping that was not used for so long goes when another is made; made again, 64 MiB take some milliseconds."""


class Mapping:
    """One mapping of one region; unmapped when the last array over it is gone."""

    def __init__(self, descriptor: int, region_bytes: int, slot_bytes: int, *, write: bool) -> None:
        """Takes `descriptor` over."""
        self.shape = RegionShape(region_bytes, slot_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        try:
            self.pages = Pages(mmap.mmap(descriptor, region_bytes, mmap.MAP_SHARED, protection), write=write)
        finally:
            os.close(descriptor)
        self.pages.populate()
        whole: NDArray[np.uint8] = np.asarray(self.pages)
        shape = self.shape
        rows = whole[shape.header_bytes : shape.header_bytes + shape.slots * shape.stride]
        self.slots = rows.reshape(shape.slots, shape.stride)[:, :slot_bytes]
        """The bytes of each slot, shape [slots, slot_bytes]; no copy."""
        interface = self.slots.__array_interface__
        self.read_only = interface | {"data": (interface["data"][0], True)}
        """`__array_interface__` of `slots` as others may have them."""
        self.generations = whole[: shape.slots * GENERATION_BYTES].view(np.uint64)
        """Which use of each slot is current, shape [slots]."""


class Window:
    """The base of a read-only array over all slots of a mapping, shape [slots, slot_bytes], and of every view of that.
    Keeps `owner` and the mapping for as long as any of them lives; a finaliser on the array itself would fire while
    views of it live."""

    __slots__ = ("__array_interface__", "_owner", "pages")

    def __init__(self, mapping: Mapping, owner: object) -> None:
        self.__array_interface__ = mapping.read_only
        self.pages = mapping.pages
        self._owner = owner


class Regions:
    """Mappings by region, made when first needed, and forgotten when they were not used for `IDLE_S`: a region that
    changed its tenant comes under another number, and its memory is given back when nobody maps it any more. Arrays
    that still lie in one keep it. `open_region(number, write)` asks the daemon."""

    def __init__(
        self, open_region: Callable[[int, bool], Mapping], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = open_region
        self._clock = clock
        self._mapped: dict[tuple[int, bool], Mapping] = {}
        self._used: dict[tuple[int, bool], float] = {}

    def get(self, region: int, *, write: bool = False) -> Mapping:
        """The mapping of a region. Raises what asking the daemon raises."""
        key, now = (region, write), self._clock()
        mapping = self._mapped.get(key)
        if mapping is None:
            for idle in [other for other, used in list(self._used.items()) if now - used > IDLE_S]:
                self._mapped.pop(idle, None)
                self._used.pop(idle, None)
            mapping = self._mapped[key] = self._open(region, write)
        self._used[key] = now
        return mapping
