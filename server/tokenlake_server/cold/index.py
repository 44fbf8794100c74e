"""The index of the cold tier in memory: which objects there are, by their short names, in 14 bytes each.

The tables are kept as they were read, the newest first; `recent` has what happened since, in journals and in this
process. A name counts as the newest part says that has it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake_server.cold.names import Shorts
from tokenlake_server.cold.records import (
    ERASED,
    MAX_JOURNAL,
    NO_ENTRIES,
    REMOVED,
    Entries,
    Kind,
    Kinds,
    Minute,
    combined,
    objects_of,
    places_in,
)
from tokenlake_server.cold.sealed import object_bytes

MAX_RECENT = 1 << 20
"""Most names of which journals say something that no table has; those beyond are not known until a merge."""
USE_MINUTES = 60
"""A use is recorded where the recorded one is older."""
_CHUNK = 1 << 20
DAY = 24 * 60
Change = tuple[int, Minute]
"""(kind, minute)."""


class Totals(NamedTuple):
    """Number and bytes of objects."""

    objects: int
    nbytes: int


class Index:
    """Thread-safe: no method holds the lock for longer than its own number of names takes."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self._lock = threading.Lock()
        """Guards all changes; lookups read `_tables` and `_recent`, which are replaced and not cut, without it."""
        self._tables: tuple[Entries, ...] = ()
        self._recent: dict[int, Change] = {}
        self._own: dict[int, Change] = {}
        """Changes by this process that are in no journal yet."""
        self._objects = 0
        self._nbytes = 0

    @property
    def totals(self) -> Totals:
        """All objects that the index names."""
        return Totals(self._objects, self._nbytes)

    @property
    def entries(self) -> int:
        """Entries in memory, removals included."""
        return sum(len(table.shorts) for table in self._tables) + len(self._recent)

    @property
    def recent(self) -> int:
        """Entries that no table has."""
        return len(self._recent)

    # -- lookups, from any thread

    def find(self, shorts: Shorts, kind: Kind) -> bytes:
        """Per name, 1 where there is an object of this kind, else 0."""
        kinds, _ = self._states(shorts)
        return np.asarray(kinds == self.kinds.known(kind), np.uint8).tobytes() if len(shorts) else b""

    def state(self, short: int) -> Change:
        """The kind of a name, and the minute of its last use; `REMOVED` and 0 for one without an entry."""
        recent = self._recent.get(short)
        if recent is not None:
            return recent
        kinds, minutes = self._in_tables(np.array([short], np.uint64))
        return int(kinds[0]), int(minutes[0])

    def _states(self, shorts: Shorts) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        recent = self._recent
        said = [recent.get(short) for short in shorts.tolist()]
        kinds, minutes = self._in_tables(shorts)
        for at, change in enumerate(said):
            if change is not None:
                kinds[at], minutes[at] = change
        return kinds, minutes

    def _in_tables(self, shorts: Shorts) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        kinds = np.full(len(shorts), REMOVED, np.uint16)
        minutes = np.zeros(len(shorts), np.uint32)
        open_ = np.ones(len(shorts), bool)
        for table in self._tables:
            at, there = places_in(table, shorts)
            there &= open_
            kinds[there], minutes[there] = table.kinds[at[there]], table.minutes[at[there]]
            open_ &= ~there
        return kinds, minutes

    # -- changes

    def added(self, short: int, kind: Kind, minute: Minute) -> None:
        """This process wrote an object."""
        self._change({short: (self.kinds.number(kind), minute)})

    def used(self, short: int, minute: Minute) -> None:
        """This process read an object."""
        kind, last = self.state(short)
        if kind < ERASED and minute > last + USE_MINUTES:
            self._change({short: (kind, minute)})

    def removed(self, shorts: Iterable[int], minute: Minute, kind: int = REMOVED) -> None:
        """This process removed objects, or found that they are gone. `kind`: `REMOVED` or `ERASED`."""
        self._change(dict.fromkeys(shorts, (kind, minute)))

    def _change(self, changes: dict[int, Change]) -> None:
        """Take own changes. The minute of each is at least that of what was known, so that clocks that differ cannot
        undo it."""
        with self._lock:
            for short, (kind, minute) in changes.items():
                before, last = self.state(short)
                self._count(before, kind)
                later = (kind, max(minute, last + (before != kind)))
                self._recent[short] = self._own[short] = later

    def _count(self, before: int, after: int) -> None:
        for kind, sign in ((before, -1), (after, 1)):
            if kind < ERASED:
                self._objects += sign
                self._nbytes += sign * object_bytes(self.kinds.all[kind].slot_bytes)

    def take_own(self) -> Entries:
        """The own changes that are in no journal yet, at most `MAX_JOURNAL`; the caller writes them to one, or gives
        them back."""
        with self._lock:
            names = list(self._own)[:MAX_JOURNAL]
            return Entries.of({short: self._own.pop(short) for short in names})

    def give_back(self, entries: Entries) -> None:
        """Own changes that could not be written to a journal. The oldest are forgotten beyond `MAX_RECENT`: a scan
        finds their objects."""
        with self._lock:
            self._own = {**_changes(entries), **self._own}
            for short in list(self._own)[: max(0, len(self._own) - MAX_RECENT)]:
                del self._own[short]

    def heard(self, entries: Entries) -> None:
        """Take the entries of a journal of any writer."""
        for start in range(0, len(entries.shorts), 1 << 12):
            some = entries.cut(start, start + (1 << 12))
            with self._lock:
                kinds, minutes = self._states(some.shorts)
                for at, (short, change) in enumerate(_changes(some).items()):
                    newer = change[1] > minutes[at] or (change[1] == minutes[at] and change[0] >= ERASED)
                    if newer and (short in self._recent or len(self._recent) < MAX_RECENT):
                        self._count(int(kinds[at]), change[0])
                        self._recent[short] = change

    def replace(self, tables: tuple[Entries, ...], journals: Iterable[Entries]) -> None:
        """There are other tables, the newest first, and these journals that they do not have."""
        recent = _changes(combined(list(journals)))
        base = _totals(tables, self.kinds)
        with self._lock:
            recent |= self._own
            # In this order: a lookup reads them in the other one, and finds a name that moves to a table.
            self._tables = tables
            self._recent = recent
            self._objects, self._nbytes = base
            said = Entries.of(recent)
            kinds, _ = self._in_tables(said.shorts)
            for before, after in zip(kinds.tolist(), said.kinds.tolist(), strict=True):
                self._count(before, after)

    # -- walks, for the thread that keeps the index

    def parts(self) -> list[Entries]:
        """Everything that the index has, the newest part first."""
        with self._lock:
            recent = Entries.of(dict(self._recent))
        return [recent, *self._tables]

    def objects(self) -> Iterator[Entries]:
        """Yields all objects, in pieces, each once."""
        parts = self.parts()
        for number, part in enumerate(parts):
            for start in range(0, len(part.shorts), _CHUNK):
                piece = part.cut(start, start + _CHUNK)
                there = objects_of(piece)
                for newer in parts[:number]:
                    there &= ~places_in(newer, piece.shorts)[1]
                yield piece.take(there)

    def of_folder(self, folder: int) -> Entries:
        """Everything that is known of the names in one folder, removals included."""
        first, last = np.uint64(folder << 56), np.uint64(folder << 56 | (1 << 56) - 1)
        some = []
        for part in self.parts():
            start, stop = np.searchsorted(part.shorts, first), np.searchsorted(part.shorts, last, "right")
            some.append(part.cut(int(start), int(stop)))
        return combined(some)

    def oldest(self, nbytes: int, before: Minute, now: Minute) -> Shorts:
        """The objects that were not used since the minute `before`, and further ones, the longest unused first, until
        their bytes are `nbytes`. A minute that lies ahead of `now` by more than a day counts as the oldest."""
        span = max(1, now + DAY - (first := max(0, before - 1)) + 1)
        sizes = self._sizes()
        weights = np.zeros(span + 1)
        for part in self.objects():
            age = _clipped(part.minutes, first, now)
            weights += np.bincount(age, sizes[part.kinds], span + 1)
        reached = np.cumsum(weights)
        # Those before `before` have age 0; the others follow until enough bytes are reached.
        cut = int(np.searchsorted(reached, nbytes)) if nbytes > reached[0] else 0
        spare = nbytes - (reached[cut - 1] if cut else 0.0)
        chosen = []
        for part in self.objects():
            age = _clipped(part.minutes, first, now)
            chosen.append(part.shorts[age < cut])
            at_cut = np.flatnonzero(age == cut)
            if cut and spare > 0:
                grown = np.cumsum(sizes[part.kinds[at_cut]])
                at_cut = at_cut[: int(np.searchsorted(grown, spare)) + 1]
                spare -= float(sizes[part.kinds[at_cut]].sum())
            elif cut:
                at_cut = at_cut[:0]
            chosen.append(part.shorts[at_cut])
        return np.concatenate(chosen) if chosen else NO_ENTRIES.shorts

    def of_tenant(self, tag: int, slot_bytes: int = 0) -> Shorts:
        """The objects of a tenant, of one size if it is not 0."""
        kinds = [
            number
            for number, kind in enumerate(self.kinds.all)
            if kind.tag == tag and slot_bytes in (0, kind.slot_bytes)
        ]
        found = [part.shorts[np.isin(part.kinds, kinds)] for part in self.objects()]
        return np.concatenate(found) if found else NO_ENTRIES.shorts

    def _sizes(self) -> NDArray[np.float64]:
        sizes = np.zeros(1 << 16)
        sizes[: len(self.kinds.all)] = [object_bytes(kind.slot_bytes) for kind in self.kinds.all]
        return sizes

    def check_integrity(self) -> None:
        """Raises AssertionError where the totals do not add up."""
        objects = list(self.objects())
        assert self._objects == sum(len(each.shorts) for each in objects)
        assert self._nbytes == sum(int(self._sizes()[each.kinds].sum()) for each in objects)
        assert all((each.shorts[1:] > each.shorts[:-1]).all() for each in self._tables)


