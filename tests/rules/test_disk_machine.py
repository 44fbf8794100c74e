"""The disk tier against a model, and bugs planted in it that the model finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from tests.rules.disk_scene import SLOT, TENANT, key_of, segment_of, tier_of
from tokenlake.disk import NO_ENTRY, Place
from tokenlake.disk.admission import Refusal
from tokenlake.disk.index import Index
from tokenlake.disk.slab import Slab
from tokenlake.disk.tier import DiskTier
from tokenlake.memory import Segment, State
from tokenlake.memory.removals import DISK_RULE

PLACES = 3
SEGMENTS = 7
NUMBERS = st.integers(0, SEGMENTS - 1)


class DiskMachine(RuleBasedStateMachine):
    """Segments come to memory and leave it, are written, read, held and forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = tier_of(PLACES)
        self.now = 0.0
        self.memory: dict[int, Segment] = {}
        self.disk: dict[int, Place] = {}
        """What a reader may find, by segment."""
        self.writing: dict[int, tuple[int, Segment, Place, bool]] = {}
        """(entry, segment, place, whether it is void when it is written)."""
        self.held: dict[int, float] = {}
        self.reads: list[tuple[Slab, int]] = []
        self.erasing: list[tuple[Slab, int]] = []
        """Places whose bytes are being erased."""

    reads_under_way = Bundle("reads")

    def _gone(self) -> None:
        """The tier has said which segments are void."""
        for slab, key, place, _, erase, _ in self.tier.take_void():
            if erase:
                self.erasing.append((slab, place.slot))
            number = next(number for number in range(SEGMENTS) if key_of(number) == key)
            if self.disk.get(number) == place:
                assert self.held.get(number, -1.0) <= self.now, f"segment {number} left although it is held"
                del self.disk[number]

    @rule(number=NUMBERS)
    def arrives(self, number: int) -> None:
        """A segment is stored in memory, or read back."""
        if number not in self.memory:
            segment = self.memory[number] = segment_of(number, self.now)
            self.tier.arrived(segment)

    @rule(number=NUMBERS, value=st.floats(0.1, 1.0))
    def is_written(self, number: int, value: float) -> None:
        """A segment is written ahead of its eviction."""
        segment = self.memory.get(number)
        if segment is None or segment.disk >= 0:
            return
        self.tier.evicted(TENANT, segment.slot_bytes, 4, self.now)
        entry = self.tier.admit(segment, 1, value, self.now)
        self._gone()
        if isinstance(entry, Refusal):
            return
        assert number not in self.writing, "two entries have one key"
        place = self.tier.place(entry)
        taken = [(slab.number, slot) for slab, slot in (*self.reads, *self.erasing)]
        assert (self.tier.slab(entry).number, place.slot) not in taken, "a place is written while it is read or erased"
        assert all(place.slot != other.slot for other in self.disk.values()), "a place has two segments"
        assert all(place.slot != each[2].slot for each in self.writing.values()), "a place is written twice"
        self.writing[number] = entry, segment, place, False

    @rule(number=NUMBERS, done=st.booleans())
    def write_ends(self, number: int, done: bool) -> None:
        """A write has ended."""
        if number not in self.writing:
            return
        entry, segment, place, void = self.writing.pop(number)
        self.tier.written(entry, segment, done)
        assert (segment.disk == entry) == (done and not void)
        if done and not void:
            self.disk[number] = place
        self._gone()

    @rule(number=NUMBERS, value=st.floats(0.1, 1.0), done=st.booleans())
    def moves_to_disk(self, number: int, value: float, done: bool) -> None:
        """A segment is stored, written, perhaps in vain, and evicted from memory."""
        self.arrives(number)
        self.is_written(number, value)
        self.write_ends(number, done)
        self.leaves(number, True)

    @rule(first=NUMBERS)
    def fills(self, first: int) -> None:
        """More segments move to disk than it has places."""
        for number in range(first, first + PLACES + 1):
            self.moves_to_disk(number % SEGMENTS, 0.5, True)

    @rule(number=NUMBERS, keep=st.booleans(), erase=st.booleans())
    def leaves(self, number: int, keep: bool, erase: bool = False) -> None:
        """A segment leaves memory: evicted, or void, by an order perhaps."""
        if number in self.writing and keep:
            return
        segment = self.memory.pop(number, None)
        if segment is None:
            return
        segment.state = State.GONE
        if segment.disk < 0:
            return
        if number in self.writing:
            self.writing[number] = (*self.writing[number][:3], True)
        if not keep:
            self.held.pop(number, None)
        writing = number in self.writing
        erase = (erase or writing) and not keep
        assert self.tier.left(segment, 2, keep=keep, erase=erase) == (keep and not writing)
        assert not writing or self.tier.erases_when_written(self.writing[number][0])
        self._gone()

    @rule(target=reads_under_way, number=NUMBERS)
    def read_begins(self, number: int) -> tuple[Slab, int] | None:
        """A segment is read."""
        entry = self.tier.find(TENANT, key_of(number))
        if entry < 0:
            return None
        at = self.tier.begin_read(entry)
        self.reads.append(at)
        return at

    @rule(at=consumes(reads_under_way))
    def read_ends(self, at: tuple[Slab, int] | None) -> None:
        """A read has ended."""
        if at is not None:
            self.reads.remove(at)
            self.tier.end_read(*at, self.now)

    @rule(number=NUMBERS)
    def is_held(self, number: int) -> None:
        """A reader was told of a segment."""
        entry = self.tier.find(TENANT, key_of(number))
        if entry >= 0:
            self.held[number] = self.now + 5.0
            self.tier.hold(entry, self.now + 5.0)

    @rule(number=NUMBERS)
    def is_touched(self, number: int) -> None:
        """Another node read a segment."""
        entry = self.tier.find(TENANT, key_of(number))
        if entry >= 0 and number not in self.memory:
            self.tier.touch(entry, None, self.now)

    @rule(number=NUMBERS, erase=st.booleans())
    def is_void(self, number: int, erase: bool) -> None:
        """A segment is dropped from disk, and erased if an operator has said so."""
        entry = self.tier.find(TENANT, key_of(number))
        if entry >= 0:
            self.held.pop(number, None)
            self.tier.forget(entry, DISK_RULE, erase=erase)
            self._gone()

    @rule()
    def an_erasure_ends(self) -> None:
        """The bytes at a place are erased."""
        if self.erasing:
            self.tier.end_read(*self.erasing.pop(0), self.now)

    @rule(number=NUMBERS, pins=st.integers(0, 1))
    def is_used(self, number: int, pins: int) -> None:
        """A segment in memory is accessed, and perhaps in use from then on."""
        segment = self.memory.get(number)
        if segment is not None:
            segment.touched, segment.pins = self.now, pins

    @rule()
    def memory_needs_a_slot(self) -> None:
        """The tier names a segment that memory can read back, if there is one."""
        segment = self.tier.spare(TENANT, SLOT)
        idle = [n for n, each in self.memory.items() if n in self.disk and each.disk >= 0 and not each.pins]
        assert (segment is None) == (not idle)
        assert segment is None or segment in [self.memory[number] for number in idle]

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds: float) -> None:
        """Holds end."""
        self.now += seconds
        self.tier.expire(self.now)

    @invariant()
    def agrees(self) -> None:
        """The tier finds what the model has, at the same places, and nothing else."""
        for number in range(SEGMENTS):
            entry = self.tier.find(TENANT, key_of(number))
            assert (entry == NO_ENTRY) == (number not in self.disk), f"segment {number}"
            if entry >= 0:
                assert self.tier.place(entry) == self.disk[number]
        self.tier.check_integrity()


