"""Segments for tests of the disk tier: the bytes of a segment follow from its key."""

from __future__ import annotations

import random
from typing import NamedTuple

import xxhash

from tokenlake.disk.places import NOTE_BYTES, PLACE_BYTES, unpack_places
from tokenlake.keys import KEY_BYTES
from tokenlake_server.disk.segments import SegmentIO, Stored, StoredSegment, aligned_memory
from tokenlake_server.disk.store import DiskStore, Found, Place

SHARDS = 2


def key_of(number: int) -> bytes:
    """The key of a segment."""
    return number.to_bytes(KEY_BYTES, "big")


def bytes_of(key: bytes, nbytes: int) -> bytes:
    """The bytes of the segment `key`."""
    return random.Random(key).randbytes(nbytes)


def checksums_of(segment: bytes | memoryview) -> bytes:
    """The checksums of the shards."""
    size = len(segment) // SHARDS
    return b"".join(
        xxhash.xxh3_64_intdigest(segment[at : at + size]).to_bytes(8, "little") for at in range(0, size * SHARDS, size)
    )


def note_of(key: bytes) -> bytes:
    """The note of a segment."""
    return key.ljust(NOTE_BYTES, b"n")


class Entry(NamedTuple):
    """One segment that a store found."""

    tenant: str
    slot_bytes: int
    slot: int
    generation: int
    key: bytes
    note: bytes

    @property
    def where(self) -> StoredSegment:
        return StoredSegment(self.tenant, self.slot_bytes, SHARDS, self.key, self.slot, self.generation)


def entries(found: Found) -> list[Entry]:
    """The segments of one slice."""
    places = unpack_places(found.places)
    assert len(found.keys) == KEY_BYTES * len(places)
    assert len(found.places) == PLACE_BYTES * len(places)
    assert found.shards == SHARDS
    return [
        Entry(
            found.slab.tenant,
            found.slab.slot_bytes,
            *place,
            found.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES],
            found.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES],
        )
        for at, place in enumerate(places)
    ]


def put(store: DiskStore, io: SegmentIO, entry: Entry, content: bytes = b"") -> None:
    """Write a segment; nothing is synced or recorded."""
    segment = aligned_memory(entry.slot_bytes)
    segment[:] = bytes_of(entry.key, entry.slot_bytes)
    store.will_write(entry.tenant, entry.slot_bytes, entry.slot + 1)
    store.write(io, entry.where, segment, Stored(checksums_of(segment), content, entry.note))


def commit(store: DiskStore, written: list[Entry]) -> None:
    """Sync and record segments of one slab."""
    store.sync_slabs()
    first = written[0]
    store.stored(
        first.tenant,
        first.slot_bytes,
        [Place(each.slot, each.generation, SHARDS, each.key, each.note) for each in written],
    )
    store.sync()


def entry(number: int, slot: int, generation: int = 1, slot_bytes: int = 4096, tenant: str = "default") -> Entry:
    """An entry of the segment with the key `number`."""
    key = key_of(number)
    return Entry(tenant, slot_bytes, slot, generation, key, note_of(key))
