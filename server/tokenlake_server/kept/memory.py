"""The memory that this daemon found and keeps for the next one: descriptors at a store, and the ledger.

::

    start:  take | check ledger, regions, locks | RegionKept .. SegmentsKept .. MemoryKept (after a crash before them)
    runs:   a region is made, cut, closed: its descriptor and its entry follow; records by `Record`
    end:    Sealed | clean | the process ends, and frees no page

After a crash each segment is compared with its checksums before the rules hear of it, in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

import xxhash

from tokenlake.config import ServerConfig, format_size
from tokenlake.core.events import (
    MAX_KEPT,
    MemoryKept,
    RegionKept,
    SealRequested,
    SegmentsKept,
    SegmentsKeptDone,
    SurvivorGone,
)
from tokenlake.core.instructions import Record, Sealed
from tokenlake.memory import ledger
from tokenlake.memory.region import PAGE
from tokenlake.metrics import Level, Metric
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import SlotRef, unpack_slots
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.connected_process import is_locked
from tokenlake_server.engines.tenants import digests
from tokenlake_server.kept.descriptor_store import DescriptorStore
from tokenlake_server.kept.keeper_process import KeeperProcess, KeeperUnusable, end_keeper
from tokenlake_server.kept.ledger_file import Entry, LedgerFile, LedgerRefused, Owner, clear_void, found_records
from tokenlake_server.kept.service_store import ServiceStore, offered
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.started_threads import started_threads

log = logging.getLogger(__name__)

ENGINES_WAIT_S = 120.0
"""Seconds for which engines keep their mappings while no daemon runs, where the service manager keeps the memory and
`keep_s` is not set."""
LOCK_ROOM = 256
"""Descriptors of a store with a limit that are left for the locks of engines' processes: a region beyond is not
kept."""
AT_ONCE_S = 0.25
"""Seconds of the start in which segments are passed to the rules before engines may join; the others follow while
engines are served."""
SLICE_S = 0.001
BATCH_BYTES = 64 << 20
"""Bytes of segments that one thread checks at a time."""
LOOK_S = 0.1
"""Seconds between two looks at the locks of the engines of the daemon before."""
SEAL_S = 10.0
"""Limit of the seconds in which the rules write the newest notes, and in which the store reads, when the daemon
ends."""

UNCHECKED = Metric(
    "tokenlake_unchecked_segments",
    "Segments of a daemon that crashed whose bytes have not been compared with their checksums yet",
    kind="gauge",
)


class Survivor(NamedTuple):
    """A process of an engine of the daemon before that lives: the file that it has locked, and its tenant."""

    tenant: str
    lock: int


class Kept:
    """The memory that outlives this daemon. Made before the loop runs, by `open_kept`; then used on the loop."""

    def __init__(self, config: ServerConfig, arena: Arena, store: DescriptorStore) -> None:
        """Takes what the store has. What cannot be used is dropped, with a line in the log."""
        self._config = config
        self._tenants = digests(config)
        self._arena = arena
        self._store = store
        self._owner = Owner(config.node, config.cluster, config.huge_pages)
        self._ledger: LedgerFile | None = None
        self._incarnation = 0
        self._survivors: dict[int, Survivor] = {}
        """The processes of the daemon before that have not come back, by the number of their connection there."""
        self._unheld: set[int] = set()
        """Connections whose locks the store has no room for."""
        self._before = 0
        """Incarnation of the daemon before; 0 for none."""
        self._clean = True
        self.nbytes = 0
        """Bytes of the regions that were kept."""
        self.dropped: tuple[int, ...] = ()
        """Regions of the daemon before that are not kept."""
        self._unchecked = 0
        self._recovered = 0
        self._wrong = 0
        self._left: list[tuple[Entry, list[int]]] = []
        self._ends = False
        self._checked = asyncio.Event()
        """Set once all segments were passed to the rules."""
        self._work: asyncio.Task[None] | None = None
        self._sealed = asyncio.Event()
        self.left: list[int] = []
        """The regions that are left to the next daemon, after `hand_over`."""
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take(store.taken)

    @property
    def engines_wait_s(self) -> float:
        """Seconds for which engines keep their mappings after the end of this daemon."""
        return self._config.keep_s or ENGINES_WAIT_S

    # -- the start

    def _take(self, taken: dict[str, int]) -> None:
        left = dict(taken)
        try:
            names = [name for name in left if name.startswith("ledger-")]
            if not left:
                return
            if len(names) != 1:
                raise LedgerRefused(f"it has {len(names)} ledgers")
            self._ledger = LedgerFile.adopt(left[names[0]], self._owner, self._config.regions, self._config.memory)
            self._store.has(names[0], left.pop(names[0]))
            self._before, self._clean = self._ledger.incarnation, self._ledger.clean
            known = {name.removeprefix("lock-").partition("-")[0] for name in left if name.startswith("lock-")}
            if lost := [number for number in self._ledger.locks if str(number) not in known]:
                # Without them this daemon could not know which slots are read.
                raise LedgerRefused(
                    f"{len(lost)} of the files that engines have locked are missing; under systemd: is "
                    "FileDescriptorStoreMax= as large as the variable FDSTORE says?"
                )
            self._take_regions(self._ledger, left)
            self._take_locks(self._ledger, left)
        except (LedgerRefused, OSError, ValueError) as reason:
            log.warning("this daemon starts empty, although %s has memory of one before: %s", self._store.name, reason)
            self._forget()
        finally:
            for name, descriptor in left.items():
                self._store.drop(name)
                os.close(descriptor)

    def _forget(self) -> None:
        """Let go of all that was taken so far: this daemon starts empty."""
        for number in self._arena.numbers:
            self._arena.forget(number)
        for survivor in self._survivors.values():
            os.close(survivor.lock)
        self._survivors.clear()
        if self._ledger is not None:
            self._ledger.close()
        self._store.drop_all()
        self._ledger, self.nbytes, self._clean = None, 0, True

    def _take_regions(self, book: LedgerFile, left: dict[str, int]) -> None:
        """Adopt the regions that can be used. Their descriptors leave `left`."""
        entries, problems = book.entries(), dict[str, int]()
        room = self._config.memory // self._config.regions // PAGE * PAGE * self._config.regions
        # Those with most segments first, where memory is smaller than before.
        full = {each.number: _count(book, each) for each in entries}
        for entry in sorted(entries, key=lambda each: (-full[each.number], each.number)):
            name, problem = region_name(entry.number, entry.maker), ""
            descriptor = left.get(name)
            if descriptor is None:
                problem = "descriptors that are missing"
            elif entry.slot_bytes and self._tenants.get(entry.tenant) != entry.digest:
                problem = f"tenant '{entry.tenant}', which this daemon does not have, or not with this secret"
            elif entry.nbytes > room:
                problem = f"the setting 'memory', which is {format_size(self._config.memory)} now"
            else:
                try:
                    self._arena.adopt(entry.number, descriptor, entry.nbytes, entry.slot_bytes)
                except (OSError, ValueError) as error:
                    problem = f"memory that cannot be used ({error})"
            if problem:
                problems[problem] = problems.get(problem, 0) + 1
                self.dropped += (entry.number,)
                book.remove(entry.number)
                continue
            room -= entry.nbytes
            self.nbytes += entry.nbytes
            self._store.has(name, left.pop(name))
        for problem, count in problems.items():
            log.warning("%d regions of the daemon before are not kept, because of %s", count, problem)

    def _take_locks(self, book: LedgerFile, left: dict[str, int]) -> None:
        """Find the processes of the daemon before that live. Their descriptors leave `left`."""
        for name in [name for name in left if name.startswith("lock-")]:
            number, _, tenant = name.removeprefix("lock-").partition("-")
            if number.isdecimal() and tenant in self._tenants and is_locked(left[name]):
                self._store.has(name, left[name])
                self._survivors[int(number)] = Survivor(tenant, left.pop(name))
            else:
                book.remove_lock(int(number) if number.isdecimal() else 0)

    def begin(self, driver: Driver, loop: asyncio.AbstractEventLoop, incarnation: int, evicted: int) -> None:
        """Tell the rules of the memory that was kept. Called once, before the first event. `evicted`: the time of the
        last eviction by an operator."""
        began = time.perf_counter()
        self._driver, self._loop, self._incarnation = driver, loop, incarnation
        self._store.on_complete = lambda complete: self._note_complete()
        self._store.start(loop)
        if self._ledger is not None and self._ledger.evicted < evicted:
            log.warning(
                "this daemon starts empty, although %s has memory of one before: an operator has evicted segments "
                "while a daemon ran that did not have this memory",
                self._store.name,
            )
            self._forget()
        if self._ledger is None:
            self._ledger = LedgerFile.make(self._owner, incarnation, self._config.regions, self._config.memory)
            self._ledger.evicted = evicted
            self._store.hold(f"ledger-{incarnation}", self._ledger.descriptor)
            self._checked.set()
            return
        book = self._ledger
        book.take_over(incarnation)
        for entry in book.entries():
            marks = b""
            if entry.slot_bytes:
                generations = self._arena.generations(entry.number, entry.slot_bytes)
                clear_void(book.records(entry.number), generations)
                marks = generations.tobytes()
            driver.handle(RegionKept(entry.number, entry.nbytes, entry.tenant, entry.slot_bytes, marks))
        batches = self._batches()
        if self._clean:
            while (batch := next(batches, None)) is not None:
                self._pass_in(*batch)
                if time.perf_counter() > began + AT_ONCE_S:
                    break
            else:
                self._checked.set()
        survivors = tuple((number, each.tenant) for number, each in self._survivors.items())
        unchecked = not self._checked.is_set()
        driver.handle(MemoryKept(self._before, book.next_region, survivors, unchecked))
        log.info(
            "%s of memory of the daemon before are kept: %d segments%s; %d processes of its engines live",
            format_size(self.nbytes),
            self._recovered,
            "" if not unchecked else ", and others that are read now" if self._clean else ", which are checked now",
            len(survivors),
        )
        if unchecked:
            self._work = loop.create_task(self._read_on(batches) if self._clean else self._check())
        if self._survivors:
            loop.call_later(LOOK_S, self._look)

    def _batches(self) -> Iterator[tuple[Entry, list[int], tuple[bytes, ...]]]:
        """Yield the slots with a record, and the records, in parts of at most `MAX_KEPT`."""
        assert self._ledger is not None
        for entry in self._ledger.entries():
            if not entry.slot_bytes:
                continue
            slots: list[int] = []
            records: list[bytes] = []
            marks = self._arena.generations(entry.number, entry.slot_bytes)
            most = max(1, min(MAX_KEPT, BATCH_BYTES // entry.slot_bytes))
            for slot, raw in found_records(self._ledger.records(entry.number), marks):
                slots.append(slot)
                records.append(raw)
                if len(slots) == most:
                    yield entry, slots, tuple(records)
                    slots, records = [], []
            if slots:
                yield entry, slots, tuple(records)

    def _pass_in(self, entry: Entry, slots: Sequence[int], records: tuple[bytes, ...]) -> None:
        """Tell the rules of segments whose bytes are right."""
        assert self._driver is not None
        if not slots or self._ledger is None or self._ledger.entry(entry.number) != entry:
            return
        marks = [int.from_bytes(raw[4:12], "little") for raw in records]
        places = b"".join(SlotRef(entry.number, *each).pack() for each in zip(slots, marks, strict=True))
        self._recovered += len(slots)
        self._driver.handle(SegmentsKept(entry.tenant, entry.slot_bytes, places, records))

    async def _read_on(self, batches: Iterator[tuple[Entry, list[int], tuple[bytes, ...]]]) -> None:
        """Pass in the segments that are left after an end in order, in slices of the loop's time."""
        until = time.perf_counter() + SLICE_S
        for batch in batches:
            if self._ends:
                return
            self._pass_in(*batch)
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE_S
        self._done()

    async def _check(self) -> None:
        """Compare the segments of a daemon that crashed with their checksums, in threads, and pass in the right
        ones."""
        assert self._loop is not None
        assert self._ledger is not None
        began, count = time.perf_counter(), min(8, len(os.sched_getaffinity(0)))
        threads = started_threads(count, "check-kept")
        try:
            batches = self._batches()
            self._unchecked = sum(_count(self._ledger, each) for each in self._ledger.entries())
            running: set[asyncio.Future[tuple[Entry, list[int], tuple[bytes, ...], list[int]]]] = set()
            while not self._ends:
                while len(running) < count and (batch := next(batches, None)) is not None:
                    running.add(self._loop.run_in_executor(threads, self._compare, *batch))
                if not running:
                    self._done()
                    log.info(
                        "the bytes of %d segments of a daemon that crashed were compared with their checksums in "
                        "%.1f s: %d are kept, %d were wrong",
                        self._recovered + self._wrong,
                        time.perf_counter() - began,
                        self._recovered,
                        self._wrong,
                    )
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    self._take_checked(*each.result())
        finally:
            self._ends = self._ends or not self._checked.is_set()
            await asyncio.to_thread(threads.shutdown)

    def _take_checked(self, entry: Entry, slots: list[int], records: tuple[bytes, ...], wrong: list[int]) -> None:
        assert self._ledger is not None
        self._unchecked = max(0, self._unchecked - len(slots) - len(wrong))
        self._wrong += len(wrong)
        for slot in wrong:
            if self._ledger.entry(entry.number) == entry:
                self._ledger.write(SlotRef(entry.number, slot, 0), b"")
        self._pass_in(entry, slots, records)

    def _compare(
        self, entry: Entry, slots: list[int], records: tuple[bytes, ...]
    ) -> tuple[Entry, list[int], tuple[bytes, ...], list[int]]:
        """The slots, of these, whose bytes are right, with their records; and those whose bytes are not. In a
        thread."""
        right, wrong = list[int](), list[int]()
        try:
            views = self._arena.slots([SlotRef(entry.number, slot, 0) for slot in slots], entry.slot_bytes)
        except KeyError:
            # The region was given back meanwhile.
            views = []
        for at, view in enumerate(views):
            with view:
                if not self._ends:
                    (right if _is_right(records[at], view) else wrong).append(at)
        found = [slots[at] for at in right]
        return entry, found, tuple(records[at] for at in right), [slots[at] for at in wrong]

    def _done(self) -> None:
        assert self._driver is not None
        self._unchecked = 0
        self._driver.handle(SegmentsKeptDone())
        self._checked.set()

    def followed(self, evicted: int) -> None:
        """Segments were evicted by an operator at that time, and have no record any more."""
        assert self._ledger is not None
        self._ledger.evicted = evicted

    # -- engines of the daemon before

    def survives(self, number: int, tenant: str) -> bool:
        """True if the process with that number at the daemon before has not come back, and lives."""
        found = self._survivors.get(number)
        return found is not None and found.tenant == tenant and is_locked(found.lock)

    def returned(self, number: int) -> int:
        """A process of the daemon before has come back. Returns the file that it has locked, which the caller owns."""
        return self._survivors.pop(number).lock

    def _look(self) -> None:
        """Look for processes of the daemon before that have ended, or have unmapped its memory."""
        assert self._loop is not None
        assert self._driver is not None
        if self._ends:
            return
        assert self._ledger is not None
        for number, survivor in list(self._survivors.items()):
            if not is_locked(survivor.lock):
                del self._survivors[number]
                self._ledger.remove_lock(number)
                self._store.drop(lock_name(number, survivor.tenant))
                os.close(survivor.lock)
                self._driver.handle(SurvivorGone(number))
        if self._survivors:
            self._loop.call_later(LOOK_S, self._look)

    # -- while the daemon runs

    def record(self, order: Record) -> None:
        """Carry out `Record`."""
        assert self._ledger is not None
        for place, record in zip(unpack_slots(order.slots), order.records, strict=True):
            self._ledger.write(place, record)

    def region_made(self, number: int, nbytes: int) -> None:
        """The memory of a region is there."""
        assert self._ledger is not None
        self._ledger.note_number(number)
        if self._store.room > LOCK_ROOM and self._ledger.add_region(number, nbytes, self._incarnation):
            self._store.hold(region_name(number, self._incarnation), self._arena.region(number).fd)

    def region_cut(self, number: int, nbytes: int, slot_bytes: int, tenant: str) -> None:
        """A region was cut into slots of a tenant."""
        assert self._ledger is not None
        entry = self._ledger.entry(number)
        if entry is not None and not self._ledger.cut(number, nbytes, slot_bytes, tenant, self._tenants[tenant]):
            self._store.drop(region_name(number, entry.maker))

    def region_closing(self, number: int) -> None:
        """A region is about to be given back."""
        assert self._ledger is not None
        entry = self._ledger.entry(number)
        if entry is not None:
            self._ledger.remove(number)
            self._store.drop(region_name(number, entry.maker))

    def lock_made(self, number: int, tenant: str, lock: int) -> None:
        """A process gets a file that it has to lock, before it maps anything."""
        assert self._ledger is not None
        held = self._store.room > 0
        if held:
            self._store.hold(lock_name(number, tenant), lock)
        if not (held and self._ledger.add_lock(number)):
            self._unheld.add(number)
            self._note_complete()

    def lock_closing(self, number: int, tenant: str) -> None:
        """The file of a process is about to be closed."""
        assert self._ledger is not None
        self._unheld.discard(number)
        self._ledger.remove_lock(number)
        self._store.drop(lock_name(number, tenant))
        self._note_complete()

    def _note_complete(self) -> None:
        assert self._ledger is not None
        self._ledger.set_complete(self._store.complete and not self._unheld)

    def gauges(self) -> list[Level]:
        """Segments that wait for their check, for the metrics page."""
        return [Level(UNCHECKED, (), self._unchecked)]

    # -- the end

    async def stop(self) -> None:
        """Read and check no further segments: the daemon ends."""
        self._ends = True
        if self._work is not None:
            await self._work

    async def hand_over(self) -> bool:
        """The daemon ends, and nothing changes any more: leave all memory to the next daemon. Returns False where that
        is not possible."""
        assert self._driver is not None
        assert self._ledger is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEAL_S):
                self._driver.handle(SealRequested())
                await self._sealed.wait()
                while not self._store.complete:
                    await asyncio.sleep(0.01)
        if not self._store.complete or self._unheld:
            return False
        self.left = [entry.number for entry in self._ledger.entries()]
        # Without the newest notes, or with segments that were not checked, the next daemon finds a crash.
        self._ledger.clean = self._sealed.is_set() and self._checked.is_set()
        return True

    def sealed(self, order: Sealed) -> None:
        """Carry out `Sealed`."""
        self._sealed.set()

    async def give_up(self) -> None:
        """The daemon ends, and no memory is to outlive it."""
        if self._ledger is not None:
            self._ledger.set_complete(False)
        self._store.drop_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEAL_S):
                while not self._store.complete:
                    await asyncio.sleep(0.01)

    def close(self) -> None:
        """Leave the store. What it has, it keeps."""
        self._store.leave()
        for survivor in self._survivors.values():
            os.close(survivor.lock)
        self._survivors.clear()


