"""The shape of a region: how many slots it has, and where they lie. Client and daemon compute it from the same two
numbers.

::

    0                    header_bytes                          file_bytes
    | generation x slots | slot 0 | slot 1 | ... | slot n-1 |
                         <----------- region_bytes --------->

The header is not counted as memory of the region: a slot of a usual model is a power of two, or a multiple of one, and
a header inside would cost a whole slot of each region.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

GENERATION_BYTES = 8
"""Bytes of a slot's generation in the header of a region, a uint64 that the daemon writes. A client that copies a slot
reads it to check that the slot did not get another segment meanwhile."""
MAX_SLOTS, BYTES_PER_SLOT = 16384, 4096
"""A region has at most `MAX_SLOTS` slots, or one per `BYTES_PER_SLOT` if that is more: for each slot, free or not, the
daemon keeps some 120 bytes, which it allocates for a whole region at once."""
PAGE = 4096
"""Bytes of a page: memory is counted in whole ones."""
_CACHE_LINE = 64


class RegionShape(NamedTuple):
    """A region with `region_bytes` for slots of `slot_bytes`."""

    region_bytes: int
    slot_bytes: int

    @property
    def stride(self) -> int:
        """Distance between slots."""
        return stride_of(self.slot_bytes)

    @property
    def slots(self) -> int:
        """Number of slots of the region; may be 0."""
        return _slots(self)

    @property
    def header_bytes(self) -> int:
        """Bytes of the table of generations at the beginning of the region, rounded up to a page."""
        return _up(self.slots * GENERATION_BYTES, PAGE)

    @property
    def file_bytes(self) -> int:
        """Bytes of the region's file that hold the header and the slots."""
        return self.header_bytes + self.region_bytes

    def offset(self, slot: int) -> int:
        """Returns the offset in bytes of `slot` in the region."""
        return self.header_bytes + slot * self.stride

    def fitted(self) -> int:
        """Returns the bytes of the slots alone, in whole pages: the least memory that has as many slots."""
        return min(self.region_bytes, _up(self.slots * self.stride, PAGE))


def stride_of(slot_bytes: int) -> int:
    """Returns the memory that a slot takes: its bytes rounded up to a cache line."""
    return _up(slot_bytes, _CACHE_LINE)


def header_room(region_bytes: int) -> int:
    """Returns the greatest `header_bytes` that a region of so many bytes may need, whatever the size of its slots."""
    return _up(_most_slots(region_bytes) * GENERATION_BYTES, PAGE)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _most_slots(region_bytes: int) -> int:
    return min(region_bytes // _CACHE_LINE, max(MAX_SLOTS, region_bytes // BYTES_PER_SLOT))


@functools.lru_cache(maxsize=64)
def _slots(shape: RegionShape) -> int:
    # The number of slots is cached, because each offset of a slot depends on it, and a node has few shapes of regions.
    return min(shape.region_bytes // shape.stride, _most_slots(shape.region_bytes))
