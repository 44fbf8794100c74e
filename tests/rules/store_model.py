"""A model of the segment store, written with dicts and lists and no regard for speed.

Written from the contract of `SegmentStore`, not from its code: free slots are not kept but computed (all places
less those of indexed and quarantined copies), pins are the names of their owners, an order is a list.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.memory import Kind
from tokenlake.memory.eviction.odds import Odds
from tokenlake.memory.pool import COPY_LOSS, LEAST_USES, USE_HALF_LIFE_S
from tokenlake.memory.vacancy import MAX_RETENTION_VALUE
from tokenlake.rate import Rate
from tokenlake.wire.codes import Code

Place = tuple[int, int]
"""(region, slot)."""
Pool = tuple[str, int]
"""(tenant, slot bytes)."""


@dataclass(eq=False)
class Copy:
    """A segment. `content` stands for the bytes that its writer writes into the slot."""

    pool: Pool
    key: int
    kind: Kind
    place: Place
    generation: int
    content: int
    touched: float
    depth: int = 0
    source: str | None = None
    """Another node that has the segment."""
    policy_state: object = None
    """The policy's."""
    hints: Hints = NO_HINTS
    ready: bool = False
    """Published once; stays True in quarantine."""
    excluded: bool = False
    """A search for a victim found it pinned: in no order until its last pin goes."""
    pins: list[str] = field(default_factory=list)


