"""How requests used their segments: seen at the match, kept for the store that follows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenlake.advice import NO_USE, Advice, Use
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.store import SegmentStore
from tokenlake.wire.fields import MAX_SECONDS

if TYPE_CHECKING:
    from tokenlake.core.match_under_way import MatchUnderWay

__all__ = ["Past", "RecentMatches", "use_after", "use_of", "with_use"]

REMEMBERED = 32
"""Matches of a session whose prompt was not found whole: so many requests may compute at a time."""


Past = tuple[int, Use, float]
"""(index of a segment in a prompt, how it was used last, how long ago)"""


def use_of(match: MatchUnderWay, hits: int, store: SegmentStore, now: float) -> Use:
    """Of a match that found `hits` segments. How its deepest known segment was used before is told by whoever has that
    one, or remembers it; this node is asked last, of what lies beyond all that was told. `now`: of the workload."""
    segments, pasts = match.segments, match.pasts
    index = len(segments) - 1
    while index >= 0 and segments[index] is None:
        index -= 1
    deepest = segments[index] if index >= 0 else None
    if deepest is not None:
        age_s = min(MAX_SECONDS, max(0.0, now - deepest.touched))
        if index == len(segments) - 1:
            # Mostly: nobody knows more.
            return Use.after(deepest.advice.use, age_s, len(segments), hits, len(segments))
        pasts.append((index, deepest.advice.use, age_s))
    beyond = max((past[0] for past in pasts), default=-1) + 1
    remembered = store.remembers(match.process.session.tenant, match.keys[beyond:], now)
    if remembered is not None:
        pasts.append((beyond + remembered[0], *remembered[1:]))
    return use_after(pasts, len(segments), hits)


def use_after(pasts: Iterable[Past], segments: int, hits: int) -> Use:
    """Of a request that found `hits` of its `segments`, as the deepest of `pasts` shows, the latest of several."""
    index, use, age_s = max(pasts, default=(-1, NO_USE, 0.0), key=lambda past: (past[0], -past[2]))
    return Use.after(use, age_s, segments, hits, max(hits, index + 1))


def with_use(advice: Advice | None, use: Use) -> Advice:
    """What the engine said, and what was seen."""
    return Advice(use=use) if advice is None else msgspec.structs.replace(advice, use=use)


class RecentMatches:
    """Of one session: a store goes on where a match of the same prompt ended."""

    def __init__(self) -> None:
        self._matches: deque[tuple[bytes, Use]] = deque(maxlen=REMEMBERED)

    def add(self, keys: bytes, use: Use) -> None:
        """The engine asked for the concatenated `keys` and will compute what is missing."""
        self._matches.append((keys, use))

    def use(self, keys: Sequence[SegmentKey], first: int) -> Use:
        """Of the request that stores `keys`, the first of which is segment `first` of its prompt."""
        at = first * KEY_BYTES
        for known, use in reversed(self._matches):
            if keys and known[at : at + KEY_BYTES] == keys[0]:
                return use
        return Use(first + len(keys), first)
