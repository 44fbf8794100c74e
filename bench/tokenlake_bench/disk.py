"""The command `bench disk`: the file layer of the disk tier beside fio, on the same device, at the same concurrency and
size, one after the other in turns."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from tokenlake.config import parse_size
from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import DiskRead, DiskWrite
from tokenlake.disk.places import NOTE_BYTES, Place, pack_places
from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake.keys import KEY_BYTES
from tokenlake.memory.region import RegionShape
from tokenlake.wire import Code
from tokenlake.wire.slots import SlotRef
from tokenlake_bench.disk_matches import MatchesResult, measure_matches
from tokenlake_bench.report import write_json
from tokenlake_server.disk.check import THREADS
from tokenlake_server.disk.device import Device, Surroundings
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_server.disk.table import RECORD, STORED, scan, seal, table_bytes, write_records
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.start.standing_orders import StandingOrders

TENANT = "bench"
SHARDS = 1
BATCH_SEGMENTS, BATCH_BYTES = {"read": 32, "write": 64}, 64 << 20
"""Segments of one read or write, and their bytes, at most, as the rules give them."""
UNDER_WAY = {"read": 4, "write": 2}
"""Reads and writes at a time, as the rules give them to a device."""
INDEXED = 100_000
WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class DiskArguments:
    """Arguments of the command `bench disk`. Raises ConfigurationError for a value out of range."""

    path: Path
    sizes: str
    total: str
    seconds: float
    rounds: int
    json_file: Path | None

    def measured(self) -> list[int]:
        """The sizes of segments."""
        try:
            sizes = [parse_size(each) for each in self.sizes.split(",")]
        except ValueError as error:
            raise ConfigurationError("sizes", self.sizes, str(error)) from None
        if not all(4096 <= each <= 64 << 20 for each in sizes):
            raise ConfigurationError("sizes", self.sizes, "sizes from 4KiB to 64MiB")
        return sizes

    @property
    def total_bytes(self) -> int:
        """Bytes of the segments, and of fio's file."""
        return parse_size(self.total)


class DiskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one size. Rates are medians of the rounds in bytes/s; `ratio` is the median of the rounds'
    ratios to fio, None without fio."""

    operation: str
    slot_bytes: int
    encrypted: bool
    bytes_per_s: float
    fio_bytes_per_s: float | None
    ratio: float | None


class DiskResult(msgspec.Struct, kw_only=True):
    """The JSON of `bench disk`."""

    rows: list[DiskRow] = msgspec.field(default_factory=list)
    indexed_segments: int = 0
    index_s: float = 0.0
    """Seconds in which the index of that many segments is read."""
    matches: MatchesResult | None = None
    """Matches that hit memory while a daemon's disk is saturated."""
    wrong_bytes: int = 0
    load_average: float = 0.0
    """Of the last minute, at the begin."""
    fio: str = ""
    """Version; empty where fio is not installed."""


def run_disk(arguments: DiskArguments) -> None:
    """Carry out the command. Raises `TokenLakeError`."""
    console = Console()
    sizes = arguments.measured()
    fio = _fio_version()
    result = DiskResult(load_average=os.getloadavg()[0], fio=fio)
    if not fio:
        console.print("fio is not installed (Debian: apt-get install fio): the comparison is skipped")
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-disk-", dir=arguments.path) as directory:
        for slot_bytes in sizes:
            result.rows += _rows(Path(directory), slot_bytes, arguments, bool(fio), result)
        result.indexed_segments, result.index_s = INDEXED, _index_time(Path(directory))
        of_daemon = Path(directory, "daemon")
        of_daemon.mkdir()
        result.matches = measure_matches(of_daemon, arguments.seconds, arguments.rounds)
    console.print(_table(result))
    console.print(_matches_text(result.matches))
    console.print(f"{INDEXED:,} segments are indexed in {result.index_s:.2f} s; wrong bytes: {result.wrong_bytes}")
    if arguments.json_file is not None:
        write_json(result, arguments.json_file)
    if result.wrong_bytes:
        raise Unreachable(f"{result.wrong_bytes} bytes differ")


