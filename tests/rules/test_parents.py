"""A primary copy leaves before the one that it continues, which no match finds it without."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.profiles import examples
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake.memory.pool import MAX_KEPT, SlotPool
from tokenlake.memory.store import ORPHANED
from tokenlake.metrics import Counters

TENANT = TenantId("t")
SLOT_BYTES = 1024
LOW, HIGH, SHORT_LIVED = Hints(priority=-1), Hints(priority=1), Hints(ttl_s=1.0)

Path = tuple[int, ...]
"""A segment by its place in a tree of prompts: (1, 2) continues (1,)."""


def key_of(path: Path) -> SegmentKey:
    return SegmentKey(hashlib.blake2b(repr(path).encode(), digest_size=32).digest())


class Scene:
    """A store of one tenant, and its primary copies by their places in a tree of prompts."""

    def __init__(self, slots: int, make: Callable[[], EvictionPolicy] = Forecast) -> None:
        self.counters = Counters()
        self.store = SegmentStore(1, slots * SLOT_BYTES, 0.45, self.counters, make)
        self.now = 0.0

    def here(self, path: Path) -> Segment | None:
        return self.store.get(TENANT, key_of(path))

    def prompt(self, path: Path, hints: Hints = NO_HINTS, after_s: float = 10.0) -> None:
        """A request reads what is here of a prompt, and stores the rest."""
        self.now += after_s
        keys = [key_of(path[:length]) for length in range(1, len(path) + 1)]
        found = list(itertools.takewhile(lambda segment: segment is not None, map(self._get, keys)))
        read = [segment for segment in found if segment is not None]
        self.store.pin(*read)
        for depth in range(len(read), len(keys)):
            parent = keys[depth - 1] if depth else None
            made = self.store.reserve(TENANT, SLOT_BYTES, keys[depth], Kind.DIRTY, depth, self.now, hints, parent)
            if not isinstance(made, Segment):
                break
            self.store.publish(made, b"", self.now)
            self.store.become(made, Kind.PRIMARY, self.now)
            self.store.unpin(made)
        self.store.unpin(*read)
        self.store.touch(read, self.now, hints)
        self.store.check_integrity()

    def _get(self, key: SegmentKey) -> Segment | None:
        return self.store.get(TENANT, key)

    def fill(self, count: int) -> None:
        for number in range(count):
            self.prompt((200, number), after_s=1.0)


def test_a_prompt_longer_than_one_search_follows() -> None:
    scene = Scene(MAX_KEPT + 60)
    whole = tuple(itertools.islice(itertools.cycle(range(1, 90)), MAX_KEPT + 30))
    for end in (len(whole), 1, len(whole) - 2):
        scene.prompt(tuple(whole[:end]))
    scene.fill(3 * MAX_KEPT)
    assert scene.counters[ORPHANED] == 0


def test_a_parent_that_came_back_has_its_children() -> None:
    """The children were here before it: it was at another node, and that node has left."""
    scene = Scene(8)
    scene.prompt((1, 2))
    for path in ((1,), (1, 2)):
        segment = scene.here(path)
        assert segment is not None
        if path == (1,):
            scene.store.evict(segment, scene.now)
    scene.prompt((1,))
    scene.prompt((1, 2))
    scene.fill(30)
    assert scene.counters[ORPHANED] == 0


def test_memory_that_is_taken_away_counts_apart() -> None:
    counters = Counters()
    store = SegmentStore(2, 4 * SLOT_BYTES, 0.45, counters, Forecast)
    made: list[Segment] = []
    for depth, path in enumerate(((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5))):
        parent = key_of(path[:-1]) if depth else None
        segment = store.reserve(TENANT, SLOT_BYTES, key_of(path), Kind.PRIMARY, depth, 0.0, NO_HINTS, parent)
        assert isinstance(segment, Segment)
        store.publish(segment, b"", 0.0)
        store.unpin(segment)
        made.append(segment)
    pool = store.pool(TENANT, SLOT_BYTES)
    assert pool is not None
    store.drain(pool, 1.0, made[0].place.region)
    assert counters.by_labels(ORPHANED) == {("reclaimed",): 4}


class ParentsMachine(RuleBasedStateMachine):
    """Requests of a tree of prompts, some of which an engine still reads, in memory that is far too small."""

    @initialize(slots=st.integers(4, 20), make=st.sampled_from([Forecast, LeastRecentlyUsed]))
    def start(self, slots: int, make: Callable[[], EvictionPolicy]) -> None:
        self.scene = Scene(slots, make)
        self.leases: list[list[Segment]] = []

    @rule(
        path=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        hints=st.sampled_from([NO_HINTS, NO_HINTS, LOW, HIGH, SHORT_LIVED]),
        after_s=st.sampled_from([0.0, 0.5, 2.0, 100.0]),
    )
    def request(self, path: Sequence[int], hints: Hints, after_s: float) -> None:
        self.scene.prompt(tuple(path), hints, after_s)

    @rule(path=st.lists(st.integers(1, 2), min_size=1, max_size=8))
    def lease(self, path: Sequence[int]) -> None:
        found = [self.scene.here(tuple(path[:length])) for length in range(1, len(path) + 1)]
        held = [segment for segment in itertools.takewhile(bool, found) if segment is not None]
        self.scene.store.pin(*held)
        self.leases.append(held)

    @rule(pick=st.integers(0, 7), part=st.integers(1, 8))
    def release(self, pick: int, part: int) -> None:
        """A part of a lease is given back, the beginning first."""
        if self.leases:
            held = self.leases[pick % len(self.leases)]
            given, held[:part] = held[:part], []
            self.scene.store.unpin(*given)
            self.leases = [each for each in self.leases if each]

    @invariant()
    def each_child_has_its_parent(self) -> None:
        self.scene.store.check_integrity()
        assert self.scene.counters[ORPHANED] == 0


def test_the_machine_finds_an_order_without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "victim", lambda pool, kind, now: plain_victim(pool, kind))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ParentsMachine, settings=settings(TestParents.settings, phases=[Phase.generate]))


def plain_victim(pool: SlotPool, kind: Kind) -> Segment | None:
    return next((segment for segment in pool.orders[kind] if not segment.pins), None)


TestParents = ParentsMachine.TestCase
TestParents.settings = settings(
    max_examples=examples(60), stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None
)
