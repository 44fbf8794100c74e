"""The index: which records are in force, snapshots, cut and damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.server.disk.medium import Medium, MediumFiles
from tests.server.disk.scene import key_of
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_server.disk.index import RECORD, Index, Kind, Records, live_records, read_index


def record(kind: int, slab: int, slot: int, number: int = 0) -> Records:
    records = np.zeros(1, RECORD)
    records["kind"], records["slab"], records["slot"], records["generation"] = kind, slab, slot, number
    records["key"] = np.void(key_of(number))
    return records


def numbers(records: Records) -> list[int]:
    return [int.from_bytes(key.tobytes(), "big") for key in records["key"]]


def test_the_last_record_of_a_place_counts() -> None:
    records = np.concatenate(
        [
            record(Kind.STORED, 0, 5, 1),
            record(Kind.STORED, 1, 5, 2),
            record(Kind.STORED, 0, 6, 3),
            record(Kind.FORGOTTEN, 0, 5),
            record(Kind.STORED, 0, 5, 4),
            record(Kind.FORGOTTEN, 0, 6),
        ]
    )
    assert numbers(live_records(records).stored) == [4, 2]


def test_a_trim_ends_the_records_before_it() -> None:
    records = np.concatenate(
        [record(Kind.STORED, 0, slot, slot) for slot in range(4)]
        + [record(Kind.STORED, 1, 3, 7), record(Kind.TRIMMED, 0, 2), record(Kind.STORED, 0, 3, 9)]
    )
    assert numbers(live_records(records).stored) == [0, 1, 9, 7]


def test_no_records() -> None:
    live = live_records(np.zeros(0, RECORD))
    assert len(live.slabs) == len(live.stored) == 0


def test_a_snapshot_replaces_the_logs() -> None:
    medium = Medium()
    index = Index(MediumFiles(medium), least_snapshot_bytes=1000)
    index.recover()
    for number in range(100):
        index.append(record(Kind.STORED, 0, number % 10, number))
        index.sync()
        if index.wants_snapshot:
            index.snapshot()
    index.close()
    assert len(medium.names) == 2
    assert numbers(Index(MediumFiles(medium)).recover().stored) == list(range(90, 100))


def test_many_starts_make_a_snapshot() -> None:
    medium = Medium()
    for number in range(30):
        index = Index(MediumFiles(medium))
        index.recover()
        index.append(record(Kind.STORED, 0, number, number))
        index.sync()
        if index.wants_snapshot:
            index.snapshot()
        index.close()
    assert len(medium.names) < 12
    assert numbers(Index(MediumFiles(medium)).recover().stored) == list(range(30))


@pytest.mark.parametrize("at", [0, 5, 9, 12, 40, 107])
def test_a_damaged_frame_ends_a_log(at: int) -> None:
    medium = Medium()
    index = Index(MediumFiles(medium))
    index.recover()
    for number in range(3):
        index.append(record(Kind.STORED, 0, number, number))
    index.sync()
    index.close()
    frame = 12 + RECORD.itemsize
    medium.names["log-00000001"].content[frame + at] ^= 0x10
    assert numbers(live_records(read_index(MediumFiles(medium))[0]).stored) == [0]
    # Later logs count all the same.
    index = Index(MediumFiles(medium))
    index.recover()
    index.append(record(Kind.STORED, 0, 9, 9))
    assert numbers(Index(MediumFiles(medium)).recover().stored) == [0, 9]


def test_100_000_segments_are_read(tmp_path: Path) -> None:
    files = DirectoryFiles(tmp_path)
    index = Index(files)
    index.recover()
    for first in range(0, 100_000, 64):
        records = np.zeros(64, RECORD)
        records["kind"], records["slot"] = Kind.STORED, np.arange(first, first + 64)
        index.append(records)
    index.sync()
    index.close()
    live = Index(files).recover()
    files.close()
    assert len(live.stored) == 100_032
