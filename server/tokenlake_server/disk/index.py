"""The index of a device: which place of which slab holds which segment, as a log of records and snapshots of it.

::

    snapshot-N      all records that were in force at the end of log N
    log-N+1 ...     later records; a start of the daemon begins a new log

A log is a sequence of frames, and a frame is made and read as a whole::

    | magic, number of records, CRC of the records | records of 96 bytes |

The last frame may be cut off, because the daemon or the machine failed while it was written; it is not in force then,
and neither is anything behind it. A snapshot gets its name when all its bytes are on the device, and the files that it
replaces are removed afterwards.

The records of one place follow the order of its use: the last one counts. Nothing is kept in memory per segment.
"""

from __future__ import annotations

import logging
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.disk.places import NOTE_BYTES
from tokenlake.keys import KEY_BYTES
from tokenlake_server.disk.files import File, Files

__all__ = ["RECORD", "Index", "Kind", "Live", "Records", "is_index_name", "live_records", "read_index"]

log = logging.getLogger(__name__)

RECORD = np.dtype(
    [
        ("kind", "u1"),
        ("shards", "u1"),
        ("slab", "<u2"),
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("encryption", "<u4"),
        ("key", f"V{KEY_BYTES}"),
        ("note", f"V{NOTE_BYTES}"),
    ]
)
"""One record. `encryption`: number of the key of the setting `disk_keys`, 0 for none."""
Records = NDArray[np.void]

_FRAME = struct.Struct("<4sII")
_MAGIC = b"TLF1"
MAX_FRAME_RECORDS = 1 << 16
LEAST_SNAPSHOT_BYTES = 4 << 20
"""Bytes of logs below which no snapshot is made."""
MAX_LOGS = 8
"""Number of earlier logs at which a snapshot is made, whatever their size."""
_NAME = re.compile(r"(log|snapshot)-([0-9]{8})")
_FRESH = "snapshot.new"
_READ_BYTES = 8 << 20


class Kind:
    """The kinds of a record."""

    STORED = 1
    """The place `slot` of a slab holds a segment."""
    FORGOTTEN = 2
    """The place holds no segment."""
    TRIMMED = 3
    """The slab holds no segments from the place `slot` on."""
    SLAB = 4
    """There is a slab of this number: `key` and `note` have the tenant's name, `slot` and `generation` the low and the
    high half of its slot size."""


class Live(NamedTuple):
    """The records that are in force."""

    slabs: Records
    stored: Records
    """By slab and slot."""


def is_index_name(name: str) -> bool:
    """True for the name of a file of an index."""
    return bool(_NAME.fullmatch(name)) or name == _FRESH


def live_records(records: Records) -> Live:
    """The records in force of a log, whose records are in their order in time."""
    count = len(records)
    kinds = records["kind"]
    slabs = _last(records[kinds == Kind.SLAB], "slab")
    of_place = (kinds == Kind.STORED) | (kinds == Kind.FORGOTTEN)
    places = np.flatnonzero(of_place)
    names = records["slab"][places].astype(np.uint64) << np.uint64(32) | records["slot"][places]
    # `unique` gives the first index of each value: that of the last record in the reversed array.
    _, first = np.unique(names[::-1], return_index=True)
    last = places[len(places) - 1 - first]
    alive = np.zeros(count, np.bool_)
    alive[last] = kinds[last] == Kind.STORED
    for at in np.flatnonzero(kinds == Kind.TRIMMED):
        before = records[:at]
        alive[:at] &= (before["slab"] != records["slab"][at]) | (before["slot"] < records["slot"][at])
    return Live(slabs, records[last[alive[last]]])


def _last(records: Records, field: str) -> Records:
    _, first = np.unique(records[field][::-1], return_index=True)
    return records[len(records) - 1 - first]


def read_index(files: Files) -> tuple[Records, int]:
    """All records of an index in their order in time, and the number of its last log; reads the files only. Raises
    OSError."""
    logs, snapshots = _numbers(files, "log"), _numbers(files, "snapshot")
    base = max(snapshots, default=0)
    names = [_name("snapshot", base)] if base else []
    names += [_name("log", number) for number in sorted(logs) if number > base]
    found = [frame for name in names for frame in _frames(files, name)]
    records = np.concatenate(found) if found else np.zeros(0, RECORD)
    return records, max([*logs, base])


def _numbers(files: Files, kind: str) -> list[int]:
    matches = [_NAME.fullmatch(name) for name in files.names()]
    return [int(match[2]) for match in matches if match is not None and match[1] == kind]


