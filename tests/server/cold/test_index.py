"""The index of the cold tier against a plain dictionary, its objects against damage, and its size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake_server.cold.base import Unfit, read_whole, write_whole
from tokenlake_server.cold.catalogue import ROOT, TABLES, Catalogue, Clock
from tokenlake_server.cold.directory import DirectoryObjects
from tokenlake_server.cold.index import Index
from tokenlake_server.cold.records import (
    ENTRY_BYTES,
    ERASED,
    MAX_JOURNAL,
    REMOVED,
    Entries,
    Kind,
    Kinds,
    Part,
    Root,
    TableName,
    combined,
    most_bytes,
    pack_part,
    pack_root,
    read_part,
    read_root,
)
from tokenlake_server.cold.sealed import object_bytes

changes = st.dictionaries(
    st.integers(0, 30), st.tuples(st.sampled_from([0, 1, REMOVED, ERASED]), st.integers(0, 9)), max_size=20
)


def packed(part: Part, kinds: Kinds) -> memoryview:
    return memoryview(b"".join(pack_part(part, kinds)))


def kinds_of_two() -> Kinds:
    kinds = Kinds()
    assert [kinds.number(Kind(7, size)) for size in (4096, 8192)] == [0, 1]
    return kinds


def as_dict(entries: Entries) -> dict[int, tuple[int, int]]:
    return dict(
        zip(entries.shorts.tolist(), zip(entries.kinds.tolist(), entries.minutes.tolist(), strict=True), strict=True)
    )


@given(st.lists(changes, max_size=5))
def test_parts_are_combined_as_a_dictionary_would(parts: list[dict[int, tuple[int, int]]]) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for part in reversed(parts):
        for name, (kind, minute) in part.items():
            before, last = expected.get(name, (0, -1))
            later = minute > last or (minute == last and (kind >= ERASED or before < ERASED))
            if later:
                expected[name] = kind, minute
    found = combined([Entries.of(part) for part in parts])
    assert as_dict(found) == expected
    assert found.shorts.tolist() == sorted(expected)


@given(changes)
def test_a_part_is_read_as_it_was_packed(part: dict[int, tuple[int, int]]) -> None:
    entries = Entries.of(part)
    other = Kinds()
    other.number(Kind(1, 1))
    read = read_part(packed(Part("writer", entries), kinds_of_two()), other)
    assert read.writer == "writer"
    named = {
        name: (kind if kind >= ERASED else [Kind(7, 4096), Kind(7, 8192)].index(other.all[kind]), minute)
        for name, (kind, minute) in as_dict(read.entries).items()
    }
    assert named == part


@given(st.lists(st.tuples(changes, changes, changes), max_size=4))
def test_the_index_says_what_happened(steps: list[tuple[dict[int, tuple[int, int]], ...]]) -> None:
    index = Index()
    for size in (4096, 8192):
        index.kinds.number(Kind(7, size))
    for table, journal, own in steps:
        index.replace((Entries.of(table),), [Entries.of(journal)])
        index.check_integrity()
        for name, (kind, minute) in own.items():
            if kind >= ERASED:
                index.removed([name], minute, kind)
            else:
                index.added(name, index.kinds.all[kind], minute)
            assert index.state(name)[0] == kind
        index.heard(Entries.of(journal))
        index.check_integrity()
        names = np.arange(31, dtype=np.uint64)
        for number, kind_ in enumerate(index.kinds.all):
            found = index.find(names, kind_)
            assert list(found) == [index.state(name)[0] == number for name in range(31)]
        assert sum(len(each.shorts) for each in index.objects()) == index.totals.objects
        taken = index.take_own()
        index.give_back(taken)
        assert as_dict(index.take_own()) == as_dict(taken)


def test_the_longest_unused_objects_expire_first() -> None:
    index = Index()
    kind = Kind(1, 4096)
    for name in range(100):
        index.added(name, kind, 1000 + name)
    size = object_bytes(4096)
    assert index.oldest(0, 1000, 1100).tolist() == []
    assert index.oldest(0, 1010, 1100).tolist() == list(range(10))
    assert sorted(index.oldest(25 * size, 1010, 1100).tolist()) == list(range(25))
    assert sorted(index.oldest(5 * size, 1010, 1100).tolist()) == list(range(10))
    assert len(index.oldest(10**12, 1000, 1100)) == 100
    index.added(200, kind, 4_000_000_000)
    assert index.oldest(0, 1000, 1100).tolist() == [200]


def test_objects_of_one_minute_expire_in_part() -> None:
    index = Index()
    for name in range(100):
        index.added(name, Kind(1, 4096), 1000)
    assert len(index.oldest(10 * object_bytes(4096), 900, 1100)) == 10


def test_names_of_one_folder() -> None:
    index = Index()
    names = [folder << 56 | low for folder in (0, 7, 8, 255) for low in (0, 5, (1 << 56) - 1)]
    for name in names:
        index.added(name, Kind(1, 4096), 1)
    assert index.of_folder(7).shorts.tolist() == names[3:6]
    assert index.of_folder(255).shorts.tolist() == names[9:]


def damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    match chance.randrange(4):
        case 0:
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1:
            del changed[chance.randrange(len(data)) :]
        case 2:
            changed += bytes(chance.randrange(1, 100))
        case 3:
            at = chance.randrange(len(data))
            changed[at : at + 8] = chance.randbytes(8)
    return bytes(changed)


def test_damaged_parts_and_roots_are_refused() -> None:
    chance = random.Random(3)
    kinds = kinds_of_two()
    part = bytes(packed(Part("w", Entries.of({name: (name % 2, name) for name in range(50)})), kinds))
    root = pack_root(Root(3, (TableName("index/table/1", 5),), {"index/journal/1": 7}, "w"))
    for _ in range(500):
        for data, read in ((part, lambda each: read_part(each, Kinds())), (root, read_root)):
            changed = damaged(data, chance)
            if changed != data:
                with pytest.raises(Unfit):
                    read(memoryview(changed))


@pytest.mark.parametrize(
    ("path", "why"),
    [("../../etc/passwd", "path"), ("/etc/passwd", "path"), ("index/.hidden", "path"), ("a\nb", "path"), ("", "path")],
)
def test_a_root_with_hostile_names_is_refused(path: str, why: str) -> None:
    for root in (Root(1, (TableName(path, 1),)), Root(1, (), {path: 1})):
        with pytest.raises(Unfit, match=why):
            read_root(memoryview(pack_root(root)))


def test_hostile_parts_with_right_digests_are_refused() -> None:
    entries = Entries(np.array([5, 5], np.uint64), np.array([0, 0], np.uint16), np.array([1, 1], np.uint32))
    with pytest.raises(Unfit, match="order"):
        read_part(packed(Part("w", entries), kinds_of_two()), Kinds())
    many = Kinds()
    for tag in range(4096):
        many.number(Kind(tag, 1))
    with pytest.raises(Unfit, match="kinds"):
        read_part(packed(Part("w", Entries.of({1: (0, 1)})), kinds_of_two()), many)


def test_a_million_entries(tmp_path: Path) -> None:
    """The index of a place with a million objects, as a process that starts reads it: 14 bytes each."""
    chance = np.random.default_rng(1)
    names = np.unique(chance.integers(0, 1 << 63, 1_000_000, dtype=np.uint64))
    kinds = kinds_of_two()
    entries = Entries(names, np.zeros(len(names), np.uint16), np.full(len(names), 9, np.uint32))
    place = DirectoryObjects(tmp_path)
    table = f"{TABLES}/{0:016x}"
    data = packed(Part("w", entries), kinds)
    assert len(data) < ENTRY_BYTES * len(names) + 200
    write_whole(place, table, data)
    write_whole(place, ROOT, pack_root(Root(1, (TableName(table, len(names)),))))
    index = Index()
    catalogue = Catalogue(place, index, Clock())
    catalogue.poll()
    assert index.totals == (len(names), len(names) * object_bytes(4096))
    assert sum(each.nbytes for each in index._tables[0]) == ENTRY_BYTES * len(names)
    asked = np.concatenate([names[:64], names[:64] ^ np.uint64(1)])
    assert sum(index.find(asked, Kind(7, 4096))) == 64
    index.added(5, Kind(7, 4096), 1)
    catalogue.flush()
    catalogue.poll()
    assert catalogue.merge(1e6)
    catalogue.poll()
    assert index.totals.objects == len(names) + 1
    assert len(list(place.list(TABLES))) == 2, "a merge of one name does not write the million again"
    place.close()


def test_a_table_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    place = DirectoryObjects(tmp_path)
    table = f"{TABLES}/{1:016x}"
    write_whole(place, table, b"x")
    with (tmp_path / table).open("r+b") as file:
        file.truncate(1 << 42)
    write_whole(place, ROOT, pack_root(Root(1, (TableName(table, 1 << 20),))))
    index = Index()
    catalogue = Catalogue(place, index, Clock())
    catalogue.poll()
    assert index.totals.objects == 0
    assert "missing, damaged or too large" in catalogue.problem
    with pytest.raises(Unfit):
        read_whole(place, table, most_bytes(MAX_JOURNAL))
    place.close()
