"""The state machine finds bugs: each store below breaks one rule and has to be found.

At most 400 examples of 50 steps, the same in every run, without shrinking; each bug is printed with the number of
examples that it took.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.rules.test_store_machine import StoreMachine
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SegmentStore, State
from tokenlake.memory.pool import SlotPool
from tokenlake.memory.slot_table import SlotTable
from tokenlake.wire.codes import Code
from tokenlake.wire.slots import SlotRef

pytestmark = pytest.mark.nightly

SEARCH = settings(
    max_examples=400,
    stateful_step_count=50,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def hidden_pins(segment: Segment) -> Iterator[None]:
    """Hide the pins of a segment."""
    pins, segment.pins = segment.pins, 0
    yield
    segment.pins = pins


class GenerationNotBumped(SegmentStore):
    """A slot keeps its generation when it gets another segment."""

    class Table(SlotTable):
        def next_generation(self, region: int, slot: int) -> SlotRef:
            return SlotRef(*super().next_generation(region, slot)[:2], 1)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slots = self.Table()


class LeaseIgnored(SegmentStore):
    """A leased segment may be the victim, and its slot changes hands at once."""

    def _victim(self, pool: SlotPool, now: float) -> Segment | None:
        leased = (
            s for s in self.segments() if s.state is State.READY and s.kind is not Kind.DIRTY and s.pool == pool.id
        )
        return super()._victim(pool, now) or next(leased, None)

    def _evict(self, segment: Segment, now: float, rule: str = "") -> None:
        with hidden_pins(segment):
            super()._evict(segment, now, rule)

    def unpin(self, *segments: Segment) -> None:
        for segment in segments:
            if segment.state is State.GONE and segment.place not in self._quarantine:
                segment.pins -= 1
            else:
                super().unpin(segment)


class QuarantineFreedAtOnce(SegmentStore):
    """The slot of a discarded segment is free although a process may still use it."""

    def _take_out(self, segment: Segment, now: float, rule: str) -> None:
        with hidden_pins(segment):
            super()._take_out(segment, now, rule)

    def unpin(self, *segments: Segment) -> None:
        for segment in segments:
            if segment.state is State.GONE:
                segment.pins -= 1
            else:
                super().unpin(segment)


class QuarantineNeverFreed(SegmentStore):
    """The slot is not freed with the last pin: a leak that agrees with all counts."""

    def unpin(self, *segments: Segment) -> None:
        super().unpin(*(s for s in segments if s.state is not State.GONE or s.pins > 1))


class DirtyEvictable(SegmentStore):
    """A dirty copy is evicted."""

    def _victim(self, pool: SlotPool, now: float) -> Segment | None:
        dirty = (s for s in self.segments() if s.kind is Kind.DIRTY and s.state is State.READY and not s.pins)
        return super()._victim(pool, now) or next((s for s in dirty if s.pool == pool.id), None)


class CopiesAsLastOnes(SegmentStore):
    """A copy that another node has too counts as much as the last one."""

    def _victim(self, pool: SlotPool, now: float) -> Segment | None:
        found = [pool.victim(kind, now) for kind in (Kind.CACHED, Kind.PRIMARY)]
        return min(
            (each for each in found if each is not None),
            key=lambda each: pool.orders[each.kind].rank(each, now),
            default=None,
        )


class DirtyBudgetIgnored(SegmentStore):
    """Writes take any slot."""

    def reserve(
        self, tenant: TenantId, slot_bytes: int, key: SegmentKey, kind: Kind, *args: Any, **more: Any
    ) -> Segment | Code:
        result = super().reserve(tenant, slot_bytes, key, kind, *args, **more)
        if result is not Code.WRITE_BUDGET:
            return result
        result = super().reserve(tenant, slot_bytes, key, Kind.PRIMARY, *args, **more)
        if isinstance(result, Segment):
            self.become(result, kind, args[1])
        return result


class ParentTouchedFirst(SegmentStore):
    """A prompt is touched from its start, so that parents are evicted before their children."""

    def touch(
        self, segments: Sequence[Segment], now: float, hints: Hints | None = None, *, for_peer: bool = False
    ) -> None:
        super().touch(segments[::-1], now, hints, for_peer=for_peer)


class PrimariesEvictedFirst(SegmentStore):
    """A primary copy leaves while a cached one of less value is there."""

    def _victim(self, pool: SlotPool, now: float) -> Segment | None:
        return pool.victim(Kind.PRIMARY, now) or super()._victim(pool, now)


class TenantDropped(SegmentStore):
    """All tenants share one index."""

    def get(self, tenant: TenantId, key: SegmentKey) -> Segment | None:
        return next((index[key] for index in self._index.values() if key in index), None)


PLANTED: dict[type[SegmentStore], str] = {
    GenerationNotBumped: "generation of .* did not grow|its slot has generation",
    LeaseIgnored: "must come to <Code.NO_SLOT",
    QuarantineFreedAtOnce: "quarantines counted|free slots of|handed out a slot of",
    QuarantineNeverFreed: "free slots of|quarantine is not empty",
    DirtyEvictable: "must come to <Code.NO_SLOT",
    CopiesAsLastOnes: r"handed out a slot of|= len\(",
    DirtyBudgetIgnored: "must come to <Code.WRITE_BUDGET|came to <Code.NO_SLOT",
    ParentTouchedFirst: "next .* victim of|handed out a slot of",
    PrimariesEvictedFirst: "handed out a slot of",
    TenantDropped: "asking for .* came to",
}
"""The failure that the machine reports, by store."""


def search(store: type[SegmentStore]) -> None:
    """Run the machine until it fails; its AssertionError passes through."""
    tried = 0

    class Planted(StoreMachine):
        make_store = store

        def __init__(self) -> None:
            nonlocal tried
            tried += 1
            super().__init__()

    try:
        run_state_machine_as_test(Planted, settings=SEARCH)
    except AssertionError as error:
        print(f"{store.__name__}: found in example {tried}:", str(error).partition("\n")[0])
        raise


@pytest.mark.parametrize("store", PLANTED, ids=lambda store: store.__name__)
def test_the_machine_finds(store: type[SegmentStore]) -> None:
    with pytest.raises(AssertionError, match=PLANTED[store]):
        search(store)
