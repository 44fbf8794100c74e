"""Hints: knowledge about a request beyond its tokens.

The engine says whether the conversation goes on, what kind of request it is, how it ended, and for how long its cache
is to be kept. The pool adds an access record: how much of the prompt it found, and when that was accessed before.

Hints change the order of eviction and nothing else. They are no promise, and no access; only `pin_s` keeps segments,
within the bounds of `core.engines.pins`. Newer hints replace older ones; a field that the newer hints leave out stays
(`Hints.merged_over`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.wire.fields import Index

MAX_LABEL = 32
"""Maximum number of characters of a category, a stop reason or an account in hints; all must be printable. The
eviction policy keeps statistics by the first two."""
MAX_TTL_S = 7 * 86400.0
"""Maximum time to live in seconds that hints may give a segment."""

MAX_PIN_S = 86400.0
"""Maximum time in seconds for which a segment is pinned at a time; it may be pinned again."""


class Outlook(IntEnum):
    """Whether the conversation goes on with another request."""

    UNKNOWN = 0
    GOES_ON = 1
    OVER = 2


MAX_TURN = (1 << 32) - 1
NEVER = -1.0
"""Stands for the seconds since an event that has not happened."""
Gap = Annotated[float, Meta(ge=NEVER, le=1e9)]


class AccessRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one request accessed its segments. Times are seconds of the workload."""

    segments: Index = 0
    """Full segments of its prompt; 0 in the record of an unknown request."""
    hits: Index = 0
    """Segments that were found, from the first on."""
    turn: Index = 0
    """How often the conversation went on at its end; 0 for a conversation that starts, or branches off inside
    another."""
    gap_s: Gap = NEVER
    """Seconds since the previous request: the request that last accessed the deepest segment of the prompt with a known
    access."""
    previous_gap_s: Gap = NEVER
    """Value of `gap_s` of the previous request, if this request continues the conversation at its end."""
    unshared: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    """Segments of the previous prompt beyond the deepest known one; -1: there was no previous request."""
    remembered: Index = 0
    """Segments after the hits, up to the deepest one that is known to have been accessed before: they were evicted or
    refused, or come after one that was."""

    @property
    def known(self) -> int:
        """Segments of the prompt that were accessed before, as far as any node knows."""
        return self.hits + self.remembered

    @classmethod
    def after(cls, last_access: AccessRecord, age_s: float, segments: int, hits: int, known: int) -> AccessRecord:
        """The record of a request that found `hits` of its `segments`. `known` of them, from the first on, were
        accessed before: the last of these `age_s` ago (unused if `known` is 0), by the request of `last_access`
        (`NO_ACCESS` if that is unknown)."""
        remembered = known - hits
        if not known or not last_access.segments:
            return cls(segments, hits, remembered=remembered)
        unshared = max(0, last_access.segments - known)
        # The last segment may contain a part of the answer, and so differ; many prompts share their first segment.
        if unshared > 1 or known == 1:
            return cls(segments, hits, 0, age_s, NEVER, unshared, remembered)
        # The number of turns is bounded, because a node that received a greater number would refuse the message.
        return cls(segments, hits, min(last_access.turn + 1, MAX_TURN), age_s, last_access.gap_s, unshared, remembered)


NO_ACCESS = AccessRecord()


