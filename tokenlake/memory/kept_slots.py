"""Regions that the daemon before left, with the segments in them.

::

    region --> all its slots are withheld: they get no new segment
           --> segments that were found in it are READY, and cannot be evicted
           --> slots that a process still holds without a segment are in quarantine
           --> release, bit by bit: the slots are like any others

A withheld slot has one pin of its own as long as there is a segment in it, so that the policy cannot evict the segment,
and an order to evict it puts the slot into quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.memory.pool import SlotPool
from tokenlake.memory.region import RegionShape
from tokenlake.memory.region_allocator import RegionAllocator
from tokenlake.memory.segment import Kind, PoolId, Segment, State
from tokenlake.memory.slot_table import SlotTable
from tokenlake.wire.slots import SlotRef

NO_KEY = SegmentKey(bytes(KEY_BYTES))
"""The key of a slot in quarantine whose segment is not known."""


class Store(Protocol):
    """What `KeptSlots` calls of the `SegmentStore` to which it belongs."""

    recorded: dict[tuple[int, int], Segment] | None

    def new_pool(self, at: PoolId) -> SlotPool: ...

    def insert(self, segment: Segment) -> None: ...

    def publish(self, segment: Segment, checksums: bytes, now: float) -> None: ...

    def unpin(self, *segments: Segment) -> None: ...


class KeptSlots:
    """The withheld slots of a store, of which it is a part: it shares the maps of the store."""

    def __init__(
        self,
        store: Store,
        regions: RegionAllocator,
        slots: SlotTable,
        pools: dict[PoolId, SlotPool],
        quarantine: dict[SlotRef, Segment],
    ) -> None:
        self._store = store
        self._regions = regions
        self._slots = slots
        self._pools = pools
        self._quarantine = quarantine

    def add_region(self, at: PoolId, region: int, nbytes: int, generations: list[int]) -> bool:
        """Add a region with `nbytes` of slots, all of which are withheld. Returns False if `generations` are not those
        of so many slots."""
        if len(generations) != RegionShape(nbytes, at.slot_bytes).slots or not generations:
            return False
        self._regions.keep(at.tenant, region, nbytes)
        pool = self._pools.get(at) or self._store.new_pool(at)
        self._slots.add_region(region, generations)
        pool.keep_region(region, len(generations))
        return True

    def find(self, at: PoolId, place: SlotRef) -> tuple[bool, Segment | None]:
        """Returns whether `place` is a withheld slot of the pool with this generation, and the segment in it."""
        pool = self._pools.get(at)
        if pool is None or place.region not in pool.withheld or not self._slots.is_generation(place):
            return False, None
        if not pool.withholds(place.region, place.slot):
            return False, None
        return True, self._slots.at(place.region, place.slot)

    def has_region(self, at: PoolId, region: int) -> bool:
        """Returns True if the region belongs to the pool, and some of its slots are withheld."""
        pool = self._pools.get(at)
        return pool is not None and region in pool.withheld

    def add(self, segment: Segment, accesses: int, touched: float, now: float) -> None:
        """Make a segment READY that was found in a withheld slot without a segment. `accesses`, `touched`: its counted
        accesses, and the time of the last one."""
        pool = self._pools[segment.pool]
        pool.withheld_free -= 1
        segment.pins = 1
        self._enter(segment, accesses, touched, now)

    def revive(self, segment: Segment, accesses: int, touched: float, now: float) -> None:
        """Make the segment of a slot READY that `hold` put into quarantine; it has got its fields."""
        pool = self._pools[segment.pool]
        del self._quarantine[segment.place]
        pool.quarantined -= 1
        segment.state = State.RESERVED
        self._enter(segment, accesses, touched, now)

    def _enter(self, segment: Segment, accesses: int, touched: float, now: float) -> None:
        store = self._store
        if accesses > 1:
            # Its entry into the order counts as an access.
            self._pools[segment.pool].orders[segment.kind].recall(segment.key, accesses - 1, segment.hints, now)
        store.insert(segment)
        store.publish(segment, segment.checksums, now)
        segment.touched = touched
        if store.recorded is not None:
            # Its record is in the ledger already.
            del store.recorded[segment.place.region, segment.place.slot]

    def hold(self, at: PoolId, place: SlotRef, now: float) -> Segment:
        """Put a withheld slot without a segment into quarantine, because a process may still use it. Returns the
        segment that stands for its content, which the caller pins."""
        pool = self._pools[at]
        segment = Segment(at, NO_KEY, place, Kind.CACHED, 0, now)
        segment.state = State.GONE
        segment.pins = 1
        self._slots.put(segment)
        self._quarantine[place] = segment
        pool.quarantined += 1
        pool.withheld_free -= 1
        return segment

    def release(self, pool: SlotPool, slots: int) -> bool:
        """Let the next `slots` withheld slots of a pool be like all others. Returns False once none is left."""
        for region in list(pool.withheld):
            if slots <= 0:
                return True
            start, count = pool.withheld[region], self._slots.count(region)
            stop = min(count, start + slots)
            slots -= stop - start
            if stop < count:
                pool.withheld[region] = stop
            else:
                del pool.withheld[region]
            for slot in range(start, stop):
                segment = self._slots.at(region, slot)
                if segment is not None:
                    self._store.unpin(segment)
                else:
                    pool.withheld_free -= 1
                    pool.give_back(region, slot)
        return bool(pool.withheld)

    def pinned(self) -> Iterator[Segment]:
        """Yields the segments in withheld slots, each of which has one pin for that; for integrity checks."""
        for pool in self._pools.values():
            for region, start in pool.withheld.items():
                for slot in range(start, self._slots.count(region)):
                    segment = self._slots.at(region, slot)
                    if segment is not None:
                        yield segment
