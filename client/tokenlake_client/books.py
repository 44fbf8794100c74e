"""What this process holds of its daemon, and what is to be given back.

Leases, writes and the garbage collector enter here at any time, from any thread; `sweep` tells the daemon when
somebody calls anyway.

The daemon knows one owner per process. Several objects of this process may hold the same lease or write: an item
is given back when the last of them gave it up, and while the answer to an `Attach` is on its way nothing of what it
grants anew is given back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, Refused, TokenLakeError, Unreachable
from tokenlake.identity import LeaseId, WriteId
from tokenlake.wire import engine
from tokenlake_client.link import STORE_S, Link

__all__ = ["Books", "Holding"]

log = logging.getLogger(__name__)

END = (1 << 32) - 1
"""No lease has as many items."""


class Holding:
    """What one `Lease` holds. Counts are guarded by the lock of the books. Refers to nothing that keeps the pool: the
    books may have it when all else is gone."""

    __slots__ = ("id", "link", "looks", "wanted")

    def __init__(self, lease: LeaseId, link: Link, items: int) -> None:
        self.id = lease
        self.link = link
        """What the lease was granted over."""
        self.looks = np.zeros(items, np.uint32)
        """Looks at each item that have not ended."""
        self.wanted = np.ones(items, np.bool_)
        """Of each item: was it not released?"""

    def held(self) -> NDArray[np.bool_]:
        """Of each item: not released, or still looked at."""
        held: NDArray[np.bool_] = np.logical_or(self.wanted, self.looks)
        return held

    def look(self, start: int, stop: int) -> int:
        """Count a look at the items from `start` on; where it ends: at `stop`, or before what was released."""
        wanted = self.wanted[start:stop]
        if not wanted.all():
            stop = start + int(wanted.argmin())
        self.looks[start:stop] += 1
        return stop

    def release(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Of each of these items: is it held no longer, and was it until now?"""
        free: NDArray[np.bool_] = self.wanted[start:stop] & (self.looks[start:stop] == 0)
        self.wanted[start:stop] = False
        return free

    def end_look(self, start: int, stop: int) -> NDArray[np.bool_]:
        """As `release`, for a look that ended."""
        self.looks[start:stop] -= 1
        return ~self.held()[start:stop]