def open_kept(config: ServerConfig, arena: Arena, environ: MutableMapping[str, str]) -> Kept | None:
    """Find what keeps the memory of this node's daemons, and take the memory of the daemon before from it. None: no
    memory outlives this daemon."""
    path = keeper_path(config.socket)
    try:
        if offered(environ):
            return Kept(config, arena, ServiceStore(environ))
        if config.keep_s:
            return Kept(config, arena, KeeperProcess(path, config.keep_s))
    except (KeeperUnusable, OSError) as error:
        log.error("the memory of this daemon does not outlive it: %s", error)
        return None
    end_keeper(path)
    return None


def keeper_path(socket: str) -> str:
    """The path of the keeper's socket beside that of the daemon."""
    return f"{socket.removesuffix('.sock')}.keeper"


def region_name(number: int, maker: int) -> str:
    """The name of a region's descriptor at the store."""
    return f"region-{number}-{maker}"


def lock_name(number: int, tenant: str) -> str:
    """The name of the descriptor of the file that a process has to lock."""
    return f"lock-{number}-{tenant}"


def _count(book: LedgerFile, entry: Entry) -> int:
    """The number of records of a region."""
    if not entry.slot_bytes:
        return 0
    return int((book.records(entry.number)[:, 4:12].any(axis=1)).sum())


def _is_right(raw: bytes, view: memoryview) -> bool:
    """Whether a slot has the bytes of its record."""
    record = ledger.unpack(raw)
    if record is None or not record.checksums:
        return False
    shards = len(record.checksums) // CHECKSUM_BYTES
    size = len(view) // shards
    sums = (xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, size * shards, size))
    return b"".join(each.to_bytes(CHECKSUM_BYTES, "little") for each in sums) == record.checksums
