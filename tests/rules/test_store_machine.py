"""SegmentStore against a plain model, step by step.

A machine of at most 50 steps drives both and an arena in which a slot's bytes are one number. 1 to 4 regions of
1 to 4 small slots (half as many large ones), two tenants, two slot sizes, 20 keys per tenant, three owners.
After each step: `check_integrity()`, the whole state equals the model's, and every byte that a pin protects is
the one its writer wrote. 200 examples, the same in every run.

The arena's rules: a writer writes its own number while it holds its pin and the segment is not published, even
long after the segment left the index; a reader without a pin compares the slot's generation afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.profiles import examples
from tests.rules.store_model import Copy, LruModel, Place, Pool, StoreModel
from tests.rules.test_slot_table import add, store_of
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore, State
from tokenlake.memory.eviction import Forecast, LeastRecentlyUsed
from tokenlake.memory.store import EVICTED, NOT_ADMITTED, QUARANTINED
from tokenlake.memory.vacancy import MAX_VICTIM_SCAN
from tokenlake.metrics import Counters
from tokenlake.wire.codes import Code
from tokenlake.wire.slots import SlotRef

KEYS = 20
SMALL, LARGE = 4096, 8192

WRITER = "writer"

POOLS: list[Pool] = [("a", SMALL), ("a", SMALL), ("a", SMALL), ("b", SMALL), ("a", LARGE)]
pools = st.sampled_from(POOLS)
"""Mostly the same pool, so that it fills."""
kinds = st.sampled_from(Kind)
keys = st.integers(0, KEYS - 1)
picks = st.integers(0, 47)
"""Index into a list of any length, modulo its length."""
owners = st.sampled_from(["engine 1", "engine 2", "sender"])
leases = st.sampled_from([None, None, None, "engine 1", "engine 2"])
shares = st.sampled_from([0.1, 0.1, 0.4])

T = TypeVar("T")


def pick_from(pick: int, items: Iterable[T]) -> T:
    some = list(items)
    return some[pick % len(some)]


class StoreMachine(RuleBasedStateMachine):
    """Subclasses plant bugs with another `make_store`."""

    make_store: ClassVar[Callable[..., SegmentStore]] = SegmentStore
    policy: ClassVar[Callable[[], Any]] = LruModel
    """Orders the copies of the model. The store uses the same policy, or LRU for its model."""

    @initialize(regions=st.integers(1, 4), slots=st.integers(1, 4), dirty=shares)
    def start(self, regions: int, slots: int, dirty: float) -> None:
        self.counters = Counters()
        store, model = type(self).make_store, type(self).policy
        policy = LeastRecentlyUsed if model is LruModel else model
        self.store = store(regions, slots * SMALL, dirty, self.counters, policy)
        self.model = StoreModel(regions, slots * SMALL, dirty, model)
        self.real: dict[Copy, Segment] = {}
        self.told: list[Segment] = []
        """Copies that left and that a directory node may name."""
        self.now = 0.0
        self.written = 0
        self.memory: dict[Place, int] = {}
        self.stamps: dict[Place, int] = {}
        """Generation of each slot as readers see it."""
        self.published: dict[SlotRef, int] = {}

    # -- rules

    @rule(pool=pools, key=keys, kind=kinds)
    def reserve(self, pool: Pool, key: int, kind: Kind) -> None:
        self._reserve(pool, key, kind)

    @rule(pool=pools, first=keys, count=st.integers(1, 8), kind=kinds, owner=leases)
    def arrive(self, pool: Pool, first: int, count: int, kind: Kind, owner: str | None) -> None:
        """Consecutive segments of one prompt come; `owner` leases those that found a slot."""
        for key in range(first, min(KEYS, first + count)):
            copy = self._reserve(pool, key, kind)
            if copy is not None:
                self._publish(copy)
                self._unpin(copy, WRITER)
                if owner is not None:
                    self._pin(copy, owner)

    @precondition(lambda self: any(not copy.ready for copy in self.model.index.values()))
    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        self._publish(pick_from(pick, [copy for copy in self.model.index.values() if not copy.ready]))

    @precondition(lambda self: any(WRITER in copy.pins and not copy.ready for copy in self.model.copies()))
    @rule(pick=picks)
    def write(self, pick: int) -> None:
        copy = pick_from(pick, [copy for copy in self.model.copies() if WRITER in copy.pins and not copy.ready])
        self.memory[copy.place] = copy.content

    @precondition(lambda self: self.model.index)
    @rule(pick=picks)
    def discard(self, pick: int) -> None:
        copy = pick_from(pick, self.model.index.values())
        self.model.discard(copy, self.now)
        self.store.discard(self.real[copy], self.now)

    @precondition(lambda self: self.model.index)
    @rule(pick=picks, owner=owners)
    def pin(self, pick: int, owner: str) -> None:
        """Pin a copy that is in the index, or in quarantine and pinned already."""
        self._pin(pick_from(pick, self.model.copies()), owner)

    @precondition(lambda self: any(copy.pins for copy in self.model.copies()))
    @rule(pick=picks, which=picks)
    def unpin(self, pick: int, which: int) -> None:
        copy = pick_from(pick, [copy for copy in self.model.copies() if copy.pins])
        self._unpin(copy, copy.pins[which % len(copy.pins)])

    @precondition(lambda self: self.model.index)
    @rule(pick=picks, kind=kinds)
    def become(self, pick: int, kind: Kind) -> None:
        copy = pick_from(pick, self.model.index.values())
        self.now += 1
        self.model.become(copy, kind, self.now)
        self.store.become(self.real[copy], kind, self.now)

    @rule(pool=pools, first=keys, count=st.integers(2, KEYS))
    def touch(self, pool: Pool, first: int, count: int) -> None:
        found = (self.model.index.get((pool[0], key)) for key in range(first, first + count))
        prompt = [copy for copy in found if copy is not None and copy.ready and copy.pool == pool]
        self.now += 1
        self.model.touch(prompt, self.now)
        self.store.touch([self.real[copy] for copy in prompt], self.now)

    @precondition(lambda self: self.model.regions)
    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        pool = pick_from(pick, self.model.regions)
        real = next(p for p in self.store.pools() if (p.tenant, p.slot_bytes) == pool)
        found = self.store.least_used(real)
        assert found is not None
        assert found[0] == min(map(self.model.busy, real.regions))
        assert sorted(real.regions) == sorted(self.model.regions[pool])
        busy, region = found
        assert self.model.busy(region) == busy
        if busy:
            return
        self.model.drain(pool, region, self.now)
        assert self.store.drain(real, self.now, region) == (region, 0)
        for place in [place for place in self.memory if place[0] == region]:
            del self.memory[place]

    @precondition(lambda self: self.model.unmade)
    @rule(pick=picks)
    def make(self, pick: int) -> None:
        sizes = range(SMALL, self.model.unmade + 1, SMALL)
        if sizes:
            region = self.store.regions.make(pick_from(pick, sizes))
            self.model.spare[region] = self.store.regions.making[region]
            self.store.regions.made(region)

    @precondition(lambda self: self.model.spare)
    @rule(pick=picks)
    def unmake(self, pick: int) -> None:
        region = pick_from(pick, self.model.spare)
        del self.model.spare[region]
        self.store.regions.unmake(region)

    @rule()
    def vacancy(self) -> None:
        self.now += 1
        assert tuple(self.store.vacancy(self.now)) == self.model.vacancy(self.now)

    @rule()
    def release_all(self) -> None:
        """Quarantine is empty afterwards: each slot is free or indexed."""
        for copy in self.model.copies():
            for owner in list(copy.pins):
                self._unpin(copy, owner)
        assert not any(pool.quarantined for pool in self.store.pools()), "quarantine is not empty"

    # -- what rules share

    def _reserve(self, pool: Pool, key: int, kind: Kind) -> Copy | None:
        """Reserve in store and model. None when refused, or when the key is indexed and may not be reserved."""
        tenant, size = pool
        if (tenant, key) in self.model.index:
            return None
        self.now += 1
        name = SegmentKey(bytes([key]) * 32)
        expected = self.model.admit(pool, kind, key, self.now)
        source = NodeId("n1") if kind is Kind.CACHED and key % 2 else None
        result = self.store.reserve(TenantId(tenant), size, name, kind, key, self.now, source=source)
        if isinstance(expected, Code) or isinstance(result, Code):
            assert result == expected, f"reserving came to {result!r}, must come to {expected!r}"
            return None
        place = (result.place.region, result.place.slot)
        for other in self.model.copies():
            assert other.place != place, f"handed out a slot of {other}"
        assert place in self.model.free(pool), f"slot {place} is none of {pool}"
        previous_owner = self.stamps.get(place, 0)
        assert result.place.generation > previous_owner, f"generation of {place} did not grow from {previous_owner}"
        assert self.store.take_slots()[1] == [result.packed]
        self.stamps[place] = result.place.generation
        self.written += 1
        copy = Copy(pool, key, kind, place, result.place.generation, self.written, self.now, pins=[WRITER])
        copy.source = source
        self.model.add(copy)
        self.real[copy] = result
        return copy

    def _publish(self, copy: Copy) -> None:
        segment = self.real[copy]
        self.now += 1
        self.memory[copy.place] = copy.content
        self.published[segment.place] = copy.content
        self.model.publish(copy, self.now)
        self.store.publish(segment, b"", self.now)

    def _pin(self, copy: Copy, owner: str) -> None:
        copy.pins.append(owner)
        self.store.pin(self.real[copy])

    def _unpin(self, copy: Copy, owner: str) -> None:
        self.model.unpin(copy, owner)
        self.store.unpin(self.real[copy])

    # -- after each step

    @invariant()
    def integrity(self) -> None:
        self.store.check_integrity()

    @invariant()
    def index_matches_the_model(self) -> None:
        for tenant in "ab":
            indexed = {key: copy for (owner, key), copy in self.model.index.items() if owner == tenant}
            assert {key[0] for key in self.store.index(TenantId(tenant))} == set(indexed), f"index of {tenant}"
            for key, copy in indexed.items():
                segment = self.store.get(TenantId(tenant), SegmentKey(bytes([key]) * 32))
                assert segment is self.real[copy], f"asking for {key} of {tenant} came to {segment}"
        for copy in self.model.index.values():
            segment = self.real[copy]
            assert segment.state is (State.READY if copy.ready else State.RESERVED)
            assert segment.kind is copy.kind
            assert segment.pins == len(copy.pins), f"pins of {segment}, which {copy.pins} hold"
            assert segment.place == (*copy.place, copy.generation)
        for copy in self.model.quarantine:
            assert self.real[copy].state is State.GONE
            assert self.real[copy].pins == len(copy.pins)

    @invariant()
    def slots_match_the_model(self) -> None:
        assert self.store.regions.spare == self.model.spare
        assert self.store.regions.unmade == self.model.unmade
        pools = {(pool.tenant, pool.slot_bytes): pool for pool in self.store.pools()}
        assert set(pools) == set(self.model.regions)
        for at, pool in pools.items():
            assert set(pool.free) == self.model.free(at), f"free slots of {at}"
            assert sorted(pool.regions) == sorted(self.model.regions[at])
            for kind in (Kind.CACHED, Kind.PRIMARY):
                order = self.model.order_of(at, kind)
                assert len(pool.orders[kind]) == len(order)
                victim = self.real[order.victim(self.now)] if len(order) else None
                assert not order or pool.orders[kind].victim(self.now) is victim, f"next {kind.name} victim of {at}"
            quarantined = sum(copy.pool == at for copy in self.model.quarantine)
            assert pool.quarantined == quarantined, f"{pool.quarantined} slots in quarantine, must be {quarantined}"

    @invariant()
    def evictions_match_the_model(self) -> None:
        self.told += [each for each in self.store.take_gone() if each.left_by and each.owns]
        assert set(self.told) == {self.real[copy] for copy in self.model.evicted}, "evicted copies"
        assert self.counters[EVICTED] == self.model.evictions, "evictions counted"
        assert self.counters[NOT_ADMITTED] == self.model.not_admitted, "refusals counted"
        assert self.counters[QUARANTINED] == self.model.quarantines, "quarantines counted"

    @invariant()
    def bytes_are_right(self) -> None:
        for copy in self.model.copies():
            if copy.ready and copy.pins:
                assert self.memory[copy.place] == copy.content, f"{copy.pins} read what they did not pin"
        for place, content in self.memory.items():
            ref = SlotRef(*place, self.stamps[place])
            assert self.published.get(ref, content) == content, f"a reader with no pin accepts other bytes in {ref}"


class ForecastMachine(StoreMachine):
    policy = Forecast


SEARCH = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
TestStore = StoreMachine.TestCase
TestForecast = ForecastMachine.TestCase
TestStore.settings = SEARCH
TestForecast.settings = settings(SEARCH, max_examples=examples(60))


def test_the_search_for_a_victims_age_is_bounded() -> None:
    """Each answer to a peer has the age, so ten thousand leased segments must not make the search long."""
    store = store_of(1, MAX_VICTIM_SCAN + 2)
    segments = [add(store, number) for number in range(MAX_VICTIM_SCAN + 1)]
    store.pin(*segments[:MAX_VICTIM_SCAN])
    assert store.vacancy(now=1e6).victim_age_s == 0
    store.unpin(segments[MAX_VICTIM_SCAN - 1])
    assert store.vacancy(now=1e6).victim_age_s > 0


def test_vacancy_counts_time_since_the_last_call() -> None:
    """Two segments of a forecast, and a second without a call: one reaches the next bucket of age, and the other
    becomes the next victim."""
    machine = ForecastMachine()
    machine.start(regions=1, slots=2, dirty=0.1)
    machine.arrive(pool=("a", SMALL), first=0, count=2, kind=Kind.PRIMARY, owner=None)
    machine.vacancy()
