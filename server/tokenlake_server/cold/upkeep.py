"""The upkeep of an open place: evictions, journals, merges, expiry, and scans, step by step."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenlake_server.cold.catalogue import MERGE_S, Catalogue
from tokenlake_server.cold.names import FOLDERS, Shorts, paths_of
from tokenlake_server.cold.places import Place
from tokenlake_server.cold.records import ERASED, Kind
from tokenlake_server.cold.room import HIGH, LOW
from tokenlake_server.cold.scan import scan

log = logging.getLogger(__name__)

DELETED_AT_ONCE = 1000
MOST_EXPIRED = 20_000
"""Objects that expire between two polls."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds, and limits after which the place is set aside."""

    slow_s: float = 15.0
    """A call that does not get on for so long sets the place aside."""
    errors: int = 8
    """Errors within `errors_s` that set the place aside."""
    errors_s: float = 60.0
    check_s: float = 10.0
    """Time until the first check of a place that was set aside; it doubles with each failed check."""
    most_check_s: float = 300.0
    full_s: float = 60.0
    """Time without writes where the place had no space."""
    scan_s: float = 300.0
    """Interval at which one folder is listed: all of them in about a day."""
    merge_s: float = MERGE_S
    """Time after which journals are merged, however few they are."""
    close_s: float = 5.0
    probe_bytes: int = 8 << 20
    """Bytes of each object by which the place is measured, one for each thread that reads."""


PATIENCE = Patience()


class Erasure(NamedTuple):
    """An order to delete objects."""

    names: tuple[int, ...]
    """Their short names; empty: all of a tenant."""
    kind: int
    """`ERASED` where an operator evicted them, else `REMOVED`."""
    tag: int = 0
    """The tenant, where there are no names."""
    slot_bytes: int = 0
    """As of `ColdErase`."""


class Erasures:
    """The orders that are not carried out yet. Thread-safe, and short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Erasure] = deque()

    @property
    def waiting(self) -> bool:
        """True if there are any."""
        return bool(self._waiting)

    def add(self, order: Erasure) -> None:
        """The objects are not found from now on."""
        with self._lock:
            self._waiting.append(order)

    def hidden(self, shorts: Shorts, kind: Kind) -> list[bool]:
        """Per name, whether an order waits for its object, which is of this kind."""
        with self._lock:
            orders = list(self._waiting)
        every = any(not each.names and each.tag == kind.tag for each in orders)
        named = {name for each in orders for name in each.names}
        return [every or short in named for short in shorts.tolist()]

    def first(self) -> Erasure | None:
        """The first of the orders."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def done(self) -> None:
        """The first of the orders was carried out."""
        with self._lock:
            self._waiting.popleft()


class Upkeep:
    """Used by the thread of the keeper."""

    def __init__(
        self,
        place: Place,
        catalogue: Catalogue,
        erasures: Erasures,
        size: int,
        keep_s: float,
        patience: Patience,
        gets_on: Callable[[], bool],
        evicted_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`keep_s`: age without a use after which an object expires. `gets_on`: is called before each call of the
        place; False where the work is of no use any more. `evicted_s`: as of `scan`."""
        self.poll_s = place.poll_s
        self.stopping = False
        """True: the daemon ends, and long work stops."""
        self.expired = 0
        self.scanned = 0
        self._place = place
        self._catalogue = catalogue
        self._erasures = erasures
        self._size = size
        self._keep_s = keep_s
        self._patience = patience
        self._gets_on = gets_on
        self._evicted_s = evicted_s
        self._next_scan = time.monotonic() + random.uniform(0.5, 1) * patience.scan_s
        self._next_age = 0.0

    def step(self) -> None:
        """Do what is due. Raises OSError."""
        self._carry_out_erasures()
        if self._gets_on():
            self._catalogue.flush()
        if self._gets_on():
            self._place.require()
            self._catalogue.poll()
        now = time.monotonic()
        if self.stopping:
            return
        merged = self._catalogue.due() and self._gets_on() and self._catalogue.merge(self._keep_s)
        # One writer looks for old objects: that of the merge. Where the place is too full, several may delete the same.
        if self._too_full or (merged and now >= self._next_age):
            self._next_age = now + min(3600.0, self._keep_s / 24)
            self.expire()
        if now >= self._next_scan and self._gets_on():
            self._next_scan = now + random.uniform(0.5, 1.5) * self._patience.scan_s
            self.scan(random.randrange(FOLDERS))

    def end(self) -> None:
        """Write what this process did. Raises OSError."""
        self._carry_out_erasures()
        if self._gets_on():
            self._catalogue.flush()

    @property
    def _too_full(self) -> bool:
        return self._catalogue.index.totals.nbytes > HIGH * self._size

    def expire(self) -> int:
        """Delete objects that were not used for long, and the longest unused ones where the place is too full. Returns
        their number. Raises OSError."""
        need = self._catalogue.index.totals.nbytes - int(LOW * self._size) if self._too_full else 0
        return self.delete_oldest(need, self._keep_s)

    def delete_oldest(self, nbytes: int, keep_s: float) -> int:
        """Delete objects that were not used for `keep_s`, and further ones until `nbytes` are deleted, but at most
        `MOST_EXPIRED` objects. Returns their number. Raises OSError."""
        index, minute = self._catalogue.index, self._catalogue.clock.minute()
        names = index.oldest(nbytes, max(0, minute - int(keep_s // 60)), minute)[:MOST_EXPIRED]
        before = self.expired
        for start in range(0, len(names), DELETED_AT_ONCE):
            if self.stopping or not self._gets_on():
                break
            some = names[start : start + DELETED_AT_ONCE]
            # First the objects, then their names: the bytes that the index counts are never too few.
            self._place.delete(paths_of(some))
            index.removed(some.tolist(), minute)
            self.expired += len(some)
        if len(names):
            log.info("%d objects of the cold tier expired", self.expired - before)
        return self.expired - before

    def scan(self, folder: int) -> None:
        """Compare a folder with the index. Raises OSError."""
        catalogue = self._catalogue
        now_s, whole = catalogue.clock.seconds(), not catalogue.problem
        found = scan(self._place, catalogue.index, folder, now_s, self._evicted_s(), whole=whole)
        self.scanned += found.found
        if any(found):
            log.info("a scan of folder %02x of the cold tier: %s", folder, found)

    def _carry_out_erasures(self) -> None:
        """Delete the objects of orders, of a tenant at most `MOST_EXPIRED` at a time: journals are merged in
        between."""
        index, minute = self._catalogue.index, self._catalogue.clock.minute()
        while (order := self._erasures.first()) is not None:
            every = not order.names
            all_names = index.of_tenant(order.tag, order.slot_bytes).tolist() if every else order.names
            names = all_names[:MOST_EXPIRED] if every else all_names
            for start in range(0, len(names), DELETED_AT_ONCE):
                if not self._gets_on():
                    return
                some = names[start : start + DELETED_AT_ONCE]
                index.removed(some, minute, order.kind)
                self._place.delete(paths_of(some))
            if len(names) < len(all_names):
                return
            self._erasures.done()
            if order.kind == ERASED:
                log.info("%d evicted objects of the cold tier were deleted", len(names))
