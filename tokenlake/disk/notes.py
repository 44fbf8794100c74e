"""Notes: the depth, accesses and hints of a segment on disk, packed into 48 bytes, from which a segment that is read
back, also after a restart, gets the retention value that it would have if it had stayed in memory."""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from typing import NamedTuple

from tokenlake.disk.places import NOTE_BYTES
from tokenlake.hints import AccessRecord, Hints

_NOTE = struct.Struct("<IHBbfiIIIIffiI")
assert _NOTE.size == NOTE_BYTES
_MOST = (1 << 32) - 1
_MOST_SIGNED = (1 << 31) - 1
MAX_NAMES = 64
"""Maximum number of pairs of a category and a stop reason that are remembered by their checksum."""


class Note(NamedTuple):
    """The knowledge about one segment on disk."""

    depth: int
    """Index of the segment in its prompt."""
    accesses: int
    """Accesses of the segment that were counted."""
    hints: Hints
    """The newest hints of the requests that wrote or read the segment."""


class Notes:
    """Packs and unpacks notes. Categories and stop reasons are packed as a checksum: after a restart they are known
    again once a request has named them."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()

    def pack(self, note: Note) -> bytes:
        """Returns the note in `NOTE_BYTES` bytes; numbers that are too large are reduced to the largest that fit."""
        hints, access = note.hints, note.hints.access
        name = 0
        if hints.category or hints.stop_reason:
            name = zlib.crc32(f"{hints.category}\0{hints.stop_reason}".encode())
            self._names[name] = hints.category, hints.stop_reason
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
        return _NOTE.pack(
            min(note.depth, _MOST),
            min(note.accesses, 0xFFFF),
            hints.outlook,
            hints.priority,
            hints.ttl_s,
            min(hints.output_tokens, _MOST_SIGNED),
            min(access.segments, _MOST),
            min(access.hits, _MOST),
            min(access.turn, _MOST),
            min(access.remembered, _MOST),
            access.gap_s,
            access.previous_gap_s,
            min(access.unshared, _MOST_SIGNED),
            name,
        )

    def unpack(self, packed: bytes) -> Note:
        """Inverse of `pack`. Raises ValueError for bytes that `pack` did not make."""
        try:
            depth, accesses, outlook, priority, ttl_s, output, segments, hits, turn, behind, gap, before, rest, name = (
                _NOTE.unpack(packed)
            )
        except struct.error as error:
            raise ValueError(f"a note of {len(packed)} bytes; {NOTE_BYTES} expected") from error
        if not (-1 <= gap <= 1e9 and -1 <= before <= 1e9 and rest >= -1):
            raise ValueError("a note with a time or a count that no request has")
        category, stop_reason = self._names.get(name, ("", ""))
        access = AccessRecord(segments, hits, turn, gap, before, rest, behind)
        return Note(depth, accesses, Hints(outlook, category, stop_reason, priority, ttl_s, output, access))
