"""The memory of a simulated node: a slot holds eight bytes per shard, a function of tenant and key."""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

from tokenlake.identity import SegmentKey
from tokenlake.wire.slots import SlotRef

__all__ = ["HALF", "REGION_BYTES", "SHARDS", "SLOTS", "SLOT_BYTES", "Arena", "Region", "View", "content"]

SHARDS = 2
SLOT_BYTES = 64
SLOTS = 3
"""Per region."""
REGION_BYTES = 4096 + SLOTS * SLOT_BYTES
HALF = b"half way"
"""What a shard holds from the moment somebody may write it until it is written."""


@functools.cache
def content(tenant: str, key: SegmentKey) -> tuple[bytes, ...]:
    """The bytes of a segment, by shard. They serve as their own checksums."""
    return tuple(hashlib.blake2b(f"{tenant}/{s}".encode() + key, digest_size=8).digest() for s in range(SHARDS))


class Region:
    """Memory that lives as long as somebody maps it, whatever becomes of the daemon."""

    def __init__(self) -> None:
        self.shards = [[bytes(8)] * SHARDS for _ in range(SLOTS)]
        self.generations = [0] * SLOTS


class Arena:
    """The regions of one life of a daemon."""

    def __init__(self, regions: int) -> None:
        self.regions = {region: Region() for region in range(regions)}

    def stamp(self, places: list[SlotRef]) -> None:
        """These slots have new owners."""
        for place in places:
            self.regions[place.region].generations[place.slot] = place.generation

    def add(self, region: int) -> None:
        """Fresh memory in place of another region; who maps the former keeps it."""
        self.regions[region] = Region()

    def read(self, place: SlotRef, shard: int) -> bytes:
        """A shard's bytes as they are now."""
        return self.regions[place.region].shards[place.slot][shard]

    def write(self, place: SlotRef, shard: int, value: bytes) -> None:
        """Whoever owns the slot by now: a thread that was told a slot writes there."""
        self.regions[place.region].shards[place.slot][shard] = value


class View(NamedTuple):
    """A process's pointer to a slot."""

    region: Region
    place: SlotRef
    expected: tuple[bytes, ...]

    @property
    def reissued(self) -> bool:
        """Somebody else owns the slot by now."""
        return self.region.generations[self.place.slot] != self.place.generation

    @property
    def right(self) -> bool:
        """The bytes are those of the segment."""
        return tuple(self.region.shards[self.place.slot]) == self.expected

    def write(self, shard: int, value: bytes) -> None:
        """As the engine does, straight into memory."""
        self.region.shards[self.place.slot][shard] = value
