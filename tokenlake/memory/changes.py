"""The log of the segments that became readable at this node, and of those that left it: a ring buffer.

One thread writes. Other threads may read: an entry is replaced as a whole, and carries its sequence number, by which a
reader notices that the entry that it looked for was overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory.segment import Segment

MAX_CHANGES = 1 << 16
"""Number of changes that are kept: about 16 MiB."""


class Change(NamedTuple):
    """One change of this node's segments, or of the ring."""

    sequence: int
    """1 for the first change since the start."""
    tenant: TenantId
    key: SegmentKey
    slot_bytes: int
    depth: int
    """Index of the segment in its prompt."""
    stored: bool
    """False: the segment left."""
    ring: RingRecord | None = None
    """A new ring record; the fields of segments have no meaning then."""


_Fields = tuple[int, TenantId, SegmentKey, int, int, bool, RingRecord | None]
"""The fields of a `Change`, which is made when it is read: each store and each eviction adds one."""


class ChangeLog:
    """The newest changes, at most `limit`."""

    def __init__(self, limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._entries: list[_Fields] = []
        self.newest = 0
        """Sequence number of the newest change; 0 before the first."""

    def add(self, segment: Segment, stored: bool) -> None:
        """Log a segment that became READY (`stored`), or a READY one that left."""
        at = self.newest + 1
        self._put((at, segment.tenant, segment.key, segment.slot_bytes, segment.depth, stored, None))

    def ring(self, record: RingRecord) -> None:
        """Log a new ring record."""
        self._put((self.newest + 1, TenantId(""), SegmentKey(b""), 0, 0, False, record))

    def _put(self, change: _Fields) -> None:
        at = change[0]
        if at <= self._limit:
            self._entries.append(change)
        else:
            self._entries[(at - 1) % self._limit] = change
        # Last, because a reader in another thread takes all entries up to it for written.
        self.newest = at

    def after(self, sequence: int, most: int) -> list[Change] | None:
        """The next changes behind `sequence`, at most `most`. None if the log does not reach back so far, or never came
        to `sequence`. May be called from any thread."""
        newest = self.newest
        if not 0 <= sequence <= newest:
            return None
        found: list[Change] = []
        for at in range(sequence + 1, min(newest, sequence + most) + 1):
            change = self._entries[(at - 1) % self._limit]
            if change[0] != at:
                return None
            found.append(Change._make(change))
        return found
