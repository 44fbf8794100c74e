"""What became of one request, in tokens: the answer to `tokenlake explain`.

::

    ideal     what the prompt has
      indexed   of these, what a match found: here, or at other nodes
        fetched   of these, what came here from other nodes
        useful    of these, what was held to the end by who read it, here or where it lay
    missed    the rest, and why
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tokenlake.wire.fields import Index, Seconds

__all__ = ["MAX_EXPLAINED_NAMES", "Funnel", "Missed", "Why"]

MAX_EXPLAINED_NAMES = 64
"""Names of requests in one `engine.Explained`."""


class Why(StrEnum):
    """Tokens were missed because ..."""

    NEVER_STORED = "never_stored"
    """their segments' directory nodes know nothing of them: nobody stored them, or they went long ago."""
    EVICTED = "evicted"
    """their segments went for others, or were not worth keeping: the detail has the rule."""
    OTHER_LAYOUT = "other_layout"
    """nothing of this layout lies here, and segments of another do: keys never match across layouts."""
    TOO_SHORT = "too_short"
    """they do not fill a segment."""
    PENDING = "pending"
    """somebody was still writing them."""
    TOO_SLOW = "too_slow"
    """a node did not answer, or did not send, within the deadline."""
    UNREACHABLE = "unreachable"
    """a node was not connected: it was down, or it and this node had refused each other."""
    UNKNOWN = "unknown"
    """their directory node came back and does not know yet what others hold, or cannot be asked now."""
    BEHIND_A_GAP = "behind_a_gap"
    """they are there, but something before them is not."""
    LIMIT = "limit"
    """the session had leased as much as one may, or there was no slot to bring them to: the detail has the code."""
    LOST = "lost"
    """they were found, and gone or damaged when they were to be read."""
    SKIPPED = "skipped"
    """they were found, and whoever asked did not want them: computing was cheaper, or the request ended."""


class _Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Missed(_Struct, frozen=True):
    """Tokens that were missed for one reason."""

    why: str
    tokens: Index
    detail: str = ""


class Funnel(_Struct, frozen=True):
    """Of one request. `ideal` = `useful` + `held` + all that was `missed`."""

    request: str
    node: str
    age_s: Seconds
    """Since it asked."""
    segment_tokens: Index
    ideal: Index
    here: Index
    elsewhere: tuple[tuple[str, Index], ...]
    """(node, tokens)."""
    fetched: Index
    useful: Index
    held: Index
    """Not given back yet."""
    missed: tuple[Missed, ...]