def _rows(
    directory: Path, slot_bytes: int, arguments: DiskArguments, fio: bool, result: DiskResult
) -> Iterator[DiskRow]:
    taken: dict[tuple[str, bool], list[tuple[float, float | None]]] = {}
    with (
        _rig(directory / "plain", slot_bytes, arguments.total_bytes, DiskKeys()) as plain,
        _rig(directory / "encrypted", slot_bytes, arguments.total_bytes, DiskKeys([os.urandom(32)])) as encrypted,
    ):
        for rig in (plain, encrypted):
            rig.fill()
        for turn in range(arguments.rounds):
            for operation in ("write", "read"):
                # fio is the first in one turn and the last in the next.
                rate = _fio(directory, operation, slot_bytes, arguments) if fio and turn % 2 == 0 else None
                both = [rig.run(operation, arguments.seconds) for rig in (plain, encrypted)]
                if fio and rate is None:
                    rate = _fio(directory, operation, slot_bytes, arguments)
                for own, is_encrypted in zip(both, (False, True), strict=True):
                    taken.setdefault((operation, is_encrypted), []).append((own, rate))
        result.wrong_bytes += plain.wrong_bytes + encrypted.wrong_bytes
    for (operation, is_encrypted), rates in taken.items():
        fios = [rate for _, rate in rates if rate is not None]
        yield DiskRow(
            operation=operation,
            slot_bytes=slot_bytes,
            encrypted=is_encrypted,
            bytes_per_s=statistics.median(own for own, _ in rates),
            fio_bytes_per_s=statistics.median(fios) if fios else None,
            ratio=statistics.median(own / rate for own, rate in rates if rate is not None) if fios else None,
        )


@contextmanager
def _rig(directory: Path, slot_bytes: int, total_bytes: int, keys: DiskKeys) -> Iterator[Rig]:
    directory.mkdir()
    rig = Rig(directory, slot_bytes, total_bytes, keys)
    try:
        yield rig
    finally:
        rig.close()
        shutil.rmtree(directory)


@dataclass
class _Batch:
    """An instruction under way."""

    segments: int
    first_slot: int


