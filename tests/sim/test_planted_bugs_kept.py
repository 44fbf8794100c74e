"""Bugs planted in the rules of kept memory, each found by the state machine of `test_kept_machine`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.plants import Plant, planted
from tests.sim.test_kept_machine import KeptClusterMachine
from tokenlake.core.engines.grants import Grants
from tokenlake.core.instructions import Record
from tokenlake.core.kept import Kept
from tokenlake.core.ledger import Ledger
from tokenlake.core.node import HandlerFailed, NodeCore
from tokenlake.memory import Segment, SegmentStore, State
from tokenlake.memory.kept_slots import KeptSlots
from tokenlake.memory.pool import SlotPool
from tokenlake.memory.region_allocator import RegionAllocator
from tokenlake.memory.removals import OPERATOR_RULE


def ordered_eviction_leaves_the_record(patch: pytest.MonkeyPatch) -> None:
    """A segment that an operator evicts keeps its record: the next daemon has it again."""

    def evict(self: SegmentStore, segment: Segment, now: float, rule: str = OPERATOR_RULE) -> None:
        before = dict(self.recorded or {})
        self._take_out(segment, now, rule)
        self.recorded = before if self.recorded is not None else None

    patch.setattr(SegmentStore, "evict", evict)


def order_forgotten_while_segments_are_checked(patch: pytest.MonkeyPatch) -> None:
    """An order to evict does not reach the segments that were not checked yet, and says that it did."""
    patch.setattr(Kept, "void", lambda self, tenant, keys, slot_bytes: None)
    patch.setattr(Kept, "when_complete", lambda self, call: call())


def record_cleared_behind_the_stamp(patch: pytest.MonkeyPatch) -> None:
    """The records come last among the instructions of an event."""
    original = NodeCore.handle

    def handle(self: NodeCore, event: Any, now: float) -> Any:
        return sorted(original(self, event, now), key=lambda each: isinstance(each, Record))

    patch.setattr(NodeCore, "handle", handle)


def survivor_blocks_nothing(patch: pytest.MonkeyPatch) -> None:
    """Slots of the daemon before get new segments at once, although survivors may use them."""
    original = Kept.memory

    def memory(self: Kept, event: Any) -> None:
        original(self, event)
        for pool in self._context.store.pools():
            while pool.withheld and not self._pending:
                self._slots.release(pool, 100)

    patch.setattr(Kept, "memory", memory)


def refused_survivor_returns(patch: pytest.MonkeyPatch) -> None:
    """A survivor whose grants exceed a limit counts as returned, although it uses the slots."""
    patch.setattr(Kept, "refuse", lambda self, connection: None)
    patch.setattr(Grants, "regrant_item", lambda self, *grant: False)
    patch.setattr(Grants, "add_regranted", lambda self, session, lease: False)


def write_of_a_survivor_is_free(patch: pytest.MonkeyPatch) -> None:
    """The slots that a survivor may still write are not held for it."""
    patch.setattr(Grants, "regrant_slot", lambda self, *grant: True)


def generation_not_continued(patch: pytest.MonkeyPatch) -> None:
    """Generations of kept slots begin anew where the slot has no segment."""
    original = KeptSlots.release

    def release(self: KeptSlots, pool: SlotPool, slots: int) -> bool:
        for region in pool.withheld:
            for slot, segment in enumerate(self._slots._segments[region]):
                if segment is None:
                    self._slots._generations[region][slot] = 0
        return original(self, pool, slots)

    patch.setattr(KeptSlots, "release", release)


def number_of_a_region_again(patch: pytest.MonkeyPatch) -> None:
    """A region gets the number of one that has ended."""
    patch.setattr(RegionAllocator, "number_from", lambda self, region: None)


def kept_segments_evicted(patch: pytest.MonkeyPatch) -> None:
    """Memory pressure evicts segments in slots that survivors may use."""
    original = KeptSlots.add

    def add(self: KeptSlots, segment: Segment, accesses: int, touched: float, now: float) -> None:
        original(self, segment, accesses, touched, now)
        self._store.unpin(segment)

    patch.setattr(KeptSlots, "add", add)


def arrival_without_a_record(patch: pytest.MonkeyPatch) -> None:
    """A copy that another node owns gets no record when it arrives."""
    original = Ledger.take

    def take(self: Ledger) -> Record | None:
        changed = self._context.store.recorded
        for where in [at for at, each in (changed or {}).items() if each.state is State.READY and each.source]:
            assert changed is not None
            del changed[where]
        return original(self)

    patch.setattr(Ledger, "take", take)


PLANTS = (
    ordered_eviction_leaves_the_record,
    order_forgotten_while_segments_are_checked,
    record_cleared_behind_the_stamp,
    survivor_blocks_nothing,
    refused_survivor_returns,
    write_of_a_survivor_is_free,
    generation_not_continued,
    number_of_a_region_again,
    kept_segments_evicted,
    arrival_without_a_record,
)


@pytest.mark.parametrize("plant", planted(PLANTS))
def test_broken_rules_of_kept_memory_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by = settings(max_examples=400, stateful_step_count=30, phases=[Phase.generate], deadline=None)
    with pytest.raises((AssertionError, KeyError, HandlerFailed)):
        run_state_machine_as_test(KeptClusterMachine, settings=found_by)
