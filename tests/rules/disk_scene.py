"""Segments, and a disk tier that holds them, for tests of the rules of the disk tier."""

from __future__ import annotations

import hashlib

from tokenlake.disk import Place, slab_bytes
from tokenlake.disk.admission import Refusal
from tokenlake.disk.places import SLAB_BYTES
from tokenlake.disk.tier import DiskTier
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId, Segment, State
from tokenlake.memory.eviction.odds import Odds
from tokenlake.wire.slots import SlotRef

TENANT = TenantId("red")
SLOT = 5000
"""Bytes of a segment: a place has three blocks of 4 KiB."""


def key_of(number: int) -> SegmentKey:
    """A segment's key."""
    return SegmentKey(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest())


def segment_of(number: int, touched: float = 0.0, tenant: TenantId = TENANT, slot_bytes: int = SLOT) -> Segment:
    """A READY primary copy in memory, of a prompt of its own."""
    segment = Segment(PoolId(tenant, slot_bytes), key_of(number), SlotRef(0, number, 1), Kind.PRIMARY, number, touched)
    segment.state = State.READY
    segment.checksums = number.to_bytes(8, "big")
    segment.hints = Hints(access=AccessRecord(number + 1, 0))
    return segment


def tier_of(
    places: int, quotas: dict[str, float] | None = None, writes_per_day: float = 0.0, slabs: int = 1
) -> DiskTier:
    """A tier with one device, with room for so many segments in so many slabs."""
    odds = Odds()
    tier = DiskTier(lambda pool: odds, writes_per_day, quotas or {})
    tier.ready(0, slab_bytes(SLOT, places) + (slabs - 1) * SLAB_BYTES, 1e9, 1e9, 0.0)
    tier.recovered(0)
    return tier


def written(tier: DiskTier, segment: Segment, now: float = 0.0, *, leaves: bool = True) -> Place:
    """Write a segment, and let it leave memory. Returns its place."""
    entry = tier.admit(segment, 1, 1.0, now)
    assert not isinstance(entry, Refusal), entry
    tier.written(entry, segment, True)
    assert segment.disk == entry
    place = tier.place(entry)
    if leaves:
        segment.state = State.GONE
        assert tier.left(segment, 1, keep=True)
    return place


def evictions(tier: DiskTier) -> int:
    """How many segments left the tier for want of space since the last call."""
    return sum(each.evicted for each in tier.take_void())
