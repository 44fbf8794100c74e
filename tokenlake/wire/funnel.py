"""The reply to `tokenlake explain`: how many tokens of one request the pool had, and why the others were missed.

::

    ideal             all tokens of the prompt
      engine had        tokens that the engine's own cache had
      here, elsewhere   tokens that the match found, on this node and on others
        fetched           tokens that came here from other nodes
        supplied          tokens that the engine read here, or computed attention over in place
    missed            all others, with the reason
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from tokenlake.wire.fields import Index, Seconds

MAX_EXPLAINED_NAMES = 64
"""Maximum number of names of requests in one `engine.Explained`."""


class MissReason(StrEnum):
    """The reason why tokens of a request were not found in the pool or not used."""

    NEVER_STORED = "never_stored"
    """The directory nodes know nothing of the tokens' segments, which were never stored, or left the pool long ago."""
    EVICTED = "evicted"
    """The tokens' segments were evicted, or their store was refused; the detail names the rule."""
    OTHER_LAYOUT = "other_layout"
    """This node has segments of another layout only; keys never match across layouts."""
    TOO_SHORT = "too_short"
    """The last tokens of the prompt do not fill a segment."""
    PENDING = "pending"
    """Another engine was still computing the tokens, or writing their segments, when the match ended or they were
    fetched."""
    TOO_SLOW = "too_slow"
    """A node did not answer, or did not send, within the deadline."""
    UNREACHABLE = "unreachable"
    """A node was not connected: it was down, or it and this node had refused each other."""
    UNKNOWN = "unknown"
    """The directory node of the segments cannot be reached, or its directory is incomplete after a restart."""
    BEHIND_A_GAP = "behind_a_gap"
    """The tokens' segments are in the pool, but an earlier segment of the prompt is not."""
    LIMIT = "limit"
    """A bound of the session was reached, or no slot was free to fetch the segments into; the detail has the code."""
    LOST = "lost"
    """The segments were found by the match, but gone or damaged when they were fetched."""
    SKIPPED = "skipped"
    """The segments were found by the match, but the engine released them unread: computing was cheaper, or the request
    ended. Or the engine did not ask for them."""
    UNREPORTED = "unreported"
    """The segments were found by the match, but the engine ended before it said whether it had read them."""


class _Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Missed(_Struct, frozen=True):
    """Tokens that were missed for one reason."""

    reason: str
    tokens: Index
    detail: str = ""


class Funnel(_Struct, frozen=True):
    """How one request used the pool, in tokens. `ideal` = `engine_had` + `supplied` + `held` + the sum of
    `missed`."""

    request: str
    node: str
    age_s: Seconds
    """Seconds since the match of the request."""
    segment_tokens: Index
    ideal: Index
    here: Index
    elsewhere: tuple[tuple[str, Index], ...]
    """Tokens that the match found at other nodes, or on the disk of this one: (place, number of tokens) each. A place
    names the disk where segments are read from one."""
    fetched: Index
    supplied: Index
    held: Index
    """Tokens of segments that are leased and neither read nor released yet."""
    missed: tuple[Missed, ...]
    engine_had: Index = 0
    leaves_at: Index | None = None
    """The first token of the first segment that no node knows, now or from before, where the directory nodes have
    answered; None: there is none. The prompt leaves what is known within that segment."""
    recent: Index = 0
    alone: Index = 0
    """`recent`: named requests of the tenant that the node remembers, this one included. `alone`: those of them whose
    first segment no other one has."""

    def plain(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        missed = [msgspec.structs.asdict(each) for each in self.missed]
        return {**msgspec.structs.asdict(self), "elsewhere": dict(self.elsewhere), "missed": missed}
