"""The leases and writes that the daemon has granted to this process, and when a grant is given back.

A grant is a lease or a write. `Lease` and `Write` objects, and the garbage collector through their finalisers, call
this module at any time and from any thread. The messages that give grants back are collected, and `sweep` sends them
when a thread uses the connection anyway.

The daemon counts one owner of a grant per process. Several objects of this process may hold the same lease or write:
an item is given back when the last of them has given it up. While the reply to an `Attach` is on its way, no item that
the reply may grant again is given back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, Refused, TokenLakeError, Unreachable
from tokenlake.identity import LeaseId, WriteId
from tokenlake.wire import engine
from tokenlake.wire.slots import SLOT_BYTES, slot_array
from tokenlake_client.channel import Pending
from tokenlake_client.link import Link

log = logging.getLogger(__name__)


class LeaseHold:
    """The items (segments) of a lease that one `Lease` object holds: each item until it is released and no array over
    it is alive. Guarded by the lock of `Grants`. This object must refer to nothing that keeps the pool alive."""

    __slots__ = ("counted", "id", "link", "pins", "places", "read", "took", "unreleased")

    def __init__(self, lease: LeaseId, link: Link, places: NDArray[np.void]) -> None:
        """`places`: per segment of the lease, its place in this node's arena, zeros where it is not there: an array
        over that of the `Lease` object, which changes it."""
        items = len(places)
        self.id = lease
        self.link = link
        """The connection (`Link`) to the daemon over which the lease was granted."""
        self.pins = np.zeros(items, np.uint32)
        """Per segment of the lease: the number of groups of arrays (one per `Lease.fetch`) over it that are alive."""
        self.unreleased = np.ones(items, np.bool_)
        self.places = places
        self.read = np.zeros(items, np.bool_)
        """Per segment of the lease: True once this process has read it."""
        self.counted = True
        """False: the tokens of the match do not count, because the engine asks again."""
        self.took: tuple[int, int, float] | None = None
        """The tokens that the engine takes, as in `engine.Release.took`; None: all that it has read."""

    def held(self) -> NDArray[np.bool_]:
        """Per segment of the lease: True while the `Lease` object has not released it, or an array over it is alive."""
        held: NDArray[np.bool_] = np.logical_or(self.unreleased, self.pins)
        return held

    def pin(self, start: int, stop: int) -> int:
        """Pin the segments of the lease from `start` to `stop`, or to the first released one, because arrays over them
        are about to be made. Returns where the pinned segments end."""
        unreleased = self.unreleased[start:stop]
        if not unreleased.all():
            stop = start + int(unreleased.argmin())
        self.pins[start:stop] += 1
        return stop

    def release(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Release the segments of the lease from `start` to `stop`. Returns, per segment, True if this call ended the
        hold of it: no array over it is alive."""
        free: NDArray[np.bool_] = self.unreleased[start:stop] & (self.pins[start:stop] == 0)
        self.unreleased[start:stop] = False
        return free

    def unpin(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Remove one pin from the segments of the lease from `start` to `stop`. Returns, per segment, True when the
        lease object does not hold it any more."""
        self.pins[start:stop] -= 1
        return ~self.held()[start:stop]


class Grants:
    """The grants of one pool. `lock` guards the link, `closed`, and all counts of this object and of its `LeaseHold`
    objects."""

    def __init__(self, link: Link) -> None:
        self.lock = threading.RLock()
        self._link = link
        self._closed = False
        self._left = False
        """True once the daemon was told that the pool has left, or its connection was dropped."""
        self._bye = False
        """True once the daemon is being told that: nothing else is sent any more."""
        self._ended_pins: deque[tuple[LeaseHold, int, int]] = deque()
        self._pins = 0
        self._fillings = 0
        self._leases: dict[int, list[LeaseHold]] = {}
        self._writes: dict[int, int] = {}
        """By the number of a write, how many objects of this process hold the write."""
        self._slots: dict[int, list[bytes]] = {}
        """By the number of a write, the slots that each `Write` object of this process may fill, packed."""
        self._abort_when_free: set[int] = set()
        """Numbers of the writes to abort when no object of this process holds them any more."""
        self._attaching: dict[int, tuple[int, bool]] = {}
        """The `Attach` requests over the current link whose reply may still arrive: by the number of the request, the
        number of the lease or write, and whether it is a write."""
        self._releases: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        """The ranges to give back, those that were read and the others."""
        self._took: dict[int, tuple[int, int, float]] = {}
        """By the number of a lease: `LeaseHold.took`, for the message with its next range."""
        self._uncounted: set[int] = set()
        """The numbers of leases whose tokens do not count, for the message with their next range."""
        self._given_up: set[int] = set()
        """The ids of the matches over the current link that were given up before their answer."""
        self._collected: deque[LeaseHold] = deque()
        """Holds without items whose `Lease` object was garbage-collected before its release."""
        self._aborts: list[int] = []

    @property
    def link(self) -> Link:
        """The current link."""
        return self._link

    @property
    def open_link(self) -> Link:
        """The current link, for a request for something new. Raises `Unreachable` when the pool was closed."""
        if self._closed:
            raise Unreachable("the pool was closed")
        return self._link

    @property
    def closed(self) -> bool:
        """True once the pool was closed: the daemon grants it no lease and no write any more."""
        return self._closed

    @property
    def left(self) -> bool:
        """True once the connection of a closed pool has ended, because nothing of it accesses leased slots."""
        return self._left

    @property
    def leaving(self) -> bool:
        """True while the daemon has not read yet that a closed pool leaves."""
        return self._bye and not self._left

    @property
    def accesses(self) -> int:
        """The number of groups of arrays over leased slots that are alive, plus the number of writes whose slots may
        still be filled."""
        with self.lock:
            return self._pins + self._fillings

    # -- the connection

    def switch_to(self, link: Link) -> None:
        """Use `link` from now on. If it does not resume the session (another `Link.life`), all grants are dropped: they
        ended with the session. Raises `Unreachable` and `DeadlinePassed` where a daemon that has kept its memory is not
        told what this process holds of it; nothing has changed then."""
        with self.lock:
            if self._left:
                self._leave(link)
                return
            self._return_orphans()
            self._attaching.clear()
            self._given_up.clear()
            if link.life != self._link.life:
                self._leases.clear()
                self._writes.clear()
                self._slots.clear()
                self._abort_when_free.clear()
                self._releases = {False: [], True: []}
                self._took.clear()
                self._uncounted.clear()
                self._aborts.clear()
                self._pins = self._fillings = 0
            if link.kept:
                self._regrant(link)
            else:
                # This must be the first message over the link: the daemon takes back all grants that it does not name,
                # such as those in replies that never arrived.
                with contextlib.suppress(TokenLakeError):
                    link.channel.tell(engine.ReconcileGrants(tuple(self._leases), tuple(self._writes)))
            previous, self._link = self._link, link
            previous.leave()
            # The messages that gave items back over the previous connection may not have arrived: send them again.
            self._abort_when_free.intersection_update(self._writes)
            for lease in self._leases:
                self._release_unheld(lease)

    def _regrant(self, link: Link) -> None:
        """Tell a daemon that has the memory of the daemon before what this process holds of it. The caller holds the
        lock, so that what is held does not change meanwhile."""
        self._unpin_ended()
        leases = [(lease, *_held_places(holds)) for lease, holds in self._leases.items()]
        writes = [(write, slots) for write, found in self._slots.items() for slots in found]
        link.tell_held([each for each in leases if any(each[2])], writes)

    def current(self, link: Link) -> Link:
        """The pool's current link. It serves for a lease or write that was granted over `link`, possibly an earlier
        connection of the same session. Raises `Unreachable` when the grant ended with its daemon or its session, or
        when the pool was closed."""
        current = self._link
        if self._closed:
            raise Unreachable("the pool was closed")
        if link.incarnation != current.incarnation:
            raise Unreachable("the daemon restarted; its leases and writes are gone")
        if link.life != current.life:
            raise Unreachable("the session ended with the connection; its leases and writes are gone")
        return current

    def close(self) -> None:
        """The pool gets no lease and no write any more, and its leases are released. It leaves the daemon now or, where
        arrays over leased slots or writes are alive, with the last of them: `leave_if_free`. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if not self.leave_if_free():
                _closed_with_arrays.add(self)
                for hold in [hold for holds in self._leases.values() for hold in holds]:
                    self._give_back(hold, 0, hold.release(0, len(hold.pins)))
                self.sweep()

    def leave_if_free(self, *, lost: bool = False) -> bool:
        """Leave the daemon if the pool is closed and nothing of it accesses leased slots. Where the connection has
        broken, the daemon may live and keep the grants, so that the pool first connects again. `lost`: also then, and
        where something may access slots, because the daemon has ended, or no code is left that could tell when the
        access ends; the daemon keeps the slots until the process ends. Returns whether the pool has left."""
        with self.lock:
            self.sweep()
            free = not self.accesses and (self._bye or not self._link.channel.broken)
            if self._closed and not self._left and (lost or free):
                self._left = self._leave(self._link, lost=lost)
            return self._left

    def close_unless_pinned(self) -> bool:
        """Close the connections of a pool that was garbage-collected, unless arrays over leased slots are alive; these
        are collected soon. Returns whether it closed."""
        with self.lock:
            self.sweep()
            if self._pins:
                return False
            self._closed = True
            return self.leave_if_free(lost=bool(self._fillings) or self._link.channel.broken)

    def _leave(self, link: Link, *, lost: bool = False) -> bool:
        """Say `Bye`, and drop the connection once the daemon has read it. Returns False until then, unless `lost`: the
        bytes that the daemon has not read are dropped with the connection, and the leases would stay."""
        if not self.accesses and not link.channel.broken:
            link.forget()
            with contextlib.suppress(TokenLakeError):
                self._bye = self._bye or link.channel.tell_last(engine.Bye())
                link.channel.flush()
                if not lost and not link.channel.broken and (not self._bye or link.channel.unsent):
                    return False
        link.leave()
        return True

    def _is_current(self, link: Link) -> bool:
        return not self._left and link.life == self._link.life

    # -- leases

    def hold_lease(self, hold: LeaseHold) -> None:
        """Register the segments that a new `Lease` object holds. Raises `Unreachable` when the connection has broken
        since the lease was granted."""
        with self.lock:
            if hold.id and self._is_current(hold.link):
                self.check_over(hold.link)
                self._leases.setdefault(hold.id, []).append(hold)

    def check_over(self, link: Link) -> None:
        """Raises `Unreachable` if another connection has been opened since `link`, over which a grant came. The caller
        holds `lock`."""
        if link is not self._link:
            # Another connection was opened after the grant. Its `ReconcileGrants` did not name the grant, so the daemon
            # has taken it back.
            raise Unreachable("the connection broke; the newest grant is given back")

    def count_pin(self) -> None:
        """Count a group of arrays over leased slots that the caller is about to make. The caller holds `lock` and has
        just called `current`."""
        self._pins += 1

    def note_unpin(self, hold: LeaseHold, start: int, stop: int) -> None:
        """Record that the arrays of one `Lease.fetch` over segments `start` to `stop` are gone. For finalisers, which
        may run in the middle of any code: this takes no lock, and `sweep` unpins the segments later."""
        self._ended_pins.append((hold, start, stop))

    def note_collected(self, hold: LeaseHold) -> None:
        """Record that the `Lease` object of a hold without items is gone. For finalisers, as `note_unpin`."""
        self._collected.append(hold)

    def give_up(self, link: Link, pending: Pending) -> None:
        """Give up a match that is not answered: its lease is given back when the answer arrives, and its tokens do not
        count."""
        with self.lock:
            number = link.channel.drop(pending)
            if link is self._link and number:
                self._given_up.add(number)

    def release(self, hold: LeaseHold, start: int, stop: int) -> None:
        """Release the segments [start, stop) of the lease `hold`. Segments over which no array is alive and that no
        other object holds are given back to the daemon at once, the others when their last array or hold is gone.
        Never raises."""
        with self.lock:
            self._give_back(hold, start, hold.release(start, stop))
        self.sweep()

    def _give_back(self, hold: LeaseHold, start: int, free: NDArray[np.bool_]) -> None:
        """Give back the items that `free` marks (its first mark is that of item `start`) and that no other object
        holds. `hold` has just ceased to hold them."""
        if not hold.id or not self._is_current(hold.link):
            return
        others = self._leases.get(hold.id, [])
        if not hold.held().any():
            others = [other for other in others if other is not hold]
            if others:
                self._leases[hold.id] = others
            else:
                self._leases.pop(hold.id, None)
        if self._is_attaching(hold.id):
            return
        for other in others:
            if other is not hold:
                free = free & ~other.held()[start : start + len(free)]
                other.read |= hold.read
                other.took = other.took or hold.took
        self._queue(hold, start, free, hold.read[start : start + len(free)])

    def _queue(self, hold: LeaseHold, start: int, free: NDArray[np.bool_], read: NDArray[np.bool_]) -> None:
        """Queue the release of the items that `free` marks. A lease without items has one range, which ends it."""
        for was_read in (False, True):
            spans = _ranges(start, free & read if was_read else free & ~read)
            self._releases[was_read] += [(hold.id, *span) for span in spans]
        if not len(hold.pins):
            self._releases[False].append((hold.id, 0, 0))
        if hold.took is not None:
            self._took[hold.id] = hold.took
        if not hold.counted:
            self._uncounted.add(hold.id)

    # -- writes

    def hold_write(self, link: Link, write: WriteId) -> None:
        """Count one more `Write` or `Reservation` object of this process that holds the slots of a write. Raises
        `Unreachable` when the connection has broken since the write was granted."""
        with self.lock:
            if write and self._is_current(link):
                self.check_over(link)
                self._writes[write] = self._writes.get(write, 0) + 1

    def begin_filling(self, link: Link, write: WriteId, slots: bytes) -> None:
        """Record that the caller holds the write and is about to write to the write's `slots`; it must call
        `end_filling` with the same when it stops. Raises `Unreachable` when the connection has broken since the write
        was granted."""
        with self.lock:
            self.current(link)
            self.check_over(link)
            self._fillings += 1
            self._slots.setdefault(write, []).append(slots)
            self.hold_write(link, write)

    def end_filling(self, link: Link, write: WriteId, slots: bytes) -> None:
        """Record that the caller of `begin_filling` has stopped writing to the slots of its write, because it commits
        the write or gives it up. The caller must call it exactly once per `begin_filling`; it has no effect once the
        session of `link` has ended."""
        with self.lock:
            if link.life == self._link.life:
                self._fillings -= 1
                self._slots[write].remove(slots)
                if not self._slots[write]:
                    del self._slots[write]

    def drop_write(self, link: Link, write: WriteId, *, abort: bool) -> None:
        """Record that one object of this process has ceased to hold the write. `abort`: abort the write at the daemon
        when no other object holds it."""
        with self.lock:
            if write and self._is_current(link):
                left = self._writes.pop(write, 1) - 1
                if left > 0:
                    self._writes[write] = left
                if abort:
                    self._abort_when_free.add(write)
                self._abort_if_free(write)
        self.sweep()

    def leave_write(self, link: Link, write: WriteId) -> None:
        """Abort the write at the daemon once no object of this process holds it any more."""
        with self.lock:
            if write and self._is_current(link):
                self._abort_when_free.add(write)
                self._abort_if_free(write)
        self.sweep()

    def _abort_if_free(self, write: int) -> None:
        if write in self._abort_when_free and write not in self._writes and not self._is_attaching(write):
            self._abort_when_free.discard(write)
            self._aborts.append(write)

    # -- attaching

    @contextlib.contextmanager
    def attaching(
        self, grant: LeaseId | WriteId, deadline_s: float, *, write: bool
    ) -> Iterator[tuple[Link, engine.EngineReply]]:
        """Attach to a grant of another process of the session: yields the link and the reply. `deadline_s`: the
        deadline of the reply. The caller makes the object that holds the grant inside the `with` block. Items that the
        reply grants and that no object holds are given back, also when the reply is late."""
        self.sweep()
        link = self._link
        number = 0

        def make(request: int) -> engine.Attach:
            nonlocal number
            with self.lock:
                if self.current(link) is not link:
                    raise Unreachable("the connection broke")
                self._attaching[request] = (grant, write)
                # Messages that give back earlier holds of this grant are dropped: sent after the `Attach`, they would
                # give back the new hold.
                for ranges in self._releases.values():
                    ranges[:] = [each for each in ranges if each[0] != grant]
                self._aborts = [other for other in self._aborts if other != grant]
            number = request
            return engine.Attach(request, grant)

        try:
            pending = link.channel.begin(make)
        except BaseException:
            # It was not sent, so there is no reply, and the messages that `make` dropped are due again.
            self._answered(link, number)
            raise
        try:
            reply = link.wait(pending, deadline_s)
            yield link, reply
        except BaseException as error:
            if not pending.done and not isinstance(error, DeadlinePassed):
                link.channel.drop(pending)
            raise
        finally:
            if pending.reply is not None or isinstance(pending.error, Refused):
                self._answered(link, number)
        self.sweep()

    def _answered(self, link: Link, number: int) -> None:
        with self.lock:
            if link is self._link and number in self._attaching:
                self._attached(*self._attaching.pop(number))

    def _attached(self, grant: int, write: bool) -> None:
        """Give back the items that an `Attach` may have granted and that no object holds. To be called when its reply
        has been used, or no caller waits for it any more."""
        if self._is_attaching(grant):
            return
        if write:
            if grant not in self._writes:
                self._abort_when_free.discard(grant)
                self._aborts.append(grant)
            return
        self._release_unheld(grant)

    def _release_unheld(self, lease: int) -> None:
        holds = self._leases.get(lease)
        if not holds:
            self._releases[False].append((lease, 0, engine.MAX_KEYS))
        elif len(holds[0].pins):
            free = ~np.logical_or.reduce([hold.held() for hold in holds])
            self._queue(holds[0], 0, free, np.logical_or.reduce([hold.read for hold in holds]))

    def _is_attaching(self, grant: int) -> bool:
        return bool(self._attaching) and any(grant == other for other, _ in self._attaching.values())

    # -- messages to the daemon

    def sweep(self) -> None:
        """Send the collected messages that give back the items and writes that no object holds. Never waits, never
        raises."""
        with self.lock:
            if self._left or self._bye:
                return
            self._unpin_ended()
            while self._collected:
                hold = self._collected.popleft()
                self._give_back(hold, 0, hold.release(0, 0))
            self._return_orphans()
            channel = self._link.channel
            try:
                while self._aborts:
                    channel.tell(engine.Abort(self._aborts[-1]))
                    self._aborts.pop()
                # The items that were not read are mostly the deepest ones, which are given back first.
                for read, ranges in self._releases.items():
                    for sent in engine.releasable(ranges):
                        took = [(lease, *self._took[lease]) for lease, _, _ in sent if lease in self._took]
                        uncounted = self._uncounted.intersection(lease for lease, _, _ in sent)
                        channel.tell(engine.Release(sent, read, tuple(dict.fromkeys(took)), tuple(uncounted)))
                        for lease, *_ in took:
                            self._took.pop(lease, None)
                        self._uncounted -= uncounted
                    ranges.clear()
            except TokenLakeError as error:
                log.debug("leases and writes could not be given back yet: %s", error)

    def _unpin_ended(self) -> None:
        while self._ended_pins:
            hold, start, stop = self._ended_pins.popleft()
            if hold.link.life == self._link.life:
                self._pins -= 1
            free = hold.unpin(start, stop)
            if free.any():
                self._give_back(hold, start, free)

    def _return_orphans(self) -> None:
        """Give back the leases and writes that the daemon granted in replies that no caller waits for any more."""
        orphans = self._link.channel.orphans
        while orphans:
            reply = orphans.popleft()
            attached = self._attaching.pop(reply.id, None)
            if attached is not None:
                self._attached(*attached)
            elif isinstance(reply, engine.Matched) and reply.lease:
                if reply.id in self._given_up:
                    self._given_up.discard(reply.id)
                    self._uncounted.add(reply.lease)
                # The reply may be one that was refused, so that it may name any number of segments.
                self._releases[False].append((reply.lease, 0, min(reply.hits, engine.MAX_KEYS)))
            elif isinstance(reply, engine.Prepared) and reply.write:
                self._aborts.append(reply.write)
            elif isinstance(reply, engine.RegionClosed):
                self._link.regions.drop(reply.region)


_closed_with_arrays: weakref.WeakSet[Grants] = weakref.WeakSet()
os.register_at_fork(after_in_child=_closed_with_arrays.clear)


def closed_with_arrays() -> int:
    """The number of closed pools of this process that are still known to their daemons, because arrays over leased
    slots, or writes, are alive."""
    return sum(not each.leave_if_free() for each in list(_closed_with_arrays))


def _held_places(holds: list[LeaseHold]) -> tuple[int, bytes]:
    """The number of items of a lease, and the places of those that its holds hold, packed; zeros for the others."""
    packed = bytearray(SLOT_BYTES * len(holds[0].pins))
    places = slot_array(packed)
    for hold in holds:
        held = hold.held() & (hold.places["generation"] != 0)
        places[held] = hold.places[held]
    return len(places), bytes(packed)


def _ranges(start: int, marks: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The items that `marks` marks, as half-open ranges of indices. The first mark is that of item `start`."""
    padded = np.zeros(len(marks) + 2, np.bool_)
    padded[1:-1] = marks
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + start
    return [(first, last) for first, last in edges.reshape(-1, 2).tolist()]
