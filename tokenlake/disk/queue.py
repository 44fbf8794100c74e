"""The order in which segments may leave a slab: that in which they left memory, with a second chance."""

from __future__ import annotations

from tokenlake.disk.index import NO_ENTRY, Index

_NONE = 0xFFFFFFFF
"""In place of the entry before the first one, and behind the last."""


class Queue:
    """Entries of one slab, linked in arrays of the index: thousands of entries take little memory so, and each can
    leave from anywhere."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._first = self._last = _NONE
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> int:
        """The entry at the head, or `NO_ENTRY`."""
        return NO_ENTRY if self._first == _NONE else self._first

    def append(self, entry: int) -> None:
        """Add an entry, which is not in the queue, at the end."""
        index = self._index
        index.previous[entry], index.next[entry], index.queued[entry] = self._last, _NONE, 1
        if self._last == _NONE:
            self._first = entry
        else:
            index.next[self._last] = entry
        self._last = entry
        self._size += 1

    def remove(self, entry: int) -> None:
        """Take an entry out of the queue, which contains it."""
        index = self._index
        before, behind = index.previous[entry], index.next[entry]
        if before == _NONE:
            self._first = behind
        else:
            index.next[before] = behind
        if behind == _NONE:
            self._last = before
        else:
            index.previous[behind] = before
        index.queued[entry] = 0
        self._size -= 1

    def pass_over(self, entry: int) -> None:
        """Move an entry to the end."""
        self.remove(entry)
        self.append(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError when links, marks and size do not add up."""
        at, before, counted = self._first, _NONE, 0
        while at != _NONE:
            assert self._index.queued[at]
            assert self._index.previous[at] == before
            at, before, counted = self._index.next[at], at, counted + 1
        assert self._last == before
        assert counted == self._size