def _frames(files: Files, name: str) -> Iterator[Records]:
    """The whole frames of a log or a snapshot, up to the first that is not whole."""
    file = files.open(name)
    try:
        data = _content(file)
    finally:
        file.close()
    at = 0
    while at + _FRAME.size <= len(data):
        magic, count, crc = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        stop = start + count * RECORD.itemsize
        if magic != _MAGIC or stop > len(data) or zlib.crc32(data[start:stop]) != crc:
            break
        yield np.frombuffer(data, RECORD, count, start)
        at = stop
    if at < len(data):
        log.info("the last %d bytes of %s are not a whole frame: its writing was cut off", len(data) - at, name)


def _content(file: File) -> memoryview:
    data = memoryview(bytearray(file.size()))
    done = 0
    while done < len(data):
        count = file.read(done, [data[done : done + _READ_BYTES]])
        if not count:
            break
        done += count
    return data[:done]


class Index:
    """The index of an open device: appends records, and makes snapshots. For one thread at a time. All methods raise
    OSError; the index is not used any more then, and is read anew when the device is opened again."""

    def __init__(self, files: Files, least_snapshot_bytes: int = LEAST_SNAPSHOT_BYTES) -> None:
        """An index for `files`, which `recover` opens."""
        self._files = files
        self._least_snapshot_bytes = least_snapshot_bytes
        self._log: File | None = None
        self._number = 0
        self._end = 0
        """Bytes of the present log."""
        self._earlier_bytes = self._earlier_logs = 0
        """Bytes and number of the logs that no snapshot covers, without the present log."""
        self._base_bytes = 0
        """Bytes of the records that were in force when the index was read last."""
        self._unsynced = False

    def recover(self) -> Live:
        """Read the index and begin a new log."""
        logs = _numbers(self._files, "log")
        for number in logs:
            file = self._files.open(_name("log", number))
            try:
                # The records of a process that was killed may be in the kernel's cache only.
                file.sync()
                self._earlier_bytes += file.size()
            finally:
                file.close()
        self._earlier_logs = len(logs)
        records, last = read_index(self._files)
        live = live_records(records)
        self._base_bytes = len(live.stored) * RECORD.itemsize
        self._begin(last + 1)
        return live

    def _begin(self, number: int) -> None:
        self.close()
        self._log = self._files.open(_name("log", number), create=True)
        self._files.sync_names()
        self._number, self._end = number, 0

    def append(self, records: Records) -> None:
        """Append records. They are on the device after the next `sync`."""
        assert self._log is not None
        self._end = _write_frames(self._log, self._end, records)
        self._unsynced = True

    def sync(self) -> None:
        """Return when all appended records are on the device."""
        if self._unsynced and self._log is not None:
            self._log.sync()
            self._unsynced = False

    @property
    def wants_snapshot(self) -> bool:
        """True when the logs have grown beyond twice the size of the records in force, or in number."""
        grown = self._earlier_bytes + self._end > max(self._least_snapshot_bytes, 2 * self._base_bytes)
        return grown or self._earlier_logs >= MAX_LOGS

    def snapshot(self) -> None:
        """Begin a new log, and replace all earlier files by one snapshot."""
        self.sync()
        covered = self._number
        self._begin(covered + 1)
        live = live_records(read_index(self._files)[0])
        if _FRESH in self._files.names():
            self._files.remove(_FRESH)
        file = self._files.open(_FRESH, create=True)
        try:
            _write_frames(file, _write_frames(file, 0, live.slabs), live.stored)
            file.sync()
        finally:
            file.close()
        self._files.rename(_FRESH, _name("snapshot", covered))
        self._files.sync_names()
        for number in _numbers(self._files, "log"):
            if number <= covered:
                self._files.remove(_name("log", number))
        for number in _numbers(self._files, "snapshot"):
            if number < covered:
                self._files.remove(_name("snapshot", number))
        self._base_bytes = len(live.stored) * RECORD.itemsize
        self._earlier_bytes = self._earlier_logs = 0

    def close(self) -> None:
        """Close the log. Its unsynced records may be lost."""
        if self._log is not None:
            log_file, self._log = self._log, None
            log_file.close()


def _write_frames(file: File, at: int, records: Records) -> int:
    """Write records as frames from the offset `at` on. Returns the offset behind them."""
    for first in range(0, len(records), MAX_FRAME_RECORDS):
        body = records[first : first + MAX_FRAME_RECORDS].tobytes()
        frame = _FRAME.pack(_MAGIC, len(body) // RECORD.itemsize, zlib.crc32(body)) + body
        file.write(at, [frame])
        at += len(frame)
    return at


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:08}"
