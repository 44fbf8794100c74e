"""The cold tier's threads, queues and failures.

::

    control loop                 4 threads read, 2 write               thread "cold-keeper"
      | ColdLook: from memory                                            | opens and measures the place
      | ColdRead  ---> queue ---->| object, verification                 | every `poll_s`: journals of other writers,
      |<------------- FetchDone --|                                      |   own journal, merges, expiry, evictions,
      | ColdWrite ---> queue ---->| sealed object, then the index        |   now and then a scan of one folder
      |<------------ ColdWritten -|                                      |

A call of the place may never return. `watch` then sets the place aside: everything that waits or runs ends at once, and
its threads are left behind (`jobs.py` says why that is safe). The place is opened again, with new threads, when the
keeper reaches it, and when not too many threads are left behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import ColdErase, ColdLook, ColdRead, ColdWrite
from tokenlake.errors import LimitReached
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys
from tokenlake_server.cold import sealed
from tokenlake_server.cold.base import Missing, Reader, Unfit
from tokenlake_server.cold.catalogue import Catalogue, Clock
from tokenlake_server.cold.index import Index
from tokenlake_server.cold.jobs import GivenUp, Job, Op, ReadJob, WriteJob, job_of
from tokenlake_server.cold.measurement import Measured, Measurement, probed
from tokenlake_server.cold.names import ColdTenant, path_of, short_of
from tokenlake_server.cold.places import Place
from tokenlake_server.cold.records import ERASED, REMOVED, Kind
from tokenlake_server.cold.room import Room
from tokenlake_server.cold.state import ColdState
from tokenlake_server.cold.upkeep import PATIENCE, Erasure, Erasures, Patience, Upkeep
from tokenlake_server.disk.files import no_space
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents

log = logging.getLogger(__name__)

READERS, WRITERS = 4, 2
MOST_LEFT_BEHIND = 3 * (READERS + WRITERS)
"""Threads in calls that have not returned, up to which the place is opened again."""
MOST_QUEUED = 1024
"""Segments that wait to be read, and that wait to be written; further ones are LOST."""
GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTCONN, errno.ESHUTDOWN})
"""Errors after which a place is not used again before a check."""
FULL = "full: it takes no further segments until there is room again"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the daemon that the tier uses."""

    arena: Arena
    post: Callable[[Event], None]
    """Passes an event to the rules; from any thread."""
    contents: Contents
    tenants: dict[str, ColdTenant]
    evicted_s: Callable[[], float] = lambda: 0.0
    """The time of the last eviction by an operator, in seconds since 1970; from any thread."""


class _Session:
    """A place from its opening until it is set aside."""

    def __init__(self, place: Place, upkeep: Upkeep, catalogue: Catalogue, room: Room, measured: Measured) -> None:
        self.place = place
        self.upkeep = upkeep
        self.catalogue = catalogue
        self.room = room
        self.measurement = Measurement(measured)
        self.threads = 0
        """Threads that may use the place; the last one closes it."""