@dataclass
class Rig:
    """A device as a daemon has it, with the rules replaced by a loop that keeps it busy."""

    directory: Path
    slot_bytes: int
    total_bytes: int
    keys: DiskKeys
    wrong_bytes: int = 0
    _arrived: threading.Condition = field(default_factory=threading.Condition)
    _events: list[Event] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self.batch = {
            operation: max(1, min(most, BATCH_BYTES // self.slot_bytes)) for operation, most in BATCH_SEGMENTS.items()
        }
        slots = max(UNDER_WAY[operation] * count for operation, count in self.batch.items())
        region = slots * self.slot_bytes + (1 << 20)
        self.arena = Arena()
        self.arena.make(0, region + -region % 4096)
        assert RegionShape(self.arena.region(0).nbytes, self.slot_bytes).slots >= slots
        self.places = max(self.total_bytes // self.slot_bytes, 4 * max(self.batch.values()))
        self.generations = [0] * self.places
        self.chance = random.Random(0)
        # One content for all segments: its making would take longer than its writing.
        self.content = np.random.default_rng(0).integers(0, 256, self.slot_bytes, np.uint8).tobytes()
        self.checksum = xxhash.xxh3_64_intdigest(self.content).to_bytes(8, "little")
        orders = StandingOrders(self.directory / "orders")
        around = Surroundings("bench", "bench", self.keys, self.arena, self._post, self._deliver, Contents(), orders)
        self.device = Device(0, str(self.directory), None, lambda: DirectoryFiles(self.directory), around)
        self.device.start()
        self._wait(lambda event: isinstance(event, events.DiskRecovered))

    def _post(self, event: Event) -> None:
        with self._arrived:
            self._events.append(event)
            self._arrived.notify_all()

    def _deliver(self, event: Event) -> bool:
        self._post(event)
        return True

    def _wait(self, wanted: Callable[[Event], bool]) -> Event:
        """Wait for an event, and take it out."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: any(wanted(event) for event in self._events), WAIT_S):
                raise Unreachable(f"the device answers no more: {self.device.state.problem}")
            event = next(event for event in self._events if wanted(event))
            self._events.remove(event)
            return event

    def fill(self) -> None:
        """Write every place once."""
        size = self.batch["write"]
        for first in range(0, self.places, size):
            places = list(range(first, min(first + size, self.places)))
            self._end(*self._begin("write", places, 0))

    def run(self, operation: str, seconds: float) -> float:
        """Keep the device busy for a time. Returns bytes/s."""
        began, done = time.monotonic(), 0
        running = dict(
            self._begin(operation, self._some(operation), lane * self.batch[operation])
            for lane in range(UNDER_WAY[operation])
        )
        while running:
            event = self._wait(lambda event: _number(event) in running)
            batch = running.pop(_number(event))
            self._check(event, batch)
            done += batch.segments
            if time.monotonic() < began + seconds:
                following, fresh = self._begin(operation, self._some(operation), batch.first_slot)
                running[following] = fresh
        return done * self.slot_bytes / (time.monotonic() - began)

    def _some(self, operation: str) -> list[int]:
        return self.chance.sample(range(self.places), self.batch[operation])

    def _begin(self, operation: str, places: Sequence[int], first_slot: int) -> tuple[int, _Batch]:
        self._number += 1
        count = len(places)
        slots = [SlotRef(0, first_slot + at, 1) for at in range(count)]
        packed = b"".join(slot.pack() for slot in slots)
        if operation == "write":
            for view in self.arena.slots(slots, self.slot_bytes):
                if view[:64] != self.content[:64]:
                    view[:] = self.content
            for place in places:
                self.generations[place] += 1
        keys = b"".join(place.to_bytes(KEY_BYTES, "big") for place in places)
        where = pack_places([Place(place, self.generations[place]) for place in places])
        if operation == "write":
            checksums, notes = self.checksum * count, bytes(NOTE_BYTES * count)
            self.device.carry_out(
                DiskWrite(self._number, 0, TENANT, self.slot_bytes, SHARDS, keys, packed, where, checksums, notes)
            )
        else:
            self.device.carry_out(DiskRead(self._number, 0, TENANT, self.slot_bytes, SHARDS, keys, packed, where))
        return self._number, _Batch(count, first_slot)

    def _end(self, number: int, batch: _Batch) -> None:
        self._check(self._wait(lambda event: _number(event) == number), batch)

    def _check(self, event: Event, batch: _Batch) -> None:
        right = Code.COMMITTED if isinstance(event, events.DiskWritten) else Code.LOCAL
        assert isinstance(event, events.DiskWritten | events.FetchDone)
        if set(event.codes) != {right}:
            raise Unreachable(f"the device answers {sorted(set(event.codes))}: {self.device.state.problem}")
        if isinstance(event, events.FetchDone):
            (view,) = self.arena.slots([SlotRef(0, batch.first_slot, 1)], self.slot_bytes)
            if view != self.content:
                differ = np.frombuffer(view, np.uint8) != np.frombuffer(self.content, np.uint8)
                self.wrong_bytes += int(differ.sum())

    def close(self) -> None:
        """End the device."""
        self.device.close()
        self.arena.close()


def _number(event: Event) -> int:
    if isinstance(event, events.DiskWritten):
        return event.write
    return event.fetch if isinstance(event, events.FetchDone) else 0


def _index_time(directory: Path) -> float:
    path = directory / "index"
    path.mkdir()
    files = DirectoryFiles(path)
    file = files.open("table", create=True)
    file.write(0, [bytes(table_bytes(INDEXED))])
    records = np.zeros(INDEXED, RECORD)
    records["kind"], records["slot"] = STORED, np.arange(INDEXED)
    write_records(file, list(range(INDEXED)), seal(records))
    file.sync()
    began = time.monotonic()
    found = scan(file, INDEXED)
    took = time.monotonic() - began
    assert len(found.stored) == INDEXED
    file.close()
    files.close()
    return took


def _fio_version() -> str:
    try:
        return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _fio(directory: Path, operation: str, slot_bytes: int, arguments: DiskArguments) -> float:
    """Bytes/s of fio: direct, random, as many jobs as a device has threads, in one file."""
    command = [
        "fio",
        "--name=fio",
        f"--filename={directory / 'fio.dat'}",
        f"--rw=rand{operation}",
        f"--bs={slot_bytes}",
        f"--size={arguments.total_bytes // slot_bytes * slot_bytes}",
        f"--numjobs={THREADS}",
        "--direct=1",
        "--ioengine=psync",
        "--time_based",
        f"--runtime={arguments.seconds:g}",
        "--fallocate=native",
        "--end_fsync=1",
        "--randrepeat=0",
        "--group_reporting",
        "--output-format=json",
    ]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise Unreachable(f"fio failed: {error.stderr.strip() or error.stdout.strip()}") from error
    (job,) = json.loads(output[output.index("{") :])["jobs"]
    return float(job[operation]["bw_bytes"])


def _matches_text(result: MatchesResult) -> str:
    return (
        f"a match of {result.keys} segments in memory while engines read {result.read_bytes_per_s / 1e9:.2f} GB/s "
        f"from disk: p50 {1e3 * result.p50_s:.2f} ms, p99 {1e3 * result.p99_s:.2f} ms; without a disk, with "
        f"{result.cpu_share:.2f} processors busy: p99 {1e3 * result.p99_without_disk_s:.2f} ms; "
        f"ratio {result.ratio:.2f}"
    )


def _table(result: DiskResult) -> Table:
    table = Table(title=f"disk tier beside fio, load average {result.load_average:.1f}", title_justify="left")
    for column in ("operation", "size", "encrypted", "GB/s", "fio, GB/s", "ratio"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in result.rows:
        table.add_row(
            row.operation,
            f"{row.slot_bytes / (1 << 20):g} MiB",
            "yes" if row.encrypted else "no",
            f"{row.bytes_per_s / 1e9:.2f}",
            "" if row.fio_bytes_per_s is None else f"{row.fio_bytes_per_s / 1e9:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return table
