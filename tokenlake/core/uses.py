"""How requests used their segments: seen at the match, kept for the store that follows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenlake.advice import Advice, Use
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire.fields import MAX_SECONDS

if TYPE_CHECKING:
    from tokenlake.core.match_under_way import MatchUnderWay

__all__ = ["RecentMatches", "use_of", "with_use"]

REMEMBERED = 32
"""Matches of a session whose prompt was not found whole: so many requests may compute at a time."""


def use_of(match: MatchUnderWay, hits: int, now: float) -> Use:
    """Of a match that found `hits` segments. What its deepest hit was used for before is told by whoever has that one,
    or, where that node leased more beyond a gap, by the one with the deepest before it. `now`: of the workload."""
    deepest = match.segments[hits - 1] if hits else None
    if deepest is not None:
        return Use.after(deepest.advice.use, min(MAX_SECONDS, max(0.0, now - deepest.touched)), len(match.keys), hits)
    past = max((each for each in match.pasts if each[0] < hits), default=None, key=lambda each: each[0])
    return Use(len(match.keys), hits) if past is None else Use.after(past[1], past[2], len(match.keys), hits)


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
