"""The order in which copies leave that another node or the disk has too, beside the last ones."""

from __future__ import annotations

import pytest

from tests.rules.test_store_machine import SMALL
from tokenlake.hints import Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, LeastRecentlyUsed, Segment, SegmentStore
from tokenlake.memory.eviction import Forecast
from tokenlake.metrics import Counters
from tokenlake.wire.codes import Code

TENANT, OTHER = TenantId("t"), NodeId("n1")
SLOTS = 4


def key(number: int) -> SegmentKey:
    return SegmentKey(bytes([number]) * 32)


class Choosy(LeastRecentlyUsed):
    """Refuses every segment that another node hands over."""

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        return False


class Scene:
    """A full store of primary copies 0, 1, 2 and of the cached copy 3, which came from another node, all of time 0."""

    def __init__(self, policy: type[LeastRecentlyUsed] | type[Forecast] = LeastRecentlyUsed) -> None:
        self.store = SegmentStore(1, SLOTS * SMALL, 0.45, Counters(), policy)
        for number in range(SLOTS):
            self.add(number, 0.0, None if number < 3 else OTHER)

    def add(self, number: int, now: float, source: NodeId | None = None, kind: Kind = Kind.CACHED) -> Segment | Code:
        made = self.store.reserve(TENANT, SMALL, key(number), kind, number, now, source=source)
        if isinstance(made, Segment):
            self.store.publish(made, b"", now)
            self.store.unpin(made)
            if source is None:
                self.store.become(made, Kind.PRIMARY, now)
        self.store.check_integrity()
        return made

    def read(self, number: int, now: float) -> None:
        self.store.touch([self[number]], now)

    def __getitem__(self, number: int) -> Segment:
        segment = self.store.get(TENANT, key(number))
        assert segment is not None
        return segment

    def here(self) -> set[int]:
        return {segment.key[0] for segment in self.store.segments()}


def test_a_cached_copy_leaves_before_the_last_copy() -> None:
    scene = Scene()
    scene.read(3, 1.0)
    scene.add(4, 2.0)
    assert scene.here() == {0, 1, 2, 4}


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, Forecast])
def test_a_copy_that_is_read_often_outlives_old_segments(
    policy: type[LeastRecentlyUsed] | type[Forecast],
) -> None:
    scene = Scene(policy)
    for second in range(1, 400):
        scene.read(3, float(second))
    scene.add(4, 400.0)
    scene.add(5, 400.0)
    assert 3 in scene.here()
    assert len({0, 1, 2} & scene.here()) == 1


def test_a_cold_copy_leaves_although_all_others_are_old() -> None:
    scene = Scene(Forecast)
    scene.add(4, 400.0)
    assert scene.here() == {0, 1, 2, 4}


def test_a_segment_that_is_on_disk_too_counts_as_a_copy() -> None:
    scene = Scene()
    scene.read(3, 10.0)
    spare = scene[1]
    spare.disk = 0
    scene.store.spare = lambda tenant, slot_bytes: spare if spare.key in scene.store.index(TENANT) else None
    scene.add(4, 11.0)
    assert scene.here() == {0, 2, 3, 4}


def test_a_copy_whose_owner_is_lost_counts_as_the_last_one() -> None:
    scene = Scene(Forecast)
    scene.read(3, 100.0)
    scene.store.own(scene[3])
    scene.store.become(scene[3], Kind.PRIMARY, 101.0)
    scene.store.check_integrity()
    assert scene.store.accesses(scene[3]) == 2
    scene.add(4, 102.0)
    assert {3, 4} < scene.here()


def test_a_refused_hand_over_evicts_no_copy() -> None:
    scene = Scene(Choosy)
    assert scene.add(4, 1.0, kind=Kind.PRIMARY) is Code.NOT_ADMITTED
    assert scene.here() == {0, 1, 2, 3}
