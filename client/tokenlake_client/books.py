"""What this process holds of its daemon, and what is to be given back.

Leases, writes and the garbage collector enter here at any time, from any thread; `sweep` tells the daemon when
somebody calls anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import LeaseId
from tokenlake.wire import engine
from tokenlake_client.link import Link

__all__ = ["Books", "Looked"]

log = logging.getLogger(__name__)


class Looked(Protocol):
    """A lease, as the books see it."""

    id: LeaseId
    link: Link

    def settle(self, index: int) -> bool:
        """One look at an item ended; True when the item can be given back."""


class Books:
    """Of one pool. `link` is the current one; `lock` guards it and all counts here and in the leases."""

    def __init__(self, link: Link) -> None:
        self.lock = threading.RLock()
        self.link = link
        self.ended_looks: deque[tuple[Looked, int]] = deque()
        """Appended to by finalisers, perhaps in the middle of anything; nothing else may happen there."""
        self._looking = 0
        self._writing = 0
        self._releases: list[tuple[int, int, int]] = []
        self._aborts: list[int] = []

    @property
    def touching(self) -> int:
        """Arrays over the daemon's memory that may still be read or written."""
        with self.lock:
            return self._looking + self._writing

    def use(self, link: Link) -> None:
        """From now on talk over `link`. What a former daemon granted lies in memory that is nobody's any more."""
        with self.lock:
            if link.incarnation != self.link.incarnation:
                self._releases.clear()
                self._aborts.clear()
                self._looking = self._writing = 0
            self.link = link

    def current(self, link: Link) -> Link:
        """The link to use for what was granted over `link`. Raises `Unreachable` when that daemon is gone."""
        current = self.link
        if link.incarnation != current.incarnation:
            raise Unreachable("the daemon restarted; what was leased there is gone")
        return current

    def count_look(self) -> None:
        """An array over a leased slot was handed out. Under `lock`, with the link just checked."""
        self._looking += 1

    def count_writing(self, link: Link, change: int) -> None:
        """A write over `link` began (1) or ended (-1)."""
        with self.lock:
            if link.incarnation == self.link.incarnation:
                self._writing += change

    def give_back(self, lease: Looked, indices: Sequence[int]) -> None:
        """Items of a lease that nobody looks at, ascending. Under `lock`."""
        if lease.id and lease.link.incarnation == self.link.incarnation:
            self._releases += [(lease.id, start, stop) for start, stop in _ranges(indices)]

    def abort(self, link: Link, write: int) -> None:
        """Nobody here fills this write any more."""
        with self.lock:
            if write and link.incarnation == self.link.incarnation:
                self._aborts.append(write)
        self.sweep()

    def sweep(self) -> None:
        """Tell the daemon what is no longer looked at or filled. Never waits, never raises."""
        with self.lock:
            self._settle_looks()
            channel = self.link.channel
            while channel.orphans:
                self._disown(channel.orphans.popleft())
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
        ended: dict[int, tuple[Looked, list[int]]] = {}
        while self.ended_looks:
            lease, index = self.ended_looks.popleft()
            if lease.link.incarnation == self.link.incarnation:
                self._looking -= 1
            if lease.settle(index):
                ended.setdefault(id(lease), (lease, []))[1].append(index)
        for lease, indices in ended.values():
            self.give_back(lease, sorted(indices))

    def _disown(self, reply: engine.EngineReply) -> None:
        """A reply that nobody waits for granted this."""
        if isinstance(reply, engine.Matched) and reply.lease:
            self._releases.append((reply.lease, 0, reply.hits))
        elif isinstance(reply, engine.Prepared) and reply.write:
            self._aborts.append(reply.write)


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
