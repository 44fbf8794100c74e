"""Files of a device with any damage: the right segments or none, and what was erased stays so."""

from __future__ import annotations

import random

import pytest

from tests.profiles import examples
from tests.server.disk.medium import Inode, Medium, MediumFiles
from tests.server.disk.scene import Entry, bytes_of, commit, entries, entry, put
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.segments import Mismatch, SegmentIO, aligned_memory
from tokenlake_server.disk.store import DiskStore, Unusable

SEEDS = 200
SLABS = [("a", 4096), ("a", 9000), ("b", 4096)]
SEGMENTS = 12


def filled(keys: DiskKeys) -> tuple[Medium, set[Entry], set[Entry]]:
    """A device, its segments, and those that were erased."""
    medium = Medium()
    files = MediumFiles(medium)
    store = DiskStore(files, growth_bytes=100_000)
    assert list(store.open("cluster", "node", keys)) == []
    io = SegmentIO(keys)
    stored: set[Entry] = set()
    erased: set[Entry] = set()
    for tenant, slot_bytes in SLABS:
        written = [entry(slot, slot, 1, slot_bytes, tenant) for slot in range(SEGMENTS)]
        for each in written:
            put(store, io, each)
        commit(store, written)
        for each in written[::3]:
            store.erase(io, each.where)
        store.sync_slabs()
        store.forget(tenant, slot_bytes, [each.slot for each in written[::3]])
        store.sync()
        erased |= set(written[::3])
        stored |= set(written) - set(written[::3])
    store.close()
    return medium, stored, erased


def damage(medium: Medium, chance: random.Random) -> None:
    """Damage some files: bits, blocks, ends, or whole files."""
    for _ in range(chance.randint(1, 4)):
        name = chance.choice(sorted(medium.names))
        content = medium.names[name].content
        kind = chance.randrange(6)
        at = chance.randrange(max(1, len(content)))
        if kind <= 1 and content:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            size = min(512 << chance.randrange(4), len(content) - at)
            content[at : at + size] = chance.randbytes(size)
        elif kind == 3:
            del content[at:]
        elif kind == 4:
            content.extend(chance.randbytes(at))
        else:
            fresh = Inode()
            if chance.random() < 0.5:
                fresh.content[:] = medium.names[chance.choice(sorted(medium.names))].content
            medium.names[name] = fresh


@pytest.mark.parametrize("keys", [DiskKeys(), DiskKeys([b"k" * 32])], ids=["plain", "encrypted"])
def test_any_damage(keys: DiskKeys) -> None:
    back = 0
    for seed in range(examples(SEEDS)):
        chance = random.Random(seed)
        medium, stored, erased = filled(keys)
        damage(medium, chance)
        store = DiskStore(MediumFiles(medium))
        io = SegmentIO(keys)
        right: set[Entry] = set()
        try:
            parts = store.open("cluster", "node", keys)
        except Unusable:  # both copies of the identity are damaged
            continue
        for part in parts:
            for each in entries(part):
                segment = aligned_memory(each.slot_bytes)
                try:
                    store.read(io, each.where, segment)
                except Mismatch:
                    continue
                assert bytes(segment) == bytes_of(each.key, each.slot_bytes), seed
                assert each in stored, seed
                right.add(each)
        assert not right & erased, seed
        back += len(right)
        store.close()
    assert back > 0.5 * examples(SEEDS) * len(stored)
