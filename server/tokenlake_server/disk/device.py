"""One device of the disk tier: its threads, its queue, and its failures.

::

    control loop                    4 threads "disk-N"                    thread "disk-N-table"
      | DiskRead  ---> queue ------>| bytes, verification                   |
      |<------------- FetchDone ----|                                       |
      | DiskWrite ---> queue ------>| bytes                                 |
      |                             | the last segment of the write ------->| sync of the slabs, records, sync
      |<------------------------------------------ DiskWritten -------------|
      | DiskErase ---> queue ------>| headers, then as a write: DiskErased  |
      | DiskForget, DiskTrim ---------------------------------------------->| records

Reads come first; one thread prefers writes, so that neither waits for ever. The rules bound the number of reads and
writes under way.

A device whose operations fail or take seconds is set aside: its reads and writes end at once, but for those that a
thread still carries out, and the rules forget its segments. It is checked again and again, by writing and reading a
file, and is opened like at the start when the check succeeds.

A device without space goes on serving reads: writes that need space are lost, and the rules hear of the capacity that
it has. A device that missed an eviction by an operator is emptied when it is opened, before anything on it is found.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import DiskErase, DiskForget, DiskRead, DiskTrim, DiskWrite
from tokenlake.disk.places import unpack_places
from tokenlake.errors import LimitReached
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code
from tokenlake_server.disk.check import LEAST_PROBE, PROBE_PIECE, THREADS, UNMEASURED, SlowCheck, checked
from tokenlake_server.disk.directory import files_bytes
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import Files, no_space
from tokenlake_server.disk.jobs import EraseJob, Job, Op, Queue, ReadJob, WriteJob, job_of, lose
from tokenlake_server.disk.segments import Mismatch, SegmentIO
from tokenlake_server.disk.store import OWN_BYTES, DiskStore, Unusable
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.start.standing_orders import StandingOrders

log = logging.getLogger(__name__)

REMOVING = "its segments are being removed, because it missed an eviction"
FULL = "full: it takes no further segments until its file system has room again"
FULL_S = 5.0
"""Greatest interval at which the free space of a full device is read."""
CAPACITY_CHANGE = 0.02
"""Share of the capacity by which it changes before the rules are told."""
GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOENT})
"""Errors after which a device is not used again before a check."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits after which a device is set aside (in seconds, and in errors), and the size of the file that checks it."""

    slow_s: float = 5.0
    """An operation that takes longer sets the device aside."""
    errors: int = 8
    """Errors within `errors_s` that set the device aside."""
    errors_s: float = 60.0
    check_s: float = 10.0
    """Time until the first check of a device that was set aside; it doubles with each failed check."""
    most_check_s: float = 300.0
    sync_s: float = 1.0
    """Time after which a record without a write is synced."""
    capacity_s: float = 60.0
    """Interval at which the free space is read."""
    probe_bytes: int = 32 << 20
    """Size of the file by which the device is checked, and its bandwidth is measured."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the daemon that a device uses."""

    cluster: str
    node: str
    keys: DiskKeys
    arena: Arena
    post: Callable[[Event], None]
    """Passes an event to the rules; from any thread."""
    deliver: Callable[[Event], bool]
    """As `post`, but returns when the event was handled; False where the daemon ends."""
    contents: Contents
    orders: StandingOrders
    orders_changed: Callable[[], None] = lambda: None
    """Saves the orders soon; from any thread."""


class DeviceState(NamedTuple):
    """The state of a device, for the metrics page and `tokenlake status`."""

    path: str
    serving: bool
    problem: str
    """Why the device is set aside, or takes no further segments while it serves; empty if neither, and before it was
    opened first."""
    capacity_bytes: int
    slab_bytes: int
    queue: int
    """Segments that wait for a thread."""
    read_errors: int
    write_errors: int
    mismatches: int
    """Number of reads that found other bytes at a place than those of the segment that its record names."""
    lost: int = 0
    """Segments that were not found when it was opened, because their records or files were damaged."""


