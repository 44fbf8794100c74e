"""Keeps the index of this process and that of the place alike: journals of all writers, tables, and their root.

::

    writers                          index/journal/...          one writer at a time          index/root
      | what each did in some seconds --> small, immutable --+
      |                                                      +--> combined: index/table/... --> names the tables that
      |<-- every poll: the root, journals that are new <-----+    immutable, few                count, and the journals
                                                                                                whose entries they have

No lock is taken, and none is needed: a root is replaced as a whole, and one that was written over a newer one only
lacks some journals, which stay for `GRACE_S` and are merged again.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from tokenlake_server.cold.base import Listed, Missing, Objects, Unfit, read_whole, write_whole
from tokenlake_server.cold.index import Index
from tokenlake_server.cold.records import (
    ENTRY_BYTES,
    ERASED,
    MAX_ENTRIES,
    MAX_JOURNAL,
    MAX_ROOT,
    Entries,
    Minute,
    Part,
    Root,
    TableName,
    combined,
    most_bytes,
    objects_of,
    pack_part,
    pack_root,
    read_part,
    read_root,
)

log = logging.getLogger(__name__)

ROOT = "index/root"
JOURNALS = "index/journal"
TABLES = "index/table"
_OURS = {
    JOURNALS: re.compile(JOURNALS + "/[0-9a-f]{8}-[0-9a-f]{16}-[0-9a-f]{6}"),
    TABLES: re.compile(TABLES + "/[0-9a-f]{16}"),
}
"""The names that writers make; others are left alone."""
GRACE_S = 600.0
"""Time for which a journal stays after its merge, and a table without a root that names it: readers with an older root
still need them, and the journals name the writers of the last minutes."""
HELLO_S = GRACE_S / 2
"""Longest time between two journals of a writer, also of one that has nothing to say."""
MERGE_JOURNALS = 32
MERGE_S = 60.0
"""So many journals are merged, or fewer after this time."""
MAX_JOURNALS = 1 << 14
"""Most journals that are read; a place with more is not of this program alone."""


class Clock:
    """The clock of the place, by which all its writers agree on the order of what they did."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._ahead_s = 0.0

    def seconds(self) -> float:
        """Seconds since 1970 at the place."""
        return self._now() + self._ahead_s

    def minute(self) -> Minute:
        """Minutes since 1970 at the place, as entries have them."""
        return min(max(0, int(self.seconds() // 60)), (1 << 32) - 1)

    def wrote(self, at: float, modified_s: float) -> None:
        """An object that this process wrote at its own time `at` has this time at the place."""
        self._ahead_s = modified_s - at

    def local(self) -> float:
        """Seconds since 1970 of this machine."""
        return self._now()


class Seen(NamedTuple):
    """The places of journals and tables at one poll."""

    root: Root
    journals: tuple[str, ...]
    """Those that the root's tables do not have, the oldest first."""
    writers: int
    """Writers of journals of the last minutes but this one."""


class Catalogue:
    """Used by one thread, but for `index`, which is thread-safe. All methods raise OSError where the place fails."""

    def __init__(self, objects: Objects, index: Index, clock: Clock, merge_s: float = MERGE_S) -> None:
        """`merge_s`: time after which journals are merged, however few they are."""
        self.index = index
        self.clock = clock
        self.writer = secrets.token_hex(8)
        """Names this process in its journals; tells nothing."""
        self.problem = ""
        """What is wrong with the index, though it is used; empty if nothing."""
        self.seen = Seen(Root(), (), 0)
        self.fresh_at = 0.0
        """Of `time.monotonic`: when the last poll began that read everything; 0 before the first one."""
        self._objects = objects
        self._merge_s = merge_s
        self._tables: dict[str, Entries] = {}
        self._journals: dict[str, Entries] = {}
        self._unfit: set[str] = set()
        """Journals and tables that are damaged: not read again."""
        self._sequence = 0
        self._said_at = 0.0
        self._lacking_since: float | None = None
        """Of `time.monotonic`: since when a table of the root cannot be read."""
        self._written_at: tuple[str, float] | None = None

    # -- journals

    def flush(self) -> None:
        """Write what this process did to a journal; an empty one where it has been silent for long."""
        entries = self.index.take_own()
        now = time.monotonic()
        if not len(entries.shorts) and self._said_at and now - self._said_at < HELLO_S:
            return
        self._sequence += 1
        path = f"{JOURNALS}/{self.clock.minute():08x}-{self.writer}-{self._sequence:06x}"
        began = self.clock.local()
        try:
            self._write(path, entries)
        except BaseException:
            self.index.give_back(entries)
            raise
        self._said_at = now
        self._journals[path] = entries
        self._written_at = (path, began)

    def _write(self, path: str, entries: Entries) -> None:
        parts = pack_part(Part(self.writer, entries), self.index.kinds)
        self._objects.write(path, iter(parts), sum(map(len, parts)))

    # -- polls

    def poll(self) -> None:
        """Read what other writers did since the last poll."""
        began = time.monotonic()
        listed = self._listed(JOURNALS, MAX_JOURNALS)
        root = self.root()
        names = sorted(path for path in listed if path not in root.merged)
        if self._written_at is not None and (own := listed.get(self._written_at[0])) is not None:
            self.clock.wrote(self._written_at[1], own.modified_s)
            self._written_at = None
        fresh = [entries for path in names if path not in self._journals and (entries := self._journal(path))]
        held = set(names)
        self._journals = {path: entries for path, entries in self._journals.items() if path in held}
        self._unfit &= {*listed, *(table.path for table in root.tables)}
        had = list(self._tables)
        self._read_tables(root)
        if root != self.seen.root or had != list(self._tables) or not self.fresh_at:
            tables = tuple(self._tables.values())
            self.index.replace(tables, [self._journals[path] for path in reversed(names) if path in self._journals])
        else:
            for entries in fresh:
                self.index.heard(entries)
        writers = {_writer_of(path) for path in listed} - {self.writer}
        self.seen = Seen(root, tuple(path for path in names if path in self._journals), len(writers))
        self.fresh_at = began

    def root(self) -> Root:
        """The root as it is now. Where it is missing or damaged, all tables that there are count."""
        try:
            return read_root(read_whole(self._objects, ROOT, MAX_ROOT))
        except Missing:
            problem = ""
        except Unfit as error:
            problem = f"the root of the index is damaged: {error}"
            log.error("%s; its tables are read without it", problem)
        tables = sorted(self._listed(TABLES, 64).values(), key=lambda each: -each.modified_s)
        most = [TableName(each.path, min(MAX_ENTRIES, each.nbytes // ENTRY_BYTES)) for each in tables]
        self.problem = problem
        return Root(tables=tuple(most))

    def _listed(self, folder: str, most: int) -> dict[str, Listed]:
        listed: dict[str, Listed] = {}
        for each in self._objects.list(folder):
            if _OURS[folder].fullmatch(each.path):
                listed[each.path] = each
                if len(listed) >= most:
                    self.problem = f"{folder} has more than {most} objects: is it another program's too?"
                    break
        return listed

    def _journal(self, path: str) -> Entries | None:
        entries = self._part(path, MAX_JOURNAL)
        if entries is not None:
            self._journals[path] = entries
        return entries

    def _read_tables(self, root: Root) -> None:
        """Read the tables of a root. Those that are missing or damaged are left out; a scan finds their objects."""
        tables: dict[str, Entries] = {}
        lacking, left = [], MAX_ENTRIES
        for table in root.tables:
            entries = self._tables.get(table.path)
            if entries is None and table.count <= left:
                entries = self._part(table.path, min(left, MAX_ENTRIES))
            if entries is None:
                lacking.append(table.path)
                continue
            left -= len(entries.shorts)
            tables[table.path] = entries
        self._tables = tables
        if lacking:
            self.problem = (
                f"{len(lacking)} tables of the index are missing, damaged or too large: a scan finds their objects"
            )
            self._lacking_since = self._lacking_since or time.monotonic()
        else:
            self._lacking_since = None
            self.problem = self.problem if not root.sequence else ""

    def _part(self, path: str, most: int) -> Entries | None:
        if path in self._unfit:
            return None
        try:
            return read_part(read_whole(self._objects, path, most_bytes(most)), self.index.kinds).entries
        except Missing:
            # Removed meanwhile, or not visible here yet.
            return None
        except Unfit as error:
            log.warning("%s of the index is not used: %s", path, error)
            self._unfit.add(path)
            return None

    # -- merges

    def due(self) -> bool:
        """True if it is time to merge the journals."""
        waiting = self.seen.journals
        if not waiting:
            return False
        if self._lacking_since is not None and time.monotonic() - self._lacking_since < GRACE_S:
            # A merge would drop the tables that cannot be read, and this machine may only see them late.
            return False
        first = int(waiting[0].rpartition("/")[2][:8], 16) * 60
        return len(waiting) >= MERGE_JOURNALS or self.clock.seconds() - first > self._merge_s

    def merge(self, keep_erased_s: float) -> bool:
        """Merge the journals into a table and name it in a new root. Other writers may do the same at that time; False
        where one was first, and nothing changed. `keep_erased_s`: for how long evicted names are remembered."""
        began = time.monotonic()
        before, names = self.seen.root, self.seen.journals
        minute = self.clock.minute()
        merged = combined([self._journals[path] for path in reversed(names)])
        tables = [(table, self._tables[table.path]) for table in before.tables if table.path in self._tables]
        while tables and len(merged.shorts) * 2 > len(tables[0][1].shorts):
            merged = combined([merged, tables.pop(0)[1]])
        if not tables:
            kept = (merged.kinds == ERASED) & (merged.minutes > max(0, minute - int(keep_erased_s // 60)))
            merged = merged.take(objects_of(merged) | kept)
        written = []
        if len(merged.shorts):
            table = TableName(f"{TABLES}/{secrets.token_hex(8)}", len(merged.shorts))
            self._write(table.path, merged)
            written = [(table, merged)]
        there = self._listed(JOURNALS, MAX_JOURNALS)
        done = {path: at for path, at in before.merged.items() if path in there} | dict.fromkeys(names, minute)
        old = [path for path, at in done.items() if minute - at > GRACE_S / 60]
        if time.monotonic() - began > GRACE_S / 2 or self.root().sequence != before.sequence:
            self._objects.delete([table.path for table, _ in written])
            return False
        root = Root(
            before.sequence + 1,
            tuple(table for table, _ in [*written, *tables]),
            {path: at for path, at in done.items() if path not in old},
            self.writer,
        )
        write_whole(self._objects, ROOT, pack_root(root))
        self._tables = {table.path: entries for table, entries in [*written, *tables]}
        self._objects.delete(old)
        self.clean(root)
        return True

    def clean(self, root: Root) -> None:
        """Delete tables that no root names any more."""
        named = {table.path for table in root.tables}
        late = self.clock.seconds() - GRACE_S
        lost = [each.path for each in self._listed(TABLES, 1 << 10).values() if each.modified_s < late]
        self._objects.delete([path for path in lost if path not in named])


def _writer_of(path: str) -> str:
    parts = path.rpartition("/")[2].split("-")
    return parts[1] if len(parts) == 3 else path
