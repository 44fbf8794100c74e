"""The slots of one tenant and one slot size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import msgspec

from tokenlake.identity import TenantId
from tokenlake.store.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.store.region import RegionShape
from tokenlake.store.retention import HIGH_SHARE, Retention
from tokenlake.store.segment import Kind, Segment, State
from tokenlake.wire.slots import SlotRef

__all__ = ["Budgets", "SlotPool"]


class Budgets(msgspec.Struct, frozen=True):
    """Shares of a pool's slots; each is at least two slots, so that a tiny arena works."""

    cached: float = 0.10
    """Cached copies may displace primary copies up to this share. Beyond it they may use free slots, and displace
    directory node
    copies when all cached ones are in use."""
    dirty: float = 0.10
    """Segments being written or waiting to be pushed."""
    replica: float = 0.05
    """Extra copies of hot segments."""


class SlotPool:
    """Free slots, and the evictable segments in order. Changed by `SegmentStore` alone."""

    def __init__(
        self, tenant: TenantId, slot_bytes: int, budgets: Budgets, directory_node: Callable[[], EvictionPolicy]
    ):
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.budgets = budgets
        self.regions: list[int] = []
        self.slots = 0
        self.free: list[tuple[int, int]] = []
        """(region, slot), taken from the end."""
        # By kind, in lists: hashing an enum member for a dict runs Python code, and this is the hot path.
        self.retention = Retention(directory_node(), lambda: self.budget(HIGH_SHARE, self.slots))
        """Of the primary copies."""
        self.order: list[EvictionPolicy] = [
            LeastRecentlyUsed(),
            LeastRecentlyUsed(),
            self.retention,
            LeastRecentlyUsed(),
        ]
        """READY segments but those set aside; those of DIRTY and REPLICA are in order as well, but nobody asks for a
        victim among them."""
        self.counts = [0] * len(Kind)
        """Segments RESERVED or READY."""
        self.quarantined = 0
        self.draining: int | None = None
        """A region that is to be given away: its slots are counted no more, and are taken by nobody once they are
        free."""

    def add_region(self, region: int, region_bytes: int) -> None:
        """Cut a fresh region into free slots."""
        count = RegionShape(region_bytes, self.slot_bytes).slots
        self.regions.append(region)
        self.slots += count
        self.free.extend(zip(itertools.repeat(region), range(count - 1, -1, -1), strict=False))

    def drain(self, region: int, slots: int) -> None:
        """Begin to give a region of `slots` slots away."""
        self.draining = region
        self.slots -= slots
        self.free = [place for place in self.free if place[0] != region]

    def drop_region(self, region: int) -> None:
        """Forget a region that was drained, and is empty."""
        self.draining = None
        self.regions.remove(region)

    def give_back(self, region: int, slot: int) -> None:
        """A slot holds nothing any more."""
        if region != self.draining:
            self.free.append((region, slot))

    def budget(self, share: float, slots: int) -> int:
        """A share of `slots`."""
        return max(2, math.ceil(share * slots))

    def take(self, generations: dict[int, list[int]]) -> SlotRef:
        """A free slot under a new generation. IndexError when there is none."""
        region, slot = self.free.pop()
        generations[region][slot] += 1
        return SlotRef(region, slot, generations[region][slot])

    def victim(self, kind: Kind, now: float) -> Segment | None:
        """The coldest unpinned segment of `kind`. Pinned ones on the way are in use, so they count as touched, and are
        set aside: a pin costs nothing but its count, and no search passes over the same pin twice."""
        order = self.order[kind]
        while len(order):
            segment = order.coldest(now)
            if not segment.pins:
                return segment
            order.remove(segment, now, evicted=False)
            segment.aside, segment.touched = True, now
        return None

    def enter(self, segment: Segment, now: float) -> None:
        """A READY segment takes its place in the order of its kind."""
        self.order[segment.kind].insert(segment, now)

    def leave(self, segment: Segment, now: float, evicted: bool = False) -> None:
        """Inverse of `enter`, also of one that was set aside."""
        if segment.aside:
            segment.aside = False
        else:
            self.order[segment.kind].remove(segment, now, evicted)

    def come_back(self, segment: Segment) -> None:
        """Inverse of setting aside: the last pin of a segment went, or it is touched."""
        segment.aside = False
        self.enter(segment, segment.touched)

    def check_integrity(self, segments: list[Segment], quarantined: list[Segment]) -> None:
        """Conservation of slots: free + indexed + quarantined = all, each place once."""
        places = [*self.free, *((s.place.region, s.place.slot) for s in segments + quarantined)]
        places = [place for place in places if place[0] != self.draining]
        assert len(places) == len(set(places)) == self.slots, f"{len(places)} places for {self.slots} slots"
        assert self.quarantined == len(quarantined), f"counted {self.quarantined} in quarantine, are {len(quarantined)}"
        for kind in Kind:
            of_kind = [s for s in segments if s.kind is kind]
            assert self.counts[kind] == len(of_kind), f"{kind.name}: counted {self.counts[kind]}, are {len(of_kind)}"
            ready = [s for s in of_kind if s.state is State.READY]
            assert set(self.order[kind]) == {s for s in ready if not s.aside}
            assert all(s.pins for s in ready if s.aside)
        assert all(s.pins > 0 for s in quarantined)
        assert all(s.pins >= 0 for s in segments)