class Books:
    """Of one pool. `link` is the current one; `lock` guards it, `closed` and all counts here and in the holdings."""

    def __init__(self, link: Link) -> None:
        self.lock = threading.RLock()
        self.link = link
        self.closed = False
        """Nothing is handed out any more."""
        self.ended_looks: deque[tuple[Holding, int, int]] = deque()
        """Appended to by finalisers, perhaps in the middle of anything; nothing else may happen there."""
        self._looking = 0
        self._writing = 0
        self._leases: dict[int, list[Holding]] = {}
        self._writes: dict[int, int] = {}
        """How many objects hold each write."""
        self._leaving: set[int] = set()
        """Writes to abort when nothing here holds them any more."""
        self._attaching: dict[int, tuple[int, bool]] = {}
        """By request over the current link, (lease or write, is it a write?): the answer may still come."""
        self._releases: list[tuple[int, int, int]] = []
        self._aborts: list[int] = []

    @property
    def touching(self) -> int:
        """Looks at the daemon's memory, and writes into it, that have not ended."""
        with self.lock:
            return self._looking + self._writing

    # -- the connection

    def use(self, link: Link) -> None:
        """From now on talk over `link`. What was granted in another life is nobody's any more."""
        with self.lock:
            if self.closed:
                self._part(link)
                return
            self._disown_orphans()
            self._attaching.clear()
            if link.life != self.link.life:
                self._leases.clear()
                self._writes.clear()
                self._leaving.clear()
                self._releases.clear()
                self._aborts.clear()
                self._looking = self._writing = 0
            with contextlib.suppress(TokenLakeError):
                # Before anything else: what it was granted in an answer that was cut off would stay granted.
                link.channel.tell(engine.ReconcileGrants(tuple(self._leases), tuple(self._writes)))
            former, self.link = self.link, link
            # Regions and their link refer to each other: without this, memory of a dead daemon stays until the garbage
            # collector comes by, and locked for a GPU where it was.
            former.forget()
            # What was given back over the former connection may not have arrived.
            self._leaving.intersection_update(self._writes)
            for lease in self._leases:
                self._release_unheld(lease)

    def current(self, link: Link) -> Link:
        """The link to use for what was granted over `link`. Raises `Unreachable` when that is gone, or the pool was
        closed."""
        current = self.link
        if self.closed:
            raise Unreachable("the pool was closed")
        if link.incarnation != current.incarnation:
            raise Unreachable("the daemon restarted; what was leased there is gone")
        if link.life != current.life:
            raise Unreachable("the session ended with the connection; what was leased in it is gone")
        return current

    def close(self) -> None:
        """Hand out nothing any more, and leave. While arrays are alive the daemon is not told that this process
        touches nothing. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.sweep()
            self.closed = True
            self._part(self.link)

    def finish(self) -> bool:
        """Close, unless arrays that are looked at are about to end."""
        with self.lock:
            self.sweep()
            if self._looking:
                return False
            self.close()
            return True

    def _part(self, link: Link) -> None:
        if not self.touching and not link.channel.broken:
            try:
                link.channel.tell(engine.Bye())
            except TokenLakeError as error:
                log.debug("no farewell: %s", error)
        link.forget()
        link.channel.close()

    def _alive(self, link: Link) -> bool:
        return not self.closed and link.life == self.link.life

    # -- leases

    def hold(self, holding: Holding) -> None:
        """A lease was granted, or attached to. Raises `Unreachable`."""
        with self.lock:
            if holding.id and self._alive(holding.link):
                self._require_noted(holding.link)
                self._leases.setdefault(holding.id, []).append(holding)

    def _require_noted(self, link: Link) -> None:
        if link is not self.link:
            # Between its answer and now another connection took over, and `use` did not know of it.
            raise Unreachable("the connection broke; what was granted last is given back")

    def count_look(self) -> None:
        """Arrays over leased slots are handed out. Under `lock`, with the link just checked."""
        self._looking += 1

    def give_back(self, holding: Holding, start: int, free: NDArray[np.bool_]) -> None:
        """Of the items from `start` on, those that `free` marks are not held any more by this holding. Under `lock`."""
        if not holding.id or not self._alive(holding.link):
            return
        others = self._leases.get(holding.id, [])
        if not holding.held().any():
            others = [other for other in others if other is not holding]
            if others:
                self._leases[holding.id] = others
            else:
                self._leases.pop(holding.id, None)
        if self._is_attaching(holding.id):
            return
        for other in others:
            if other is not holding:
                free = free & ~other.held()[start : start + len(free)]
        self._releases += [(holding.id, *span) for span in _ranges(start, free)]

    # -- writes

    def hold_write(self, link: Link, write: WriteId) -> None:
        """An object that holds a write was made. Raises `Unreachable`."""
        with self.lock:
            if write and self._alive(link):
                self._require_noted(link)
                self._writes[write] = self._writes.get(write, 0) + 1

    def begin_filling(self, link: Link) -> None:
        """The slots of a write are about to be handed out. Raises `Unreachable`."""
        with self.lock:
            self.current(link)
            self._require_noted(link)
            self._writing += 1

    def end_filling(self, link: Link) -> None:
        """They are not written any more."""
        with self.lock:
            if link.life == self.link.life:
                self._writing -= 1

    def drop_write(self, link: Link, write: WriteId, *, abort: bool) -> None:
        """An object holds a write no longer. `abort`: the daemon is to know when the last one does."""
        with self.lock:
            if write and self._alive(link):
                left = self._writes.pop(write, 1) - 1
                if left > 0:
                    self._writes[write] = left
                if abort:
                    self._leaving.add(write)
                self._abort_left(write)
        self.sweep()

    def leave_write(self, link: Link, write: WriteId) -> None:
        """The daemon is to know when no object holds this write any more."""
        with self.lock:
            if write and self._alive(link):
                self._leaving.add(write)
                self._abort_left(write)
        self.sweep()

    def _abort_left(self, write: int) -> None:
        if write in self._leaving and write not in self._writes and not self._is_attaching(write):
            self._leaving.discard(write)
            self._aborts.append(write)

    # -- attaching

    @contextlib.contextmanager
    def attaching(self, grant: LeaseId | WriteId, *, write: bool) -> Iterator[tuple[Link, engine.EngineReply]]:
        """Ask for what another process of the session holds; the caller makes the object that holds it before it
        leaves. What it grants and no object holds is given back, also when the answer comes late."""
        self.sweep()
        link = self.link
        number = 0

        def make(request: int) -> engine.Attach:
            nonlocal number
            with self.lock:
                if self.current(link) is not link:
                    raise Unreachable("the connection broke")
                self._attaching[request] = (grant, write)
                # Told after the request, these would take back what it grants.
                self._releases = [release for release in self._releases if release[0] != grant]
                self._aborts = [other for other in self._aborts if other != grant]
            number = request
            return engine.Attach(request, grant)

        pending = link.channel.begin(make)
        try:
            reply = link.wait(pending, STORE_S if write else None)
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
            if link is self.link and number in self._attaching:
                self._attached(*self._attaching.pop(number))

    def _attached(self, grant: int, write: bool) -> None:
        """The answer to an `Attach` came, or never will: give back what it may have granted and nothing here holds."""
        if self._is_attaching(grant):
            return
        if write:
            if grant not in self._writes:
                self._leaving.discard(grant)
                self._aborts.append(grant)
            return
        self._release_unheld(grant)

    def _release_unheld(self, lease: int) -> None:
        holdings = self._leases.get(lease)
        if not holdings:
            self._releases.append((lease, 0, END))
            return
        free = ~np.logical_or.reduce([holding.held() for holding in holdings])
        self._releases += [(lease, *span) for span in _ranges(0, free)]

    def _is_attaching(self, grant: int) -> bool:
        return bool(self._attaching) and any(grant == other for other, _ in self._attaching.values())

    # -- telling the daemon

    def sweep(self) -> None:
        """Tell the daemon what is no longer looked at or filled. Never waits, never raises."""
        with self.lock:
            if self.closed:
                return
            self._settle_looks()
            self._disown_orphans()
            channel = self.link.channel
            try:
                while self._aborts:
                    channel.tell(engine.Abort(self._aborts[-1]))
                    self._aborts.pop()
                if self._releases:
                    channel.tell(engine.Release(tuple(self._releases)))
                    self._releases.clear()
            except TokenLakeError as error:
                log.debug("not given back yet: %s", error)

    def _settle_looks(self) -> None:
        while self.ended_looks:
            holding, start, stop = self.ended_looks.popleft()
            if holding.link.life == self.link.life:
                self._looking -= 1
            free = holding.end_look(start, stop)
            if free.any():
                self.give_back(holding, start, free)

    def _disown_orphans(self) -> None:
        """Replies that nobody waits for may have granted something."""
        orphans = self.link.channel.orphans
        while orphans:
            reply = orphans.popleft()
            attached = self._attaching.pop(reply.id, None)
            if attached is not None:
                self._attached(*attached)
            elif isinstance(reply, engine.Matched) and reply.lease:
                self._releases.append((reply.lease, 0, reply.hits))
            elif isinstance(reply, engine.Prepared) and reply.write:
                self._aborts.append(reply.write)


def _ranges(start: int, marks: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The marked items as half-open ranges; the first mark is item `start`'s."""
    padded = np.zeros(len(marks) + 2, np.bool_)
    padded[1:-1] = marks
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + start
    return [(first, last) for first, last in edges.reshape(-1, 2).tolist()]
