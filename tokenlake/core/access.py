"""How requests used their segments: seen at the match, kept for the store that follows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenlake.hints import NO_ACCESS, AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.store import SegmentStore
from tokenlake.wire.fields import MAX_SECONDS

if TYPE_CHECKING:
    from tokenlake.core.match_under_way import MatchUnderWay

__all__ = ["KnownAccess", "RecentMatches", "access_after", "access_of", "with_access"]

REMEMBERED = 32
"""Matches of a session whose prompt was not found whole: so many requests may compute at a time."""


KnownAccess = tuple[int, AccessRecord, float]
"""(index of a segment in a prompt, how it was used last, how long ago)"""


def access_of(match: MatchUnderWay, hits: int, store: SegmentStore, now: float) -> AccessRecord:
    """Of a match that found `hits` segments. How its deepest known segment was used before is told by whoever has that
    one, or remembers it; this node is asked last, of what lies beyond all that was told. `now`: of the workload."""
    segments, known_accesses = match.segments, match.known_accesses
    index = len(segments) - 1
    while index >= 0 and segments[index] is None:
        index -= 1
    deepest = segments[index] if index >= 0 else None
    if deepest is not None:
        age_s = min(MAX_SECONDS, max(0.0, now - deepest.touched))
        if index == len(segments) - 1:
            # Mostly: nobody knows more.
            return AccessRecord.after(deepest.hints.access, age_s, len(segments), hits, len(segments))
        known_accesses.append((index, deepest.hints.access, age_s))
    beyond = max((last_access[0] for last_access in known_accesses), default=-1) + 1
    remembered = store.last_access(match.process.session.tenant, match.keys[beyond:], now)
    if remembered is not None:
        known_accesses.append((beyond + remembered[0], *remembered[1:]))
    return access_after(known_accesses, len(segments), hits)


def access_after(known_accesses: Iterable[KnownAccess], segments: int, hits: int) -> AccessRecord:
    """Of a request that found `hits` of its `segments`, as the deepest of `known_accesses` shows, the latest of
    several."""
    index, access, age_s = max(
        known_accesses, default=(-1, NO_ACCESS, 0.0), key=lambda last_access: (last_access[0], -last_access[2])
    )
    return AccessRecord.after(access, age_s, segments, hits, max(hits, index + 1))


def with_access(hints: Hints | None, access: AccessRecord) -> Hints:
    """What the engine said, and what was seen."""
    return Hints(access=access) if hints is None else msgspec.structs.replace(hints, access=access)


class RecentMatches:
    """Of one session: a store goes on where a match of the same prompt ended."""

    def __init__(self) -> None:
        self._matches: deque[tuple[bytes, AccessRecord]] = deque(maxlen=REMEMBERED)

    def add(self, keys: bytes, access: AccessRecord) -> None:
        """The engine asked for the concatenated `keys` and will compute what is missing."""
        self._matches.append((keys, access))

    def access(self, keys: Sequence[SegmentKey], first: int) -> AccessRecord:
        """Of the request that stores `keys`, the first of which is segment `first` of its prompt."""
        at = first * KEY_BYTES
        for known, access in reversed(self._matches):
            if keys and known[at : at + KEY_BYTES] == keys[0]:
                return access
        return AccessRecord(first + len(keys), first)
