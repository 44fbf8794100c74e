"""The ledger says what memory holds, also when its daemon was killed while it wrote."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tokenlake.memory import ledger
from tokenlake.memory.ledger import Record
from tokenlake.memory.region import PAGE
from tokenlake.wire.slots import SlotRef
from tokenlake_server.kept.ledger_file import LedgerFile, LedgerRefused, Owner, clear_void, found_records

OWNER = Owner("node", "cluster", False)
MEMORY, REGIONS, MIB = 64 << 20, 8, 1 << 20
DIGEST = bytes(range(16))


def made() -> LedgerFile:
    return LedgerFile.make(OWNER, 7, REGIONS, MEMORY)


def again(book: LedgerFile, owner: Owner = OWNER, memory: int = MEMORY) -> LedgerFile:
    """As the next daemon sees it."""
    return LedgerFile.adopt(os.dup(book.descriptor), owner, REGIONS, memory)


def record(generation: int, fill: int = 1) -> bytes:
    return ledger.pack(Record(generation, bytes([fill] * 32), True, 0, bytes(48), 0.0, 0.0, bytes(16)))  # type: ignore[arg-type]


def test_regions_and_records() -> None:
    book = made()
    assert book.add_region(3, 8 * MIB, 7)
    assert book.add_region(4, 8 * MIB, 7)
    assert book.cut(4, 7 * MIB, MIB, "red", DIGEST)
    book.note_number(4)
    book.note_number(3)
    book.write(SlotRef(4, 2, 9), record(9))
    book.write(SlotRef(4, 6, 1), record(1))
    book.write(SlotRef(4, 7, 1), record(1))  # no such slot
    book.write(SlotRef(9, 0, 1), record(1))  # no such region
    book.clean = True
    found = again(book)
    assert (found.incarnation, found.next_region, found.clean) == (7, 5, True)
    spare, cut = found.entries()
    assert (spare.number, spare.nbytes, spare.slot_bytes, spare.maker) == (3, 8 * MIB, 0, 7)
    assert (cut.number, cut.nbytes, cut.slot_bytes, cut.tenant, cut.digest) == (4, 7 * MIB, MIB, "red", DIGEST)
    marks = np.array([0, 0, 9, 0, 0, 0, 2], np.uint64)
    ((slot, raw),) = found_records(found.records(4), marks)
    assert (slot, ledger.unpack(raw)) == (2, ledger.unpack(record(9))), "slot 6 has another generation"
    clear_void(found.records(4), marks)
    later = np.array([0, 0, 9, 0, 0, 0, 1], np.uint64)
    assert [slot for slot, _ in found_records(found.records(4), later)] == [2], "slot 6 had another generation before"
    found.write(SlotRef(4, 2, 9), b"")
    assert list(found_records(found.records(4), marks)) == []
    found.take_over(8)
    assert (again(book).incarnation, again(book).clean) == (8, False)


def test_locks() -> None:
    book = made()
    for number in (5, 1 << 62, 7):
        assert book.add_lock(number)
    book.remove_lock(5)
    book.remove_lock(9)
    assert sorted(again(book).locks) == [7, 1 << 62]
    found = again(book)
    found.remove_lock(7)
    assert found.add_lock(11)
    assert sorted(again(book).locks) == [11, 1 << 62]
    assert [found.add_lock(100 + each) for each in range(20_000)].count(True) == 16_382


def test_an_entry_that_was_being_written_does_not_count() -> None:
    book = made()
    for number in range(3):
        book.add_region(number, MIB, 7)
    with_entry = os.pread(book.descriptor, 16, PAGE + 144)
    os.pwrite(book.descriptor, bytes([with_entry[8] ^ 1]), PAGE + 144 + 8)
    assert [each.number for each in again(book).entries()] == [0, 2]


def test_records_of_an_ended_region_are_not_found() -> None:
    book = made()
    book.add_region(0, MIB, 7)
    book.cut(0, MIB, 64 << 10, "red", DIGEST)
    at = book.entries()[0].records_at
    book.write(SlotRef(0, 0, 1), record(1))
    # The daemon is killed within `remove`: the entry is gone, the records are there.
    os.pwrite(book.descriptor, bytes(144), PAGE)
    book = again(book)
    assert book.entries() == []
    book.add_region(1, MIB, 8)
    book.cut(1, MIB, 64 << 10, "blue", DIGEST)
    assert book.entries()[0].records_at == at
    assert list(found_records(book.records(1), np.ones(16, np.uint64))) == []


def test_room_for_records_is_used_again() -> None:
    book = made()
    ends = set()
    for number in range(5000):
        assert book.add_region(number, MIB, 7)
        assert book.cut(number, MIB, 4096, "red", DIGEST)
        ends.add(book.entries()[-1].records_at)
        if number >= 3:
            book.remove(number - 3)
    assert len(ends) <= 4


def test_a_table_without_room() -> None:
    book = made()
    added = [book.add_region(number, MIB, 7) for number in range(2000)]
    assert added.count(True) == 1024
    assert not book.cut(1999, MIB, 4096, "red", DIGEST)


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (Owner("other", "cluster", False), "it is of node node of cluster cluster, and this is node other"),
        (Owner("node", "other", False), "of cluster other"),
        (Owner("node", "cluster", True), "'huge_pages' has changed"),
    ],
)
def test_the_ledger_of_another_daemon(owner: Owner, reason: str) -> None:
    with pytest.raises(LedgerRefused, match=reason):
        again(made(), owner)


def test_another_format() -> None:
    book = made()
    os.pwrite(book.descriptor, b"\x63", 8)
    with pytest.raises(LedgerRefused, match="has the format 99, and this version of tokenlake reads 1"):
        again(book)


def test_descriptors_that_were_not_handed_over() -> None:
    book = made()
    book.set_complete(False)
    with pytest.raises(LedgerRefused, match="before all of its descriptors were handed over"):
        again(book)


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    short = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    with pytest.raises(LedgerRefused):
        LedgerFile.adopt(short, OWNER, REGIONS, MEMORY)
    for number in (short, os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)):
        os.ftruncate(number, 1 << 20)
        with pytest.raises((LedgerRefused, OSError)):
            LedgerFile.adopt(number, OWNER, REGIONS, MEMORY)


def test_larger_memory() -> None:
    book = made()
    book.add_region(0, MIB, 7)
    found = again(book, memory=1 << 36)
    assert [each.number for each in found.entries()] == [0]
    assert os.fstat(book.descriptor).st_size > (1 << 36) // 8


def test_memory_is_taken_as_it_is_written() -> None:
    book = made()
    book.add_region(0, 8 * MIB, 7)
    book.cut(0, 8 * MIB, 128 << 10, "red", DIGEST)
    for slot in range(64):
        book.write(SlotRef(0, slot, 1), record(1))
    assert os.fstat(book.descriptor).st_blocks * 512 < 256 << 10