def _clipped(minutes: NDArray[np.uint32], first: Minute, now: Minute) -> NDArray[np.int64]:
    age = minutes.astype(np.int64) - first
    age[(age < 0) | (minutes.astype(np.int64) > now + DAY)] = 0
    return age


def _changes(entries: Entries) -> dict[int, Change]:
    pairs = zip(entries.kinds.tolist(), entries.minutes.tolist(), strict=True)
    return dict(zip(entries.shorts.tolist(), pairs, strict=True))


def _totals(tables: tuple[Entries, ...], kinds: Kinds) -> Totals:
    counts = np.zeros(1 << 16, np.int64)
    for number, table in enumerate(tables):
        for start in range(0, len(table.shorts), _CHUNK):
            counts += np.bincount(table.kinds[start : start + _CHUNK], minlength=1 << 16)
        hidden = np.zeros(0, np.intp)
        for newer in tables[:number]:
            at, there = places_in(table, newer.shorts)
            hidden = np.union1d(hidden, at[there])
        if len(hidden):
            counts -= np.bincount(table.kinds[hidden], minlength=1 << 16)
    known = counts[: len(kinds.all)].tolist()
    nbytes = sum(count * object_bytes(kind.slot_bytes) for count, kind in zip(known, kinds.all, strict=True))
    return Totals(sum(known), nbytes)