class ColdStore:
    """`start`, `look`, `carry_out`, `erase`, `abort`, `watch` and `state` are called on the control loop and never
    block; `close` blocks for at most `close_s`."""

    def __init__(
        self,
        name: str,
        open_place: Callable[[], Place],
        size: int,
        days: float,
        surroundings: Surroundings,
        patience: Patience = PATIENCE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`size`: most bytes of all objects. `days`: age without a use after which an object expires."""
        self.name = name
        self._open_place = open_place
        self._size = size
        self._keep_s = days * 86400
        self._around = surroundings
        self._patience = patience
        self._clock = clock
        self.index = Index()
        self._lock = threading.Lock()
        """Guards all fields below."""
        self._queued = threading.Condition(self._lock)
        self._wanted = threading.Condition(self._lock)
        """Wakes the keeper."""
        self._session: _Session | None = None
        self._reads: deque[Op] = deque()
        self._writes: deque[Op] = deque()
        self._jobs: dict[int, ReadJob] = {}
        self._running: set[Op] = set()
        self._left_behind = 0
        self._keeper_since: float | None = None
        self._erasures = Erasures()
        self._errors: deque[float] = deque()
        self._full_until = 0.0
        self._problem = ""
        self._counts = dict.fromkeys(("read", "write", "mismatch", "vanished", "refused"), 0)
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name="cold-keeper", daemon=True)

    def start(self) -> None:
        """Begin to open the place. Raises `LimitReached` where no thread can be started."""
        try:
            self._keeper.start()
        except RuntimeError as error:
            raise LimitReached(f"the thread of the cold tier cannot be started: {error}") from error

    # -- instructions

    def look(self, order: ColdLook) -> Event:
        """The answer to a `ColdLook`."""
        tenant = self._around.tenants.get(order.tenant)
        if self._session is None or tenant is None:
            return events.ColdLooked(order.look, bytes(len(split_keys(order.keys))))
        return events.ColdLooked(order.look, self._found(tenant, order.keys, order.slot_bytes))

    def carry_out(self, instruction: ColdRead | ColdWrite) -> None:
        """Begin to read or write segments; an event tells the rules when it is done."""
        job = job_of(instruction)
        known = instruction.tenant in self._around.tenants
        with self._lock:
            queue = self._reads if isinstance(job, ReadJob) else self._writes
            if isinstance(job, WriteJob) and known and self._session is not None:
                self._leave_out(job)
            fits = len(queue) + job.left <= MOST_QUEUED
            if self._session is not None and known and fits and job.left and not self._closing:
                if isinstance(job, ReadJob):
                    self._jobs[job.order.fetch] = job
                job.ops = [Op(job, at, self._lock) for at, code in enumerate(job.codes) if code == Code.LOST]
                queue.extend(job.ops)
                self._queued.notify_all()
                return
        self._around.post(job.done())

    def _leave_out(self, job: WriteJob) -> None:
        """Segments of a write that the place has already are not written."""
        order = job.order
        tenant = self._around.tenants[order.tenant]
        for at, there in enumerate(self._found(tenant, order.keys, order.slot_bytes)):
            if there:
                job.codes[at] = Code.EXISTS
                job.left -= 1

    def erase(self, order: ColdErase) -> None:
        """Carry out a `ColdErase`: the objects are not found from now on, and deleted by the keeper."""
        tenant = self._around.tenants.get(order.tenant)
        if tenant is not None:
            names = tuple(tenant.shorts(order.keys).tolist())
            self._erase(Erasure(names, ERASED, tenant.tag, order.slot_bytes))

    @property
    def erasing(self) -> bool:
        """True while objects of an order are not deleted."""
        return self._erasures.waiting

    def _erase(self, order: Erasure) -> None:
        self._erasures.add(order)
        with self._lock:
            self._wanted.notify_all()

    def _found(self, tenant: ColdTenant, keys: bytes, slot_bytes: int) -> bytes:
        """Per segment, 1 where the index has it and no order to erase it waits."""
        kind, shorts = Kind(tenant.tag, slot_bytes), tenant.shorts(keys)
        found = self.index.find(shorts, kind)
        if self._erasures.waiting:
            pairs = zip(found, self._erasures.hidden(shorts, kind), strict=True)
            found = bytes(there and not hidden for there, hidden in pairs)
        return found

    def abort(self, fetch: int) -> None:
        """End a read: what has not been read is LOST."""
        with self._lock:
            job = self._jobs.get(fetch)
            done = self._give_up(job.ops) if job is not None else []
        self._post(done)

    def watch(self, now: float) -> None:
        """Set the place aside where a call does not get on. `now`: of `time.monotonic`."""
        with self._lock:
            began = [op.since for op in self._running if op.since is not None]
            oldest = min([*began, *([self._keeper_since] if self._keeper_since is not None else [])], default=now)
        if now - oldest > self._patience.slow_s:
            self._set_aside(f"slow: a call takes more than {self._patience.slow_s:g} s")

    @property
    def state(self) -> ColdState:
        """The state of the tier now."""
        with self._lock:
            session, counts = self._session, self._counts
            totals = self.index.totals
            measured = session.measurement.now if session is not None else Measured(0.0, 0.0, 0.0)
            problem = self._problem
            if session is not None:
                full = FULL if time.monotonic() < self._full_until else ""
                problem = full or session.catalogue.problem
            return ColdState(
                self.name,
                session is not None,
                session is not None and not self._refuses(session, time.monotonic()),
                problem,
                totals.objects if session is not None else 0,
                totals.nbytes if session is not None else 0,
                self._size,
                self.index.entries,
                time.monotonic() - session.catalogue.fresh_at if session is not None else 0.0,
                *measured,
                len(self._reads) + len(self._writes),
                counts["read"],
                counts["write"],
                counts["mismatch"],
                counts["vanished"],
                counts["refused"],
                session.upkeep.expired if session is not None else 0,
                session.upkeep.scanned if session is not None else 0,
            )

    def close(self) -> None:
        """End what has begun, write the last journal, and stop. Blocks for at most `close_s`."""
        with self._lock:
            self._closing = True
            if self._session is not None:
                self._session.upkeep.stopping = True
            self._around.post(events.ColdGone("the daemon ends"))
            done = self._give_up([*self._reads, *self._writes, *self._running])
            self._queued.notify_all()
            self._wanted.notify_all()
        self._post(done)
        if self._keeper.ident is not None:
            self._keeper.join(self._patience.close_s)

    # -- threads that read and write

    def _work(self, session: _Session, queue: deque[Op]) -> None:
        room = sealed.room_for_piece()
        try:
            while (op := self._take(session, queue)) is not None:
                self._finish(session, op, self._one(session, op, room))
        finally:
            self._left(session)

    def _take(self, session: _Session, queue: deque[Op]) -> Op | None:
        with self._queued:
            while self._session is session and not self._closing:
                if queue:
                    op = queue.popleft()
                    op.since = time.monotonic()
                    self._running.add(op)
                    session.measurement.began(op.since, read=queue is self._reads)
                    return op
                self._queued.wait()
        return None

    def _left(self, session: _Session) -> None:
        """A thread does not use the place any more."""
        with self._lock:
            session.threads -= 1
            if session is not self._session and session.threads >= 0:
                self._left_behind = max(0, self._left_behind - 1)
            last = session.threads == 0
        if last:
            with contextlib.suppress(OSError):
                session.place.close()

    def _one(self, session: _Session, op: Op, room: memoryview) -> Code:
        job = op.job
        tenant = self._around.tenants[job.order.tenant]
        name = tenant.name(job.keys[op.index])
        reads = isinstance(job, ReadJob)
        try:
            if isinstance(job, ReadJob):
                return self._read(session, job, op, tenant, name, room)
            assert isinstance(job, WriteJob)
            return self._write(session, job, op, tenant, name, room)
        except GivenUp:
            return Code.LOST
        except Missing:
            with self._lock:
                self._counts["vanished"] += 1
            self.index.removed([short_of(name)], session.catalogue.clock.minute())
        except Unfit as difference:
            with self._lock:
                self._counts["mismatch"] += 1
            log.info("%s: an object is removed: %s", self.name, difference)
            self._erase(Erasure((short_of(name),), REMOVED))
            return Code.BAD_CHECKSUM
        except OSError as error:
            self._failed(session, error, "read" if reads else "write")
        except Exception:
            log.exception("%s: a segment could not be %s", self.name, "read" if reads else "written")
        return Code.LOST

    def _read(self, session: _Session, job: ReadJob, op: Op, tenant: ColdTenant, name: bytes, room: memoryview) -> Code:
        order = job.order
        began = time.monotonic()
        opened = session.place.read(path_of(short_of(name)))
        try:
            reader = _Timed(opened, began)
            (segment,) = self._around.arena.slots([job.slots[op.index]], order.slot_bytes)
            stored = sealed.read(reader, tenant, name, segment, order.shards, room, op)
        finally:
            opened.close()
        self.index.used(short_of(name), session.catalogue.clock.minute())
        with self._lock:
            if op.ended or op.given_up:
                return Code.LOST
            session.measurement.began_to_read(reader.latency_s)
            job.found(op.index, stored.checksums, stored.note)
        if stored.content:
            self._around.contents.offer(order.tenant, [job.keys[op.index]], [stored.content], job.content_limit)
        return Code.LOCAL

    def _write(
        self, session: _Session, job: WriteJob, op: Op, tenant: ColdTenant, name: bytes, room: memoryview
    ) -> Code:
        order, catalogue = job.order, session.catalogue
        short, kind = short_of(name), Kind(tenant.tag, order.slot_bytes)
        nbytes = sealed.object_bytes(order.slot_bytes)
        began = time.monotonic()
        if self._found(tenant, job.keys[op.index], order.slot_bytes) == b"\1":
            return Code.EXISTS
        named, writers = self.index.totals.nbytes, catalogue.seen.writers
        if self._refuses(session, began) or not session.room.take(nbytes, named, writers, began):
            with self._lock:
                self._counts["refused"] += 1
            return Code.LOST
        try:
            (segment,) = self._around.arena.slots([job.slots[op.index]], order.slot_bytes)
            content = self._around.contents.contents(order.tenant, [job.keys[op.index]], 1 << 12)
            stored = sealed.Stored(job.note(op.index), job.checksums(op.index), content[0] if content else b"")
            parts = sealed.parts(tenant, name, segment, order.shards, stored, room, op)
            session.place.write(path_of(short), parts, nbytes)
        except BaseException:
            session.room.gave_up(nbytes)
            raise
        self.index.added(short, kind, catalogue.clock.minute())
        session.room.wrote(nbytes, time.monotonic())
        return Code.COMMITTED

    def _refuses(self, session: _Session, now: float) -> bool:
        """True while nothing can be written: the place is full, others have not heard of this node, or it has not heard
        of them for long."""
        stale = now - session.catalogue.fresh_at > 3 * session.place.poll_s + self._patience.slow_s
        return stale or now < self._full_until or not session.room.ready(now)

    def _finish(self, session: _Session, op: Op, code: Code) -> None:
        moved = op.job.order.slot_bytes if code in (Code.LOCAL, Code.COMMITTED) else 0
        with self._lock:
            self._running.discard(op)
            session.measurement.ended(moved, time.monotonic(), read=isinstance(op.job, ReadJob))
            done = None
            if not op.ended:
                op.job.codes[op.index] = code
                done = self._ended(op)
        self._post([done])

    def _ended(self, op: Op) -> Event | None:
        """Count an operation that has ended. Returns the event of a job that has ended."""
        op.ended = True
        job: Job = op.job
        job.left -= 1
        if isinstance(job, ReadJob) and job.codes[op.index] != Code.LOCAL:
            job.not_found(op.index)
        if job.left:
            return None
        if isinstance(job, ReadJob):
            self._jobs.pop(job.order.fetch, None)
        return job.done()

    def _give_up(self, ops: Sequence[Op]) -> list[Event | None]:
        """End operations that wait or run; called with the lock. Returns the events of jobs that have ended. One that
        touches its slot is ended by its thread, within moments."""
        done = []
        for op in ops:
            if not op.ended and op.give_up():
                done.append(self._ended(op))
                for queue in (self._reads, self._writes):
                    if op.since is None and op in queue:
                        queue.remove(op)
        return done

    def _post(self, done: Sequence[Event | None]) -> None:
        for event in done:
            if event is not None:
                self._around.post(event)

    # -- failures

    def _failed(self, session: _Session, error: OSError, what: str) -> None:
        now = time.monotonic()
        with self._lock:
            if session is not self._session:
                return
            self._counts[what] += 1
            if no_space(error):
                self._full_until = now + self._patience.full_s
                log.error("the cold tier at %s is %s", self.name, FULL)
                return
            self._errors.append(now)
            while self._errors[0] < now - self._patience.errors_s:
                self._errors.popleft()
            gone = error.errno in GONE or len(self._errors) >= self._patience.errors
        log.warning(
            "%s: a segment could not be %s: %s", self.name, "read" if what == "read" else "written", text(error)
        )
        if gone:
            self._set_aside(f"{what} errors: {text(error)}")

    def _set_aside(self, reason: str) -> None:
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            self._problem = reason
            self._left_behind += session.threads
            self._errors.clear()
            done = self._give_up([*self._reads, *self._writes, *self._running])
            self._reads.clear()
            self._writes.clear()
            self._running.clear()
            self._queued.notify_all()
            self._wanted.notify_all()
            # Under the lock, so that the rules hear of it before its reads end.
            self._around.post(events.ColdGone(reason))
        log.error("the cold tier at %s is set aside: %s", self.name, reason)
        self._post(done)

    # -- the keeper

    def _keep(self) -> None:
        wait_s = self._patience.check_s
        while True:
            session = None
            try:
                session = self._open()
                wait_s = self._patience.check_s
                self._serve(session)
            except (OSError, Unfit) as error:
                self._not_opened(text(error))
            except Exception as error:
                log.exception("the cold tier at %s failed", self.name)
                self._not_opened(repr(error))
            if session is not None:
                self._left(session)
            with self._lock:
                self._keeper_since = None
                if self._wanted.wait_for(lambda: self._closing, wait_s):
                    return
            wait_s = min(2 * wait_s, self._patience.most_check_s)

    def _not_opened(self, reason: str) -> None:
        with self._lock:
            serving = self._session is not None
            same, self._problem = self._problem == reason, reason
        if serving:
            self._set_aside(reason)
        elif not same:
            log.error("the cold tier at %s cannot be used: %s", self.name, reason)

    def _open(self) -> _Session:
        """Open the place, measure it and read the index. Raises OSError."""
        with self._lock:
            if self._left_behind > MOST_LEFT_BEHIND:
                raise OSError(errno.EBUSY, f"{self._left_behind} threads wait for it and do not return")
        self._at_place()
        place = self._open_place()
        try:
            measured = probed(place, READERS, self._patience.probe_bytes)
            clock = Clock(self._clock)
            catalogue = Catalogue(place, self.index, clock, self._patience.merge_s)
            catalogue.flush()
            catalogue.poll()
        except BaseException:
            place.close()
            raise
        upkeep = Upkeep(
            place,
            catalogue,
            self._erasures,
            self._size,
            self._keep_s,
            self._patience,
            lambda: self._at_place() and self._session is session,
            self._around.evicted_s,
        )
        room = Room(self._size, place.late_s + 3 * place.poll_s)
        session = _Session(place, upkeep, catalogue, room, measured)
        room.announced(time.monotonic())
        threads = [
            threading.Thread(target=self._work, args=(session, queue), name=f"cold-{what}-{number}", daemon=True)
            for what, queue, count in (("read", self._reads, READERS), ("write", self._writes, WRITERS))
            for number in range(count)
        ]
        session.threads = len(threads) + 1
        with self._lock:
            self._session, self._problem = session, ""
            self._keeper_since = None
            self._around.post(events.ColdReady(*measured))
        for thread in threads:
            thread.start()
        totals = self.index.totals
        log.info(
            "the cold tier at %s has %d objects, %.1f GiB: first byte after %.1f ms, reads %.2f, writes %.2f GB/s",
            self.name,
            totals.objects,
            totals.nbytes / (1 << 30),
            measured.latency_s * 1e3,
            measured.read_bytes_per_s / 1e9,
            measured.write_bytes_per_s / 1e9,
        )
        return session

    def _at_place(self) -> bool:
        """The keeper begins a call of the place, or gets on."""
        with self._lock:
            self._keeper_since = time.monotonic()
        return True

    def _serve(self, session: _Session) -> None:
        """Keep the index until the place is set aside or the daemon ends. Raises OSError."""
        upkeep = session.upkeep
        while True:
            with self._lock:
                self._keeper_since = None
                self._wanted.wait_for(
                    lambda: self._closing or self._session is not session or self._erasures.waiting, upkeep.poll_s
                )
                if self._session is not session:
                    return
                closing = self._closing
            if closing:
                upkeep.end()
                return
            upkeep.step()
            now = time.monotonic()
            with self._lock:
                told = session.measurement.to_tell(now)
                if told is not None and self._session is session:
                    self._around.post(events.ColdReady(*told))


class _Timed:
    """A reader that notes when its first bytes came."""

    def __init__(self, reader: Reader, began: float) -> None:
        self.nbytes = reader.nbytes
        self.latency_s = 0.0
        self._reader = reader
        self._began: float | None = began

    def read(self, room: memoryview) -> None:
        self._reader.read(room)
        if self._began is not None:
            self.latency_s = time.monotonic() - self._began
            self._began = None

    def close(self) -> None:
        self._reader.close()


def text(error: BaseException) -> str:
    """An error for people."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
