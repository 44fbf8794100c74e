"""What is known of a request. By the engine, which the pool cannot see: whether the conversation goes on, what kind of
request it is, how it ended, and how long its cache is to be kept. By the pool: how much of the prompt it had, and when
that was used before.

Hints changes the order of eviction and nothing else: it is never a promise, and never a use. The newest word wins;
what a later request does not speak about stays (`Hints.over`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.wire.fields import Index

__all__ = ["MAX_LABEL", "MAX_TTL_S", "NEVER", "NO_HINTS", "NO_ACCESS", "Hints", "Outlook", "AccessRecord"]

MAX_LABEL = 32
"""Characters of a category or a stop reason, all printable: policies keep statistics by them."""
MAX_TTL_S = 7 * 86400.0
"""Nothing is asked to be kept, or to go, later than this."""


class Outlook(IntEnum):
    """Will the conversation come back?"""

    UNKNOWN = 0
    GOES_ON = 1
    OVER = 2


MAX_TURN = (1 << 32) - 1
NEVER = -1.0
"""Of a time since something that did not happen."""
Gap = Annotated[float, Meta(ge=NEVER, le=1e9)]


class AccessRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one request used its segments. Times are seconds of the workload."""

    segments: Index = 0
    """Full segments of its prompt; 0 where nothing is known of the request."""
    hits: Index = 0
    """Of them those that were found, from the first on."""
    turn: Index = 0
    """How often the conversation went on where it had ended; 0 where it starts, or branches off inside another."""
    gap_s: Gap = NEVER
    """Since the request that used the deepest known segment before: found, or remembered."""
    previous_gap_s: Gap = NEVER
    """The gap of that request, where this one goes on from its end."""
    left: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    """Segments of that request's prompt beyond the deepest known one; -1: there was none."""
    remembered: Index = 0
    """Beyond the hits, up to the deepest of which is known that it was used before: evicted, refused, or held behind
    one that is not."""

    @property
    def known(self) -> int:
        """Segments of the prompt that were used before, as far as anybody knows."""
        return self.hits + self.remembered

    @classmethod
    def after(cls, last_access: AccessRecord, age_s: float, segments: int, hits: int, known: int) -> AccessRecord:
        """Of a request that found `hits` of its `segments` while `known` were used before, the deepest of them `age_s`
        ago as in `last_access` (`NO_ACCESS` where that is not known)."""
        remembered = known - hits
        if not known or not last_access.segments:
            return cls(segments, hits, remembered=remembered)
        left = max(0, last_access.segments - known)
        # The last segment may hold a part of the answer, and so be another one; a first segment may be everybody's.
        if left > 1 or known == 1:
            return cls(segments, hits, 0, age_s, NEVER, left, remembered)
        # Bounded: what a node that lies makes of it would be refused wherever this one tells it.
        return cls(segments, hits, min(last_access.turn + 1, MAX_TURN), age_s, last_access.gap_s, left, remembered)


NO_ACCESS = AccessRecord()


class Hints(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one request, for all its segments. ValueError for a value without meaning, naming the field."""

    outlook: int = Outlook.UNKNOWN
    category: str = ""
    """Of the request, in the engine's own words: `chat`, `agent`, `rag`."""
    stop_reason: str = ""
    """How the request ended, in the engine's own words: `stop`, `length`, `tool_use`."""
    priority: int = 0
    """-1: goes early; 1: goes late, as far as the tenant's share of such segments reaches."""
    ttl_s: float = 0.0
    """From the last use or word on: what nobody touched for so long goes first. 0: no such time."""
    output_tokens: int = -1
    """Of the answer, once it is known; -1: not known."""
    access: AccessRecord = NO_ACCESS
    """By the pool; what an engine says here is not listened to."""

    def __post_init__(self) -> None:
        if not Outlook.UNKNOWN <= self.outlook <= Outlook.OVER:
            raise ValueError(f"hints field 'outlook' is {self.outlook}; 0 (unknown), 1 (goes on) or 2 (over)")
        for name, label in (("category", self.category), ("stop_reason", self.stop_reason)):
            if len(label) > MAX_LABEL or not label.isprintable():
                raise ValueError(f"hints field {name!r} has {len(label)} characters; at most {MAX_LABEL}, printable")
        if not -1 <= self.priority <= 1:
            raise ValueError(f"hints field 'priority' is {self.priority}; -1 (low), 0 or 1 (high)")
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"hints field 'ttl_s' is {self.ttl_s}; 0 (none) to {MAX_TTL_S:.0f} seconds")
        if not -1 <= self.output_tokens < 1 << 32:
            raise ValueError(f"hints field 'output_tokens' is {self.output_tokens}; -1 (not known) or a count")

    def ended(self, stop_reason: str, output_tokens: int = -1) -> Hints:
        """The same of a request that ended so, after so many tokens; -1 leaves what was said."""
        output = self.output_tokens if output_tokens < 0 else output_tokens
        return msgspec.structs.replace(self, stop_reason=stop_reason, output_tokens=output)

    def over(self, previous: Hints) -> Hints:
        """This word after `previous`: outlook and stop reason are new, an empty category leaves the former, and so does
        a retention (priority and time to live) that says nothing, and a word without a use. A use of which the engine
        says nothing leaves all that it said."""
        if previous is NO_HINTS or previous == self:
            return self
        access, output = (
            (self.access, self.output_tokens) if self.access.segments else (previous.access, previous.output_tokens)
        )
        if self.output_tokens >= 0:
            output = self.output_tokens
        if not (self.outlook or self.category or self.stop_reason or self.priority or self.ttl_s):
            return msgspec.structs.replace(previous, output_tokens=output, access=access)
        silent = not (self.priority or self.ttl_s)
        return Hints(
            self.outlook,
            self.category or previous.category,
            self.stop_reason,
            previous.priority if silent else self.priority,
            previous.ttl_s if silent else self.ttl_s,
            output,
            access,
        )


NO_HINTS = Hints()
