"""Offsets of the slots in a region. Client and daemon compute the same offsets from the same two numbers.

::

    0                    header                                   region_bytes
    | generation x slots | slot 0 | slot 1 | ... | slot n-1 | unused |
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["GENERATION_BYTES", "RegionShape"]

GENERATION_BYTES = 8
"""Bytes of a slot's generation in the header of a region, a uint64 that the daemon writes. A client that copies a slot
reads it to check that the slot did not get another segment meanwhile."""
MAX_SLOTS, BYTES_PER_SLOT = 16384, 4096
"""A region has at most `MAX_SLOTS` slots, or one per `BYTES_PER_SLOT` if that is more: for each slot, free or not, the
daemon keeps some 120 bytes, which it allocates for a whole region at once."""
_PAGE = 4096
_CACHE_LINE = 64


class RegionShape(NamedTuple):
    """A region of `region_bytes` cut in slots of `slot_bytes`."""

    region_bytes: int
    slot_bytes: int

    @property
    def stride(self) -> int:
        """Distance between slots: slot_bytes rounded up to a cache line."""
        return -(-self.slot_bytes // _CACHE_LINE) * _CACHE_LINE

    @property
    def slots(self) -> int:
        """Number of slots of the region, at most as many as fit beside the header; may be 0."""
        return _slots(self)

    @property
    def header_bytes(self) -> int:
        """Bytes of the table of generations at the beginning of the region, rounded up to a page."""
        return self._header(self.slots)

    def offset(self, slot: int) -> int:
        """Returns the offset in bytes of `slot` in the region."""
        return self.header_bytes + slot * self.stride

    @staticmethod
    def _header(slots: int) -> int:
        return -(-slots * GENERATION_BYTES // _PAGE) * _PAGE


@functools.lru_cache(maxsize=64)
def _slots(shape: RegionShape) -> int:
    # The number of slots is cached, because each offset of a slot depends on it, and a node has few shapes of regions.
    count = shape.region_bytes // (shape.stride + GENERATION_BYTES)
    count = min(count, max(MAX_SLOTS, shape.region_bytes // BYTES_PER_SLOT))
    while count and shape._header(count) + count * shape.stride > shape.region_bytes:
        count -= 1
    return count
