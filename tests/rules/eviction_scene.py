"""A full memory for the tests of policies of eviction."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore
from tokenlake.memory.eviction import EvictionPolicy
from tokenlake.memory.eviction.odds import Odds
from tokenlake.metrics import Counters
from tokenlake.wire.slots import SlotRef

SLOT_BYTES = 1024


def key_of(name: object) -> SegmentKey:
    """The key of that name."""
    return SegmentKey(repr(name).encode().ljust(32, b"."))


def size_of(policy: EvictionPolicy) -> int:
    """Bytes of everything that the policy keeps."""
    return len(pickle.dumps(policy))


class Memory:
    """At most `capacity` segments in the order of `policy`, which is called as a store would call it: a prompt is
    touched deepest first, and its missing segments are stored if the policy admits them."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.here: dict[object, Segment] = {}
        self._names: dict[Segment, object] = {}
        self.evicted: list[object] = []
        self.refused: list[object] = []
        store = SegmentStore(1, SLOT_BYTES, 0.45, Counters())
        pool = store.pool(TenantId("t"), SLOT_BYTES)
        assert pool is not None
        self._pool = pool.id
        self._place = SlotRef(0, 0, 1)

    @property
    def odds(self) -> Odds:
        """The model that the policy learns."""
        assert self.policy.odds is not None
        return self.policy.odds

    def request(self, prompt: Sequence[object], now: float, hints: Hints = NO_HINTS) -> int:
        """Read the prefix of a prompt of named segments that is here, and store the rest; the hits."""
        hit = next((depth for depth, name in enumerate(prompt) if name not in self.here), len(prompt))
        for depth in reversed(range(hit, len(prompt))):
            self.store(prompt[depth], depth, now, hints)
        for name in reversed(prompt[:hit]):
            if name in self.here:
                self.here[name].hints = hints
                self.policy.touch(self.here[name], now)
        return hit

    def store(self, name: object, depth: int, now: float, hints: Hints = NO_HINTS) -> None:
        """Store a segment as an owner does; touch it if it is here."""
        if name in self.here:
            self.policy.touch(self.here[name], now)
            return
        if len(self.here) >= self.capacity:
            if not self.policy.admits(key_of(name), hints, now):
                self.refused.append(name)
                return
            self.evict(now)
        segment = Segment(self._pool, key_of(name), self._place, Kind.PRIMARY, depth, now)
        segment.hints = hints
        self.here[name] = segment
        self._names[segment] = name
        self.policy.insert(segment, now)

    def evict(self, now: float) -> object:
        """Evict the next victim; its name."""
        segment = self.policy.victim(now)
        name = self._names.pop(segment)
        del self.here[name]
        self.policy.remove(segment, now, evicted=True)
        self.evicted.append(name)
        return name

    def order(self, now: float) -> list[object]:
        """Evict all segments; their names in that order."""
        return [self.evict(now) for _ in range(len(self.here))]
