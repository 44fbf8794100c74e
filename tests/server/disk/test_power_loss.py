"""After a power failure at any operation the tier gives back the right bytes or none, and all that was synced."""

from __future__ import annotations

import random

import pytest

from tests.profiles import examples
from tests.server.disk.medium import Medium, MediumFiles, PowerFailure
from tests.server.disk.scene import Entry, bytes_of, commit, entries, entry, note_of, put
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.segments import Mismatch, SegmentIO, aligned_memory
from tokenlake_server.disk.store import DiskStore

pytestmark = pytest.mark.nightly

SEEDS = 300
FAILURES = 3
"""Power failures of one seed, one after the other."""
PLACES = 10
"""Places of each slab: few, so that most writes replace an earlier segment."""
SLABS = [("a", 4096), ("a", 1000), ("b", 4096)]
Slot = tuple[str, int, int]


class Run:
    """A medium, and what must be on it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.medium = Medium()
        self.keys = DiskKeys([b"k" * 32]) if self.chance.random() < 0.5 else DiskKeys()
        self.synced: dict[Slot, Entry] = {}
        """The segments of which the store said that they are on the device, and that were not forgotten since."""
        self.erased: set[Entry] = set()
        """The segments of which the store said that they are erased."""
        self.generations: dict[tuple[str, int], int] = {}
        self.number = 0
        self.asked = self.back = 0

    def work(self, store: DiskStore, io: SegmentIO) -> None:
        """Store, forget, erase and trim until the power fails, or for a while."""
        for _ in range(self.chance.randint(1, 12)):
            tenant, slot_bytes = self.chance.choice(SLABS)
            slots = self.chance.sample(range(PLACES), self.chance.choice((1, 2, 3, PLACES)))
            there = [self.synced.pop((tenant, slot_bytes, slot), None) for slot in slots]
            if self.chance.random() < 0.2:
                erased = [each for each in there if each is not None]
                for each in erased:
                    store.erase(io, each.where)
                store.sync_slabs()
                store.forget(tenant, slot_bytes, [each.slot for each in erased])
                store.sync()
                self.erased |= set(erased)
            store.forget(tenant, slot_bytes, slots)
            action = self.chance.random()
            if action < 0.1:
                kept = self.chance.randint(0, PLACES)
                for slot in range(kept, PLACES):
                    self.synced.pop((tenant, slot_bytes, slot), None)
                store.will_trim(tenant, slot_bytes, kept)
                store.trim(tenant, slot_bytes, kept)
            elif action < 0.9:
                written = [self.new(tenant, slot_bytes, slot) for slot in slots]
                for each in written:
                    put(store, io, each)
                commit(store, written)
                self.synced |= {(tenant, slot_bytes, each.slot): each for each in written}

    def new(self, tenant: str, slot_bytes: int, slot: int) -> Entry:
        self.number += 1
        self.generations[tenant, slot_bytes] = generation = self.generations.get((tenant, slot_bytes), 0) + 1
        return entry(self.number, slot, generation, slot_bytes, tenant)

    def check(self, store: DiskStore, found: list[Entry], io: SegmentIO) -> None:
        """Read all that was found. A wrong byte fails the test."""
        right: set[Entry] = set()
        for each in found:
            assert each.note == note_of(each.key)
            segment = aligned_memory(each.slot_bytes)
            try:
                store.read(io, each.where, segment)
            except Mismatch:
                continue
            assert bytes(segment) == bytes_of(each.key, each.slot_bytes)
            right.add(each)
        assert not self.erased & right
        self.asked += len(self.synced)
        self.back += len(set(self.synced.values()) & right)
        # As the rules do: the generations continue above those that were found.
        self.generations = {
            slab: max((each.generation for each in found if (each.tenant, each.slot_bytes) == slab), default=0)
            for slab in SLABS
        }
        self.synced = {(each.tenant, each.slot_bytes, each.slot): each for each in right}


def run(seed: int) -> Run:
    state = Run(seed)
    for _ in range(FAILURES + 1):
        files = MediumFiles(state.medium)
        store = DiskStore(files, growth_bytes=20_000)
        state.medium.fuse = state.chance.randint(1, 150)
        try:
            found = [each for part in store.open("cluster", "node", state.keys) for each in entries(part)]
            io = SegmentIO(state.keys)
            state.check(store, found, io)
            state.work(store, io)
        except PowerFailure:
            pass
        state.medium.lose_power(state.chance)
    files = MediumFiles(state.medium)
    store = DiskStore(files)
    found = [each for part in store.open("cluster", "node", state.keys) for each in entries(part)]
    state.check(store, found, SegmentIO(state.keys))
    return state


@pytest.mark.slow
def test_power_failures() -> None:
    asked = back = 0
    for seed in range(examples(SEEDS)):
        try:
            state = run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        asked += state.asked
        back += state.back
    print(f"{back} of {asked} synced segments came back")
    assert asked > 5 * examples(SEEDS)
    assert back == asked
