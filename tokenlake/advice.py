"""What an engine knows of a request that the pool cannot see: whether the conversation goes on, what kind of request it
is, how it ended, and how long its cache is to be kept.

Advice changes the order of eviction and nothing else: it is never a promise, and never a use. The newest word wins;
what a later request does not speak about stays (`Advice.over`).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

__all__ = ["MAX_LABEL", "MAX_TTL_S", "NO_ADVICE", "Advice", "Outlook"]

MAX_LABEL = 32
"""Characters of a category or a stop reason: policies keep statistics by them."""
MAX_TTL_S = 7 * 86400.0
"""Nothing is asked to be kept, or to go, later than this."""


class Outlook(IntEnum):
    """Will the conversation come back?"""

    UNKNOWN = 0
    GOES_ON = 1
    OVER = 2


class Advice(msgspec.Struct, frozen=True, array_like=True, gc=False):
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

    def __post_init__(self) -> None:
        if not Outlook.UNKNOWN <= self.outlook <= Outlook.OVER:
            raise ValueError(f"advice field 'outlook' is {self.outlook}; 0 (unknown), 1 (goes on) or 2 (over)")
        if len(self.category) > MAX_LABEL:
            raise ValueError(f"advice field 'category' has {len(self.category)} characters; at most {MAX_LABEL}")
        if len(self.stop_reason) > MAX_LABEL:
            raise ValueError(f"advice field 'stop_reason' has {len(self.stop_reason)} characters; at most {MAX_LABEL}")
        if not -1 <= self.priority <= 1:
            raise ValueError(f"advice field 'priority' is {self.priority}; -1 (low), 0 or 1 (high)")
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"advice field 'ttl_s' is {self.ttl_s}; 0 (none) to {MAX_TTL_S:.0f} seconds")

    def over(self, former: Advice) -> Advice:
        """This word after `former`: outlook and stop reason are new, an empty category leaves the former, and so does
        a retention (priority and time to live) that says nothing."""
        if former is NO_ADVICE or former == self:
            return self
        silent = not (self.priority or self.ttl_s)
        return Advice(
            self.outlook,
            self.category or former.category,
            self.stop_reason,
            former.priority if silent else self.priority,
            former.ttl_s if silent else self.ttl_s,
        )


NO_ADVICE = Advice()
