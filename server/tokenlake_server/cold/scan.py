"""Compares one folder of objects with the index: finds objects whose journal was lost, names without an object, and
what writers left half-written.

A place has `FOLDERS` folders; one at a time is listed, in the background and in any order, so that a place with many
millions of objects is never listed as a whole.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from tokenlake_server.cold.base import PARTIAL, Listed, Missing, Objects, Unfit
from tokenlake_server.cold.index import Index
from tokenlake_server.cold.names import OBJECTS, path_of, short_in, short_of
from tokenlake_server.cold.records import ERASED, Kind, Minute, objects_of
from tokenlake_server.cold.sealed import HEAD_BYTES, Head, object_bytes, read_head

log = logging.getLogger(__name__)

YOUNG_S = 3600.0
"""Age from which on a damaged or half-written file is removed: no writer is at it any more."""
SETTLED_MINUTES = 10
"""Age of an entry from which on its object must be listed: a listing may lack new objects."""
SKEW_S = 5.0
"""Difference between the clocks of two machines that does no harm."""
MOST_ADOPTED = 1000
"""Objects whose heads are read in one scan."""


class Scanned(NamedTuple):
    """The result of a scan."""

    found: int
    """Objects that the index did not name."""
    gone: int
    """Names in the index without an object."""
    removed: int
    """Files that were removed, because they were evicted, damaged or half-written."""
    foreign: int
    """Files that are no objects of the tier, and stay."""


def scan(
    objects: Objects, index: Index, folder: int, now_s: float, evicted_s: float = 0.0, *, whole: bool = True
) -> Scanned:
    """Compare one folder with the index, and correct both. `now_s`: by the clock of the place. `evicted_s`: the time of
    the last eviction by an operator: it may have meant each older object that the index does not name, so that these
    are removed, or left where the index is not `whole`. Raises OSError."""
    minute = int(now_s // 60)
    before = index.of_folder(folder)
    listed: dict[int, Listed] = {}
    remove: list[str] = []
    foreign = 0
    for each in objects.list(f"{OBJECTS}/{folder:02x}"):
        name = each.path.rpartition("/")[2]
        short = short_in(folder, name)
        if short is not None:
            listed[short] = each
        elif name.startswith(PARTIAL):
            remove += [each.path] if each.modified_s < now_s - YOUNG_S else []
        else:
            foreign += 1
    there = np.fromiter(listed, np.uint64, len(listed))
    known = before.shorts[objects_of(before)]
    evicted = set(before.shorts[before.kinds == ERASED].tolist())
    found = 0
    for short in np.setdiff1d(there, known).tolist()[:MOST_ADOPTED]:
        each = listed[short]
        if each.modified_s < evicted_s + SKEW_S:
            remove += [each.path] if whole else []
        elif short in evicted and index.state(short)[0] == ERASED:
            remove.append(each.path)
        elif (head := _head(objects, each, short)) is not None:
            index.added(short, Kind(head.tag, head.slot_bytes), _used(each, minute))
            found += 1
        elif each.modified_s < now_s - YOUNG_S:
            remove.append(each.path)
    old = objects_of(before) & (before.minutes.astype(np.int64) + SETTLED_MINUTES < minute)
    gone = np.setdiff1d(before.shorts[old], there).tolist()
    index.removed(gone, minute)
    objects.delete(remove)
    return Scanned(found, len(gone), len(remove), foreign)


def _head(objects: Objects, listed: Listed, short: int) -> Head | None:
    """The head of an object, if its name and size are those of its path."""
    try:
        reader = objects.read(path_of(short))
        try:
            block = memoryview(bytearray(HEAD_BYTES))
            reader.read(block)
        finally:
            reader.close()
        head = read_head(block)
    except (Missing, Unfit):
        return None
    fits = short_of(head.name) == short and object_bytes(head.slot_bytes) == listed.nbytes
    return head if fits else None


def _used(listed: Listed, minute: Minute) -> Minute:
    return max(0, min(minute, int(listed.modified_s // 60)))