class Hints(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Hints of one request for all its segments. ValueError, which names the field, for a value without meaning."""

    outlook: int = Outlook.UNKNOWN
    category: str = ""
    """Kind of the request, as the engine names it: `chat`, `agent`, `rag`."""
    stop_reason: str = ""
    """How the request ended, as the engine names it: `stop`, `length`, `tool_use`."""
    priority: int = 0
    """-1: evicted early; 1: evicted late, up to a bounded share of the memory."""
    ttl_s: float = 0.0
    """Seconds after the last access, or the last hints, from which the segments are evicted first. 0: no such time."""
    output_tokens: int = -1
    """Tokens of the answer; -1: not known."""
    access: AccessRecord = NO_ACCESS
    """How the request accessed its segments. The pool sets it, and ignores the value that an engine sends."""
    account: str = ""
    """Name of the salt of the request, for the quota of each salt (`core.engines.salt_quotas`); empty: none. Segments
    of one key have one salt."""
    pin_s: float = 0.0
    """Seconds for which the copies of the engine's node are pinned, from each hint, read and commit with these hints
    on; 0: they are not. It reaches no other node, and is no part of the hints of a segment."""

    def __post_init__(self) -> None:
        if not Outlook.UNKNOWN <= self.outlook <= Outlook.OVER:
            raise ValueError(f"hints field 'outlook' is {self.outlook}; expected 0 (unknown), 1 (goes on) or 2 (over)")
        labels = ("category", self.category), ("stop_reason", self.stop_reason), ("account", self.account)
        for name, label in labels:
            if len(label) > MAX_LABEL or not label.isprintable():
                raise ValueError(
                    f"hints field {name!r} has {len(label)} characters; expected at most {MAX_LABEL}, all printable"
                )
        if not -1 <= self.priority <= 1:
            raise ValueError(f"hints field 'priority' is {self.priority}; expected -1 (low), 0 or 1 (high)")
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"hints field 'ttl_s' is {self.ttl_s}; expected 0 (none) to {MAX_TTL_S:.0f} seconds")
        if not 0 <= self.pin_s <= MAX_PIN_S:
            raise ValueError(f"hints field 'pin_s' is {self.pin_s}; expected 0 (none) to {MAX_PIN_S:.0f} seconds")
        if not -1 <= self.output_tokens < 1 << 32:
            raise ValueError(f"hints field 'output_tokens' is {self.output_tokens}; expected -1 (not known) or a count")

    def ended(self, stop_reason: str, output_tokens: int = -1) -> Hints:
        """Returns these hints with the stop reason of the request and the number of its output tokens (-1:
        unchanged)."""
        output = self.output_tokens if output_tokens < 0 else output_tokens
        return msgspec.structs.replace(self, stop_reason=stop_reason, output_tokens=output)

    def without_pin(self) -> Hints:
        """Returns these hints as a segment keeps them, and as other nodes hear of them."""
        return msgspec.structs.replace(self, pin_s=0.0) if self.pin_s else self

    def merged_over(self, previous: Hints) -> Hints:
        """Returns the hints that a segment has after it receives these hints; `previous`: its hints before. The result
        has the outlook (whether the conversation goes on) and the stop reason of these hints. It has the category,
        account, access record and time of a pin of `previous` where these hints have none, its priority and time to
        live if both are 0 in these hints, and its number of output tokens if these hints have neither that number nor
        an access record. If the engine set no field of these hints but the number of output tokens, the account and
        the time of a pin, the outlook and the stop reason of `previous` also stay."""
        if previous is NO_HINTS or previous == self:
            return self
        access, output = (
            (self.access, self.output_tokens) if self.access.segments else (previous.access, previous.output_tokens)
        )
        if self.output_tokens >= 0:
            output = self.output_tokens
        if not (self.outlook or self.category or self.stop_reason or self.priority or self.ttl_s):
            pin_s = self.pin_s or previous.pin_s
            account = self.account or previous.account
            return msgspec.structs.replace(previous, output_tokens=output, access=access, account=account, pin_s=pin_s)
        no_retention = not (self.priority or self.ttl_s)
        return Hints(
            self.outlook,
            self.category or previous.category,
            self.stop_reason,
            previous.priority if no_retention else self.priority,
            previous.ttl_s if no_retention else self.ttl_s,
            output,
            access,
            self.account or previous.account,
            self.pin_s or previous.pin_s,
        )


NO_HINTS = Hints()
RETAIN = Hints(outlook=Outlook.GOES_ON, priority=1)
"""The act `retain` of a router: the segments are wanted again, and are evicted late."""
DEMOTE = Hints(outlook=Outlook.OVER, priority=-1)
"""The act `demote` of a router: the segments are evicted early."""