class LruModel:
    """Least recently used first: a list in the order of eviction."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def insert(self, copy: Copy, now: float) -> None:
        copy.touched = now
        self.copies.append(copy)

    def touch(self, copy: Copy, now: float) -> None:
        self.copies.remove(copy)
        self.insert(copy, now)

    def remove(self, copy: Copy, now: float, evicted: bool) -> None:
        self.copies.remove(copy)

    def victim(self, now: float) -> Copy:
        return self.copies[0]

    def retention_value(self, copy: Copy, now: float) -> float:
        return 1 / (1 + now - copy.touched)

    def rank(self, copy: Copy, now: float) -> tuple[int, float, float]:
        return 0, self.retention_value(copy, now), copy.touched

    def forget(self, copy: Copy) -> None:
        pass

    def admits(self, key: int, hints: Hints, now: float) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.copies)

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.copies)


class StoreModel:
    """Regions, copies and their order. A method changes the model as the store has to change."""

    def __init__(
        self,
        regions: int,
        region_bytes: int,
        dirty: float,
        policy: Callable[[], Any] = LruModel,
    ) -> None:
        """`policy`: orders cached and primary copies. Any policy but the model of LRU is the real one: the model then
        checks the calls that it gets, and the use of its answers."""
        self.total = regions * region_bytes
        self.dirty = dirty
        self.spare = dict.fromkeys(range(regions), region_bytes)
        """Bytes of the regions without a pool."""
        self.sizes: dict[int, int] = {}
        """Bytes of the regions with a pool."""
        self.regions: dict[Pool, list[int]] = {}
        self.index: dict[tuple[str, int], Copy] = {}
        self.quarantine: list[Copy] = []
        self.policy = policy
        self.order: dict[tuple[Pool, Kind], Any] = {}
        """The orders of READY cached and primary copies."""
        self.odds: dict[Pool, Odds] = {}
        """What both orders of a pool learn."""
        self.uses: defaultdict[Pool, Rate] = defaultdict(lambda: Rate(USE_HALF_LIFE_S))
        """The rate of the segments that engines read, or get slots to write."""
        self.evictions = 0
        self.not_admitted = 0
        self.quarantines = 0
        self.evicted: list[Copy] = []
        """Copies that a directory node may still name: all but cached copies that came from another node."""

    # -- asking

    def places(self, pool: Pool) -> set[Place]:
        regions = self.regions.get(pool, [])
        return {(region, slot) for region in regions for slot in range(self.sizes[region] // pool[1])}

    @property
    def free_bytes(self) -> int:
        """The bytes that no pool has."""
        return self.total - sum(self.sizes.values())

    @property
    def unmade(self) -> int:
        """The bytes that belong to no region."""
        return self.free_bytes - sum(self.spare.values())

    def free(self, pool: Pool) -> set[Place]:
        return self.places(pool) - {copy.place for copy in self.copies()}

    def copies(self) -> Iterable[Copy]:
        return [*self.index.values(), *self.quarantine]

    def count(self, pool: Pool, kind: Kind) -> int:
        return sum(copy.pool == pool and copy.kind is kind for copy in self.index.values())

    def vacancy(self, now: float) -> tuple[float, float, float]:
        free = self.free_bytes + sum(len(self.free(pool)) * pool[1] for pool in self.regions)
        orders = [self.order_of(pool, Kind.PRIMARY) for pool in self.regions]
        next_out = [(order, victim) for order in orders if (victim := self._unpinned(order, now)) is not None]
        age = max((now - copy.touched for _, copy in next_out), default=0.0)
        retention_value = min(
            (order.retention_value(copy, now) for order, copy in next_out), default=MAX_RETENTION_VALUE
        )
        return free / self.total, age, retention_value

    def order_of(self, pool: Pool, kind: Kind) -> Any:
        if (pool, kind) not in self.order:
            order = self.order[pool, kind] = self.policy()
            if not isinstance(order, LruModel):
                order.odds = self.odds.setdefault(pool, Odds())
        return self.order[pool, kind]

    def rank(self, copy: Copy, now: float) -> tuple[int, float, float]:
        tier, value, touched = self.order_of(copy.pool, copy.kind).rank(copy, now)
        if copy.source:
            value *= COPY_LOSS
            mean = self.uses[copy.pool].at(now) / len(self.places(copy.pool))
            value = value if value >= LEAST_USES * mean else 0.0
        return tier, value, touched

    # -- changing

    def admit(self, pool: Pool, kind: Kind, key: int, now: float) -> Code | Copy | None:
        """The outcome of a reservation: a refusal, a victim, or None where a slot is free."""
        if pool not in self.regions and not self._grow(pool):
            return Code.NO_REGION
        if kind is not Kind.PRIMARY:
            self.uses[pool].add(1, now)
        reach = len(self.places(pool)) + self.free_bytes // pool[1]
        if kind is Kind.DIRTY and self.count(pool, Kind.DIRTY) >= max(2, math.ceil(self.dirty * reach)):
            return Code.WRITE_BUDGET
        if not self.free(pool):
            self._grow(pool)
        if self.free(pool):
            return None
        found = [self._next_victim(pool, each, now) for each in (Kind.CACHED, Kind.PRIMARY)]
        victims = [copy for copy in found if copy is not None]
        if not victims:
            return Code.NO_SLOT
        if kind is Kind.PRIMARY and not self.order_of(pool, kind).admits(key, NO_HINTS, now):
            self.not_admitted += 1
            return Code.NOT_ADMITTED
        victim = min(victims, key=lambda copy: self.rank(copy, now))
        self._evict(victim, now)
        return victim

    def add(self, copy: Copy) -> None:
        self.index[copy.pool[0], copy.key] = copy

    def publish(self, copy: Copy, now: float) -> None:
        copy.ready = True
        self._enter(copy, now)

    def discard(self, copy: Copy, now: float, evicted: bool = False) -> None:
        self._leave(copy, now, evicted)
        del self.index[copy.pool[0], copy.key]
        if copy.pins:
            self.quarantine.append(copy)
            self.quarantines += 1

    def become(self, copy: Copy, kind: Kind, now: float) -> None:
        if copy.kind is not kind:
            self._leave(copy, now)
            if copy.ready and copy.kind is not Kind.DIRTY:
                self.order_of(copy.pool, copy.kind).forget(copy)
            copy.kind = kind
            if copy.ready:
                self._enter(copy, now)

    def touch(self, prompt: list[Copy], now: float) -> None:
        if prompt:
            self.uses[prompt[0].pool].add(len(prompt), now)
        for copy in reversed(prompt):
            if copy.kind is not Kind.DIRTY:
                if copy.excluded:
                    self._readmit(copy)
                self.order_of(copy.pool, copy.kind).touch(copy, now)

    def unpin(self, copy: Copy, owner: str) -> None:
        copy.pins.remove(owner)
        if not copy.pins and copy in self.quarantine:
            self.quarantine.remove(copy)
        if not copy.pins and copy.excluded:
            self._readmit(copy)

    def _readmit(self, copy: Copy) -> None:
        copy.excluded = False
        self._enter(copy, copy.touched)

    def busy(self, region: int) -> int:
        """Number of copies in the region that are pinned or being written."""
        inside = (copy for copy in self.copies() if copy.place[0] == region)
        return sum(bool(copy.pins) or copy.kind is Kind.DIRTY for copy in inside)

    def drain(self, pool: Pool, region: int, now: float) -> None:
        """Evict the copies in a region without busy ones; it belongs to no pool then, and its memory to no region."""
        for copy in [copy for copy in self.copies() if copy.place[0] == region]:
            self._evict(copy, now)
        self.regions[pool].remove(region)
        del self.sizes[region]
        if not self.regions[pool]:
            del self.regions[pool]
            # A later pool with this id starts with fresh orders.
            self.uses.pop(pool, None)
            self.order = {at: order for at, order in self.order.items() if at[0] != pool}

    # -- inside

    def _grow(self, pool: Pool) -> bool:
        """The smallest spare region with room for a slot keeps as many bytes as its slots take."""
        fitting = [region for region, nbytes in self.spare.items() if nbytes >= pool[1]]
        if not fitting:
            return False
        region = min(fitting, key=lambda each: self.spare[each])
        self.sizes[region] = self.spare.pop(region) // pool[1] * pool[1]
        self.regions.setdefault(pool, []).append(region)
        return True

    def _next_victim(self, pool: Pool, kind: Kind, now: float) -> Copy | None:
        """The next victim without a pin. Pinned copies before it count as touched, and are excluded."""
        order = self.order_of(pool, kind)
        while len(order):
            copy: Copy = order.victim(now)
            if not copy.pins:
                return copy
            order.remove(copy, now, evicted=False)
            copy.touched, copy.excluded = now, True
        return None

    @staticmethod
    def _unpinned(order: Any, now: float) -> Copy | None:
        """The first unpinned copy, without a change of the order. `victim` comes first: an iteration does not tell the
        policy the time, and values change with age (test_vacancy_counts_time_since_the_last_call)."""
        if not len(order):
            return None
        first: Copy = order.victim(now)
        return next((copy for copy in order if not copy.pins), None) if first.pins else first

    def _evict(self, copy: Copy, now: float) -> None:
        self.evictions += 1
        if copy.kind is Kind.PRIMARY or (copy.kind is Kind.CACHED and copy.source is None):
            self.evicted.append(copy)
        self.discard(copy, now, evicted=True)

    def _enter(self, copy: Copy, now: float) -> None:
        if copy.kind is not Kind.DIRTY:
            self.order_of(copy.pool, copy.kind).insert(copy, now)

    def _leave(self, copy: Copy, now: float, evicted: bool = False) -> None:
        if copy.ready and not copy.excluded and copy.kind is not Kind.DIRTY:
            self.order_of(copy.pool, copy.kind).remove(copy, now, evicted)
        copy.excluded = False