DiskMachine.TestCase.settings = settings(deadline=None, stateful_step_count=25)
TestDisk = DiskMachine.TestCase


def place_given_away_during_read(patch: pytest.MonkeyPatch) -> None:
    """A read does not keep the place of its segment."""
    patch.setattr(DiskTier, "begin_read", lambda self, entry: (self.slab(entry), self.place(entry).slot))
    patch.setattr(DiskTier, "end_read", lambda self, slab, slot, now: None)


def place_given_away_during_erasure(patch: pytest.MonkeyPatch) -> None:
    """A place gets another segment before the bytes of the earlier one are erased."""
    original = DiskTier.forget

    def forget(self: DiskTier, entry: int, rule: str, *, erase: bool = False, evicted: bool = False) -> None:
        original(self, entry, rule)
        if erase and self._forgotten:
            self._forgotten[-1] = self._forgotten[-1]._replace(erase=True)

    patch.setattr(DiskTier, "forget", forget)
    patch.setattr(DiskTier, "end_read", lambda self, slab, slot, now: None)


def hold_ignored(patch: pytest.MonkeyPatch) -> None:
    """A segment that a reader was told of is evicted as any other."""
    patch.setattr(DiskTier, "hold", lambda self, entry, until: None)


def hole_in_the_index(patch: pytest.MonkeyPatch) -> None:
    """The index does not close the hole that an entry leaves in its table."""

    def home(key: bytes) -> int:
        return key[0] % 2

    def remove(self: Index, entry: int) -> None:
        at = home(self.key(entry)) & self._mask
        while self._table[at] != entry + 1:
            at = (at + 1) & self._mask
        self._table[at] = 0
        self.states[entry] = 0
        self._unused.append(entry)
        self._count -= 1

    patch.setattr(Index, "remove", remove)
    # The hash of bytes is another one in each process; with this one, entries always stand beside each other.
    patch.setattr("tokenlake.disk.index.hash", home, raising=False)


def found_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """A segment is found while it is still being written."""
    patch.setattr(DiskTier, "find", lambda tier, tenant, key: tier._index.find(tenant, key))


def failed_write_found(patch: pytest.MonkeyPatch) -> None:
    """A write that failed counts as done."""
    original = DiskTier.written
    patch.setattr(DiskTier, "written", lambda self, entry, segment, done: original(self, entry, segment, True))


def generation_kept(patch: pytest.MonkeyPatch) -> None:
    """An evicted segment is not reported as void."""
    original = DiskTier.forget

    def forget(self: DiskTier, entry: int, rule: str, *, erase: bool = False, evicted: bool = False) -> None:
        original(self, entry, rule, erase=erase, evicted=evicted)
        self.take_void()

    patch.setattr(DiskTier, "forget", forget)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plant",
    [
        place_given_away_during_read,
        place_given_away_during_erasure,
        hold_ignored,
        hole_in_the_index,
        found_before_it_is_written,
        failed_write_found,
        generation_kept,
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = settings(max_examples=1000, stateful_step_count=25, phases=[Phase.generate], deadline=None, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(DiskMachine, settings=found)