class Device:
    """A device of the setting `disk`. `start`, `carry_out`, `remove`, `forget`, `abort`, `watch` and `state` are called
    on the control loop and never block; `close` blocks."""

    def __init__(
        self,
        number: int,
        path: str,
        limit: int | None,
        open_files: Callable[[], Files],
        surroundings: Surroundings,
        patience: Patience = Patience(),
    ) -> None:
        """`limit`: most bytes of all files; None: the free space of the device. `open_files`: opens the directory at
        `path`."""
        self.number = number
        self.path = path
        self._limit = limit
        self._open_files = open_files
        self._around = surroundings
        self._patience = patience
        self._lock = threading.Lock()
        """Guards all fields below."""
        self._changed = threading.Condition(self._lock)
        """Wakes the thread of the tables when there are records for it, or when the state has changed."""
        self._queued = threading.Condition(self._lock)
        """Wakes the other threads when there are segments to read or write, or when the daemon ends."""
        self._store: DiskStore | None = None
        """None while the device is not in use."""
        self._opened: DiskStore | None = None
        """The files as they are open; of the thread of the tables."""
        self._queue = Queue()
        self._jobs: dict[int, ReadJob] = {}
        self._records: deque[WriteJob | EraseJob | DiskForget | DiskTrim] = deque()
        """The changes that the thread of the tables has to record, in order."""
        self._running: dict[str, float] = {}
        """Begin of the operation of each thread."""
        self._errors: deque[float] = deque()
        """Times of the last errors."""
        self._problem = ""
        self._full = False
        """True from the first write without space until the thread of the tables looks at the capacity."""
        self._lost = 0
        """Segments that were lost when the device was opened last."""
        self._capacity = 0
        self._rates = (0.0, 0.0)
        self._counts = {"read": 0, "write": 0, "mismatch": 0}
        self._closing = False
        name = f"disk-{number}"
        self._threads = [
            threading.Thread(target=self._work, args=(thread == 0,), name=f"{name}.{thread}", daemon=True)
            for thread in range(THREADS)
        ]
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-table", daemon=True)

    def start(self) -> None:
        """Begin to open the device. Raises `LimitReached` where no threads can be started."""
        try:
            for thread in (*self._threads, self._keeper):
                thread.start()
        except RuntimeError as error:
            raise LimitReached(f"the threads of the disk tier cannot be started: {error}") from error

    # -- instructions

    def carry_out(self, instruction: DiskRead | DiskWrite | DiskErase) -> None:
        """Begin to read, write or erase segments; an event tells the rules when it is done."""
        job = job_of(instruction)
        with self._changed:
            if self._store is not None and job.left and not self._closing:
                if isinstance(job, ReadJob):
                    self._jobs[job.instruction.fetch] = job
                elif isinstance(job, WriteJob):
                    order, places = job.instruction, 1 + max(place.slot for place in job.places)
                    self._store.will_write(order.tenant, order.slot_bytes, places)
                self._queue.of(job).extend((job, index) for index in range(job.left))
                self._queued.notify(job.left)
                return
        self._around.post(job.done())

    def remove(self) -> str:
        """Remove all segments, because the device missed an eviction: opening it does that. Returns the reason why this
        may take long; empty if it does not."""
        with self._changed:
            if self._store is None:
                return self._problem or "it is not open"
        self._set_aside(REMOVING)
        return ""

    def abort(self, fetch: int) -> None:
        """End a read: the segments that wait for a thread are LOST."""
        with self._changed:
            job = self._jobs.get(fetch)
            if job is None:
                return
            queue = self._queue.of(job)
            waiting = [op for op in queue if op[0] is job]
            for op in waiting:
                queue.remove(op)
            done = self._ended(job, len(waiting))
        if done is not None:
            self._around.post(done)

    def forget(self, instruction: DiskForget | DiskTrim) -> None:
        """Carry out a `DiskForget` or a `DiskTrim`."""
        with self._changed:
            if self._store is not None:
                if isinstance(instruction, DiskTrim):
                    self._store.will_trim(instruction.tenant, instruction.slot_bytes, instruction.places)
                self._records.append(instruction)
                self._changed.notify_all()

    def watch(self, now: float) -> None:
        """Set the device aside where an operation takes too long. `now`: of `time.monotonic`."""
        with self._changed:
            oldest = min(self._running.values(), default=now)
        if now - oldest > self._patience.slow_s:
            self._set_aside(f"slow: an operation takes more than {self._patience.slow_s:g} s")

    @property
    def state(self) -> DeviceState:
        """The state of the device now."""
        with self._changed:
            store, counts = self._store, self._counts
            return DeviceState(
                self.path,
                store is not None,
                self._problem,
                self._capacity if store is not None else 0,
                store.slab_bytes if store is not None else 0,
                len(self._queue),
                counts["read"],
                counts["write"],
                counts["mismatch"],
                self._lost,
            )

    def close(self) -> None:
        """Complete the writes whose bytes are written, and close the files. Segments that wait are LOST; they stay on
        the device, of which the rules learn before that it is gone."""
        with self._changed:
            self._closing = True
            self._around.post(events.DiskGone(self.number, "the daemon ends"))
            done = self._all_ended()
            self._changed.notify_all()
            self._queued.notify_all()
        for event in done:
            self._around.post(event)
        # A device that hangs keeps its threads; the daemon ends without them.
        until = time.monotonic() + 2 * self._patience.slow_s
        for thread in (*self._threads, self._keeper):
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    # -- threads that read and write

    def _work(self, prefers_writes: bool) -> None:
        segment_io = SegmentIO(self._around.keys)
        while (taken := self._take(prefers_writes)) is not None:
            store, (job, index) = taken
            code = Code.LOST
            try:
                code = job.carry_out(index, store, segment_io, self._around.arena, self._around.contents)
            except Mismatch as difference:
                with self._changed:
                    self._counts["mismatch"] += 1
                log.info("%s: %s: %s", self.path, job.where(index), difference)
                code = Code.BAD_CHECKSUM
            except OSError as error:
                self._failed(store, error, job)
            except Exception:
                log.exception("%s: a segment could not be %s", self.path, job.done_to_it)
            self._finish(job, index, code)

    def _take(self, prefers_writes: bool) -> tuple[DiskStore, Op] | None:
        """Wait for a segment, and take it out of the queue. Returns None when the daemon ends."""
        queue = self._queue
        with self._changed:
            while not self._closing:
                first, other = (queue.writes, queue.reads) if prefers_writes else (queue.reads, queue.writes)
                waiting = first or other
                if waiting and self._store is not None:
                    op = waiting.popleft()
                    self._running[threading.current_thread().name] = time.monotonic()
                    return self._store, op
                self._queued.wait()
        return None

    def _finish(self, job: Job, index: int, code: Code) -> None:
        with self._changed:
            del self._running[threading.current_thread().name]
            job.codes[index] = code
            done = self._ended(job, 1)
            if not job.left or self._store is None or self._closing:
                self._changed.notify_all()
        if done is not None:
            self._around.post(done)

    def _ended(self, job: Job, count: int) -> Event | None:
        """Count segments of a job that have ended. Returns the event of a job that has ended; a write with bytes on the
        device goes to the thread of the tables instead."""
        job.left -= count
        if job.left:
            return None
        if isinstance(job, ReadJob):
            self._jobs.pop(job.instruction.fetch, None)
        elif Code.COMMITTED in job.codes and self._store is not None:
            self._records.append(job)
            return None
        else:
            lose(job)
        return job.done()

    # -- failures

    def _failed(self, store: DiskStore, error: OSError, job: Job) -> None:
        now = time.monotonic()
        what = "read" if isinstance(job, ReadJob) else "write"
        with self._changed:
            if store is not self._store:
                return
            self._counts[what] += 1
            if no_space(error):
                self._full = True
                self._changed.notify_all()
                return
            self._errors.append(now)
            while self._errors[0] < now - self._patience.errors_s:
                self._errors.popleft()
            gone = error.errno in GONE or len(self._errors) >= self._patience.errors
        log.warning("%s: a segment could not be %s: %s", self.path, job.done_to_it, _text(error))
        if gone:
            self._set_aside(f"{what} errors: {_text(error)}")

    def _set_aside(self, reason: str) -> None:
        with self._changed:
            if self._store is None:
                return
            self._store = None
            self._problem = reason
            done = self._all_ended()
            self._errors.clear()
            self._changed.notify_all()
            # Posted under the lock, so that the rules learn of it before the reads that the device loses end: they
            # count a lost read of a device in use as damage.
            self._around.post(events.DiskGone(self.number, reason))
        log.error("the disk tier at %s is set aside, and its segments are not used: %s", self.path, reason)
        for event in done:
            self._around.post(event)

    def _all_ended(self) -> list[Event]:
        """End all that no thread carries out: returns its events."""
        done = [self._ended(job, 1) for job, _ in self._queue.take_all()]
        if self._store is None:
            writes = [each for each in self._records if isinstance(each, WriteJob | EraseJob)]
            self._records.clear()
            for write in writes:
                lose(write)
            done += [write.done() for write in writes]
        return [event for event in done if event is not None]

    # -- the thread of the tables

    def _keep(self) -> None:
        wait_s = self._patience.check_s
        while True:
            try:
                store = self._open()
                wait_s = self._patience.check_s
                self._serve(store)
                if self._problem == REMOVING:
                    wait_s = 0.0
            except (OSError, Unusable, SlowCheck) as error:
                self._not_opened(_text(error))
            except Exception as error:
                log.exception("the disk tier at %s failed", self.path)
                self._not_opened(repr(error))
            self._running_ended()
            opened, self._opened = self._opened, None
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.close()
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, wait_s):
                    return
            wait_s = min(2 * wait_s, self._patience.most_check_s) or self._patience.check_s

    def _not_opened(self, reason: str) -> None:
        with self._changed:
            serving = self._store is not None
            if not serving and self._problem == reason:
                return
            if not serving:
                self._problem = reason
        if serving:
            self._set_aside(reason)
        else:
            log.error("the disk tier at %s cannot be used: %s", self.path, reason)

    def _running_ended(self) -> None:
        """Wait until no thread uses the files."""
        with self._changed:
            self._running.pop(self._keeper.name, None)
            self._changed.wait_for(lambda: not self._running)

    def _open(self) -> DiskStore:
        """Open the device and report its segments. Raises OSError, `Unusable` and `SlowCheck`."""
        began = time.monotonic()
        files = self._open_files()
        around = self._around
        limit = None if self._limit is None else max(0, self._limit - OWN_BYTES)
        store = self._opened = DiskStore(files, limit)
        around.orders.take(self.path)
        rates = self._check(files)
        self._rates = rates or UNMEASURED
        evicted, clean = around.orders.evicted, around.orders.clean(self.path)
        found = store.open(around.cluster, around.node, around.keys, empty=not clean)
        self._capacity = store.room(full=rates is None)
        if not clean:
            around.orders.cleaned(self.path, evicted)
            around.orders_changed()
            log.info("%s: all segments are removed, because it missed an eviction", self.path)
        with self._changed:
            if not around.orders.clean(self.path):
                # Ordered meanwhile.
                self._problem = REMOVING
                return store
            self._store, self._problem, self._full = store, "" if rates else FULL, False
            self._lost = 0
        number, count = self.number, 0
        self._deliver_capacity()
        for each in found:
            slab, shards, keys, places, notes = each
            count += len(keys) // KEY_BYTES
            event = events.DiskFound(number, slab.tenant, slab.slot_bytes, shards, keys, places, notes)
            if self._store is not store or not around.deliver(event):
                return store
        around.deliver(events.DiskRecovered(number))
        if store.unreadable:
            log.warning("%s: %d segments are lost, as their key is not in 'disk_keys'", self.path, store.unreadable)
        with self._changed:
            self._lost = store.lost
        if store.lost:
            log.error("%s: %d segments are lost, because their records or files are damaged", self.path, store.lost)
        log.info(
            "the disk tier at %s has %d segments after %.1f s: capacity %d MiB, reads %.2f GB/s, writes %.2f GB/s",
            self.path,
            count,
            time.monotonic() - began,
            self._capacity >> 20,
            self._rates[0] / 1e9,
            self._rates[1] / 1e9,
        )
        return store

    def _deliver_capacity(self) -> None:
        self._around.deliver(events.DiskReady(self.number, self._capacity, *self._rates))

    def _check(self, files: Files) -> tuple[float, float] | None:
        """Check the device and measure its bandwidth; None where it has no space for that. Raises OSError and
        `SlowCheck`."""
        nbytes = self._patience.probe_bytes
        if self._limit is not None:
            room = max(LEAST_PROBE, self._limit - files_bytes(files))
            nbytes = min(nbytes, room - room % PROBE_PIECE)
        try:
            return checked(files, nbytes, self._patience.slow_s)
        except OSError as error:
            if not no_space(error):
                raise
            log.error("the disk tier at %s is %s", self.path, FULL)
            return None

    def _serve(self, store: DiskStore) -> None:
        """Record what the other threads have written, until the device is set aside or the daemon ends. Raises
        OSError."""
        patience = self._patience
        unsynced_since: float | None = None
        next_capacity = time.monotonic() + patience.capacity_s
        while True:
            with self._changed:
                self._running.pop(self._keeper.name, None)
                until = next_capacity if unsynced_since is None else unsynced_since + patience.sync_s
                self._changed.wait_for(
                    lambda: self._records or self._ending() or self._full or self._store is not store,
                    max(0.0, until - time.monotonic()),
                )
                if self._store is not store:
                    return
                ending = self._ending()
                batch = list(self._records)
                self._records.clear()
                full, now = self._full, time.monotonic()
                self._full = False
                self._running[self._keeper.name] = now
            writes = [each for each in batch if isinstance(each, WriteJob | EraseJob)]
            recorded = False
            try:
                self._record(store, batch, bool(writes))
                if batch and not writes and unsynced_since is None:
                    unsynced_since = now
                if writes or ending or (unsynced_since is not None and now >= unsynced_since + patience.sync_s):
                    store.sync()
                    unsynced_since = None
                recorded = True
            except OSError as error:
                # Some file systems need space also to write what a file has already.
                if not no_space(error):
                    raise
                full = True
            finally:
                with self._changed:
                    recorded = recorded and self._store is store
                for write in writes:
                    if not recorded:
                        lose(write)
                    self._around.post(write.done())
            if ending:
                return
            if full or now >= next_capacity:
                self._tell_capacity(store, full)
                next_capacity = now + (min(patience.capacity_s, FULL_S) if self._problem else patience.capacity_s)

    def _ending(self) -> bool:
        """True if the daemon ends and no thread reads or writes. Called while the thread of the tables does not use the
        files."""
        return self._closing and not self._running

    def _record(self, store: DiskStore, batch: list[WriteJob | EraseJob | DiskForget | DiskTrim], sync: bool) -> None:
        if sync:
            store.sync_slabs()
        for each in batch:
            if isinstance(each, DiskTrim):
                store.trim(each.tenant, each.slot_bytes, each.places)
            elif isinstance(each, DiskForget):
                store.forget(each.tenant, each.slot_bytes, [place.slot for place in unpack_places(each.places)])
            else:
                each.record(store)

    def _tell_capacity(self, store: DiskStore, full: bool) -> None:
        room = store.room(full=full)
        with self._changed:
            # It waits for the control loop now, and not for the device.
            self._running.pop(self._keeper.name, None)
            changed = full or (self._problem == FULL and room > self._capacity)
            changed |= abs(room - self._capacity) > CAPACITY_CHANGE * self._capacity
            begins = full and self._problem != FULL
            if changed:
                self._capacity = room
                if self._store is store:
                    self._problem = FULL if full else ""
        if begins:
            log.error("the disk tier at %s is full: its capacity is %d MiB for now", self.path, room >> 20)
        if changed and self._store is store:
            self._deliver_capacity()


def _text(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
