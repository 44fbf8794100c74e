"""What a segment store must do, said with dicts and lists and no regard for speed.

Written from the contract of `SegmentStore`, not from its code: free slots are not kept but computed (all places
less those of indexed and quarantined copies), pins are the names of their holders, an order is a list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenlake.store import Kind
from tokenlake.wire.codes import Code

__all__ = ["Copy", "Place", "Pool", "StoreModel"]

Place = tuple[int, int]
"""(region, slot)."""
Pool = tuple[str, int]
"""(tenant, slot bytes)."""


@dataclass(eq=False)
class Copy:
    """A segment; `content` stands for the bytes that its writer puts into the slot."""

    pool: Pool
    key: int
    kind: Kind
    place: Place
    generation: int
    content: int
    touched: float
    ready: bool = False
    """Published once; stays True in quarantine."""
    aside: bool = False
    """Found pinned by a search for a victim: in no order until its last pin goes."""
    pins: list[str] = field(default_factory=list)


class StoreModel:
    """Regions, copies and their order. A method changes the model as the store has to change."""

    def __init__(self, regions: int, slots: dict[int, int], staged: float, dirty: float, replica: float) -> None:
        """`slots`: how many slots of each size a region holds."""
        self.all_regions = regions
        self.slots = slots
        self.staged = staged
        self.dirty = dirty
        self.replica = replica
        self.spare = list(range(regions))
        self.away: list[int] = []
        """Reclaimed and not yet given back as spare."""
        self.regions: dict[Pool, list[int]] = {}
        self.index: dict[tuple[str, int], Copy] = {}
        self.quarantine: list[Copy] = []
        self.order: dict[tuple[Pool, Kind], list[Copy]] = {}
        """READY staged and home copies, coldest first."""
        self.evictions = 0
        self.quarantines = 0
        self.evicted_homes: list[Copy] = []

    # -- asking

    def places(self, pool: Pool) -> set[Place]:
        return {(region, slot) for region in self.regions.get(pool, []) for slot in range(self.slots[pool[1]])}

    def free(self, pool: Pool) -> set[Place]:
        return self.places(pool) - {copy.place for copy in self.copies()}

    def copies(self) -> Iterable[Copy]:
        return [*self.index.values(), *self.quarantine]

    def count(self, pool: Pool, kind: Kind) -> int:
        return sum(copy.pool == pool and copy.kind is kind for copy in self.index.values())

    def vacancy(self, now: float, region_bytes: int) -> tuple[float, float]:
        free = len(self.spare) * region_bytes + sum(len(self.free(pool)) * pool[1] for pool in self.regions)
        unpinned = [[c for c in self.order.get((pool, Kind.HOME), []) if not c.pins] for pool in self.regions]
        next_out = [copies[0] for copies in unpinned if copies]
        age = max((now - copy.touched for copy in next_out), default=0.0)
        return free / (self.all_regions * region_bytes), age

    # -- changing

    def admit(self, pool: Pool, kind: Kind, now: float) -> Code | Copy | None:
        """What a reservation must come to: a refusal, a victim, or None where a slot is free."""
        if pool not in self.regions and not self._grow(pool):
            return Code.NO_REGION
        reach = len(self.places(pool)) + len(self.spare) * self.slots[pool[1]]
        if kind is Kind.DIRTY and self.count(pool, Kind.DIRTY) >= max(2, math.ceil(self.dirty * reach)):
            return Code.WRITE_BUDGET
        if kind is Kind.REPLICA and self.count(pool, Kind.REPLICA) >= max(2, math.ceil(self.replica * reach)):
            return Code.REPLICA_BUDGET
        if not self.free(pool):
            self._grow(pool)
        if self.free(pool):
            return None
        budget = max(2, math.ceil(self.staged * len(self.places(pool))))
        staged = self.count(pool, Kind.STAGED)
        spares_staged = {Kind.STAGED: staged < budget, Kind.HOME: staged <= budget}.get(kind, False)
        victims = [Kind.HOME, Kind.STAGED] if spares_staged else [Kind.STAGED, Kind.HOME]
        for victim in (self._coldest(pool, kind, now) for kind in victims):
            if victim is not None:
                self._evict(victim)
                return victim
        return Code.NO_SLOT

    def add(self, copy: Copy) -> None:
        self.index[copy.pool[0], copy.key] = copy

    def publish(self, copy: Copy, now: float) -> None:
        copy.ready = True
        self._enter(copy, now)

    def discard(self, copy: Copy) -> None:
        self._leave(copy)
        del self.index[copy.pool[0], copy.key]
        if copy.pins:
            self.quarantine.append(copy)
            self.quarantines += 1

    def become(self, copy: Copy, kind: Kind, now: float) -> None:
        if copy.kind is not kind:
            self._leave(copy)
            copy.kind = kind
            if copy.ready:
                self._enter(copy, now)

    def touch(self, prompt: list[Copy], now: float) -> None:
        for copy in reversed(prompt):
            if copy.kind is not Kind.DIRTY and not copy.aside:
                self._leave(copy)
                self._enter(copy, now)

    def unpin(self, copy: Copy, holder: str) -> None:
        copy.pins.remove(holder)
        if not copy.pins and copy in self.quarantine:
            self.quarantine.remove(copy)
        if not copy.pins and copy.aside:
            copy.aside = False
            self._enter(copy, copy.touched)

    def reclaim(self, pool: Pool) -> int | None:
        for region in list(self.regions[pool]):
            inside = [copy for copy in self.copies() if copy.place[0] == region]
            if not any(copy.pins or copy.kind is Kind.DIRTY for copy in inside):
                for copy in inside:
                    self._evict(copy)
                self.regions[pool].remove(region)
                if not self.regions[pool]:
                    del self.regions[pool]
                self.away.append(region)
                return region
            # The next search begins with the others.
            self.regions[pool].append(self.regions[pool].pop(0))
        return None

    def add_spare(self, region: int) -> None:
        self.away.remove(region)
        self.spare.append(region)

    # -- inside

    def _grow(self, pool: Pool) -> bool:
        if not self.spare or not self.slots[pool[1]]:
            return False
        self.regions.setdefault(pool, []).append(self.spare.pop(0))
        return True

    def _coldest(self, pool: Pool, kind: Kind, now: float) -> Copy | None:
        """The coldest without a pin; what is colder is in use: touched, and set aside."""
        order = self.order.get((pool, kind), [])
        while order and order[0].pins:
            passed = order.pop(0)
            passed.touched, passed.aside = now, True
        return order[0] if order else None

    def _evict(self, copy: Copy) -> None:
        self.evictions += 1
        if copy.kind is Kind.HOME:
            self.evicted_homes.append(copy)
        self.discard(copy)

    def _enter(self, copy: Copy, now: float) -> None:
        if copy.kind is not Kind.DIRTY:
            copy.touched = now
            self.order.setdefault((copy.pool, copy.kind), []).append(copy)

    def _leave(self, copy: Copy) -> None:
        copy.aside = False
        order = self.order.get((copy.pool, copy.kind), [])
        if copy in order:
            order.remove(copy)
