"""The leases between a lookup and the read of its pages.

An engine looks up all pages of a prompt, and reads them later in batches, in order. It may not tell when the request is
aborted in between, when it needs fewer pages than were found, or when it has no memory for them. So each lease ends at
the latest after a fixed time, and a fixed number of leases is kept::

    lookup  |---- found: leased ----|
    read        |- 128 -|               the pages before it are released with it: the engine has them already
    read                |- 128 -|
    later                       |--|    never read: released when the time has passed, or when newer lookups need room

A read of pages that are not leased any more looks them up again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenlake_client.lease import Lease

MAX_HELD = 64
"""Limit of the leases of one cache pool that are kept. An engine reads the pages of one request at a time, so that more
lookups wait only while it has no memory for them."""


class Held(NamedTuple):
    """Segments `start` to `stop` of a lease, which the caller releases after it has read them."""

    lease: Lease
    start: int
    stop: int


@dataclass(slots=True)
class _Entry:
    lease: Lease
    left: dict[str, int]
    """By the engine's name of a page, the index of its segment in the lease, of the pages that were neither read nor
    released."""
    until: float = field(default=0.0)


class HeldLeases:
    """Keeps leases until their pages are read or the time is over. Thread-safe."""

    def __init__(
        self,
        hold_s: float,
        dropped: Callable[[int], None] = lambda pages: None,
        report: Callable[[str, BaseException], None] = lambda operation, error: None,
        *,
        limit: int = MAX_HELD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hold_s`: seconds until a lease ends. `dropped` is called with the number of pages that were released
        although none of them or of the pages behind them was read. `report` is called with the operation that failed
        and its error: a lease that cannot be released keeps neither other leases nor the thread that ends them."""
        self._hold_s = hold_s
        self._dropped = dropped
        self._report = report
        self._limit = limit
        self._clock = clock
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        """In the order of the lookups, which is that of their ends."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def hold(self, pages: Mapping[str, int], lease: Lease) -> None:
        """Keep a lease. `pages`: by the engine's name of each page that may be read, the index of its segment in the
        lease, in the order in which they are read. Where no thread can be started that ends the lease in time, it is
        released at once."""
        ended: list[_Entry] = []
        with self._changed:
            entry = _Entry(lease, dict(pages), self._clock() + self._hold_s)
            if pages and self._watched():
                self._entries.append(entry)
                while len(self._entries) > self._limit:
                    ended.append(self._entries.popleft())
                self._changed.notify_all()
            else:
                ended.append(entry)
        self._end(ended)

    def take(self, pages: Sequence[str]) -> Held | None:
        """Remove the first of `pages` that are leased together, and the pages before them. None: the first of `pages`
        is not leased."""
        with self._changed:
            entry = next((each for each in self._entries if pages[0] in each.left), None)
            if entry is None:
                return None
            start = entry.left[pages[0]]
            stop = start
            for page in pages:
                if entry.left.get(page) != stop:
                    break
                stop += 1
            before = [index for index in entry.left.values() if index < start]
            entry.left = {page: index for page, index in entry.left.items() if index >= stop}
            if not entry.left:
                self._entries.remove(entry)
        if before:
            self.release(entry.lease, min(before), start)
        return Held(entry.lease, start, stop)

    def where(self, page: str) -> tuple[Lease, int] | None:
        """The lease of a page, which stays kept, and its segment there. None: the page is not leased."""
        with self._changed:
            entry = next((each for each in self._entries if page in each.left), None)
            return None if entry is None else (entry.lease, entry.left[page])

    def drop(self, pages: Sequence[str]) -> None:
        """Release each of `pages` in the oldest lease that has it, and no other page. Pages that are not leased are
        ignored."""
        ended: list[tuple[Lease, int]] = []
        with self._changed:
            for page in pages:
                entry = next((each for each in self._entries if page in each.left), None)
                if entry is not None:
                    ended.append((entry.lease, entry.left.pop(page)))
                    if not entry.left:
                        self._entries.remove(entry)
        for lease, index in ended:
            self.release(lease, index, index + 1)

    def release(self, lease: Lease, start: int = 0, stop: int | None = None) -> None:
        """`Lease.release`; an error is reported."""
        try:
            lease.release(start, stop)
        except Exception as error:
            self._report("releasing a lease", error)

    def expire(self) -> None:
        """Release the leases whose time is over. A thread of this object does it too."""
        ended: list[_Entry] = []
        with self._changed:
            now = self._clock()
            while self._entries and self._entries[0].until <= now:
                ended.append(self._entries.popleft())
        self._end(ended)

    def clear(self) -> None:
        """Release all leases."""
        with self._changed:
            ended = list(self._entries)
            self._entries.clear()
        self._end(ended)

    def close(self) -> None:
        """Release all leases, and keep none from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.clear()

    def _end(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            self.release(entry.lease)
            if entry.left:
                self._dropped(len(entry.left))

    def _watched(self) -> bool:
        """True if a thread ends leases in time. The caller holds the lock."""
        if self._closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="tokenlake-leases", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _watch(self) -> None:
        while True:
            self.expire()
            with self._changed:
                if self._closed:
                    return
                left_s = self._entries[0].until - self._clock() if self._entries else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
