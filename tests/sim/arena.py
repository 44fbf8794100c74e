"""The memory of a simulated node: a slot holds eight bytes per shard, a function of tenant and key."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenlake.identity import SegmentKey
from tokenlake.wire.slots import SlotRef

SHARDS = 2
SLOT_BYTES = 64
SLOTS = 3
"""Slots per region."""
REGION_BYTES = SLOTS * SLOT_BYTES
HALF = b"half way"
"""Content of a shard from the reservation of its slot until an engine has written it."""


@functools.cache
def content(tenant: str, key: SegmentKey) -> tuple[bytes, ...]:
    """The bytes of a segment, by shard. They serve as their own checksums."""
    return tuple(hashlib.blake2b(f"{tenant}/{s}".encode() + key, digest_size=8).digest() for s in range(SHARDS))


class Region:
    """Memory that lives as long as a process maps it, even after the daemon's end."""

    def __init__(self) -> None:
        self.shards = [[bytes(8)] * SHARDS for _ in range(SLOTS)]
        self.generations = [0] * SLOTS
        self.flipped: set[SlotRef] = set()
        """Slots, each of one generation, in which a bit was flipped."""

    def end(self) -> None:
        """The pages are given back: those who map them see zeros."""
        self.shards = [[bytes(8)] * SHARDS for _ in range(SLOTS)]
        self.generations = [-1] * SLOTS


class Arena:
    """The regions of one life of a daemon."""

    def __init__(self, regions: int, kept: Mapping[int, Region] = MappingProxyType({})) -> None:
        """`kept`: the regions of the life before."""
        self.regions = {region: Region() for region in range(regions)} | dict(kept)

    def stamp(self, slots: list[SlotRef]) -> None:
        """These slots have new owners: store their generations."""
        for place in slots:
            self.regions[place.region].generations[place.slot] = place.generation

    def add(self, region: int) -> None:
        """Add fresh memory in place of another region; processes that mapped the old one keep it."""
        self.regions[region] = Region()

    def read(self, place: SlotRef, shard: int) -> bytes:
        """The present bytes of a shard."""
        return self.regions[place.region].shards[place.slot][shard]

    def flip(self, place: SlotRef, shard: int) -> None:
        """Flip a bit in memory."""
        value = self.read(place, shard)
        self.write(place, shard, bytes([value[0] ^ 1]) + value[1:])
        self.regions[place.region].flipped.add(place)

    def flipped(self, place: SlotRef) -> bool:
        """Whether a bit was flipped there since the slot was given to its present owner."""
        return place in self.regions[place.region].flipped

    def write(self, place: SlotRef, shard: int, value: bytes) -> None:
        """Write into the slot even if it has another owner by now, as a thread does that was given the slot earlier."""
        self.regions[place.region].shards[place.slot][shard] = value


class View(NamedTuple):
    """A process's pointer to a slot."""

    region: Region
    place: SlotRef
    expected: tuple[bytes, ...]

    @property
    def reissued(self) -> bool:
        """The slot has another owner by now."""
        return self.region.generations[self.place.slot] != self.place.generation

    @property
    def flipped(self) -> bool:
        """A bit was flipped there: wrong bytes are no fault of the rules."""
        return self.place in self.region.flipped

    @property
    def right(self) -> bool:
        """The bytes are those of the segment."""
        return tuple(self.region.shards[self.place.slot]) == self.expected

    def write(self, shard: int, value: bytes) -> None:
        """Write into memory directly, as an engine does."""
        self.region.shards[self.place.slot][shard] = value
