"""The interface of an eviction policy: it orders segments; the store decides when one is evicted, and passes over
pinned ones. A node has `Forecast` for primary and for cached copies and `LeastRecentlyUsed` for those being written;
`bench eviction` and tests put others in the place of `Forecast`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction.odds import Odds
from tokenlake.memory.segment import Segment

SAME_ACCESS_S = 1.0
"""Seconds within which several reports of reads of a segment count as one access: a lease that is released in parts is
reported twice."""


class EvictionPolicy(ABC):
    """The order in which READY segments of one tenant, slot size and kind are evicted. By default a policy learns
    nothing, admits every new segment, and values a segment by the time since its last access.

    Deterministic: the same calls at the same times give the same answers. `now` never decreases, except in an `insert`
    of a segment that was in order before, which may pass the time of its last access. An access of a segment is its
    first `insert`, and each `touch`; the caller touches the deepest segment of a prompt first. A policy writes
    `touched` and `policy_state` of the segments in its order, and no other field.
    """

    odds: Odds | None = None
    """The model of re-use that the policy learns; None for a policy that learns nothing. The store replaces it before
    the first `insert`, and saves and merges it."""

    @abstractmethod
    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the order. The first insert of a segment is an access; another one, after a `remove` that
        was no eviction (a pin, another kind for a while), is none."""

    @abstractmethod
    def touch(self, segment: Segment, now: float) -> None:
        """`segment`, which is in order, was accessed."""

    @abstractmethod
    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Take `segment` out of the order. `evicted`: it was evicted for want of memory; otherwise it may be inserted
        again."""

    @abstractmethod
    def victim(self, now: float) -> Segment:
        """Returns the segment to evict next, which stays in order. Raises KeyError when the order is empty."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Segment]:
        """Yields the segments approximately in the order in which they would be evicted, as of the last call that
        passed `now`."""

    def forget(self, segment: Segment) -> None:  # noqa: B027  most policies keep no state of it
        """Take note that `segment`, which is not in order, enters another order: an access of it there is none here."""

    def resize(self, slots: int) -> None:  # noqa: B027  most policies have no limits
        """Set the number of slots in which segments of this order may be."""

    def follow(self, segment: Segment, child: Segment) -> bool:
        """Let `segment` stay as long as `child`, which continues its prompt: a request that uses the child uses it too.
        Both are in order. This counts as no access. Returns False if its place in the order stays the same."""
        return False

    def hints_changed(self, segment: Segment, now: float) -> None:  # noqa: B027  most policies ignore hints
        """Take note that the hints of `segment`, which this order contains, have changed. This counts as no access."""

    def retention_value(self, segment: Segment, now: float) -> float:
        """Returns the value, at least 0, of keeping `segment`, which this order contains: a segment of greater value
        stays longer. Values of different nodes can be compared, because all nodes have the same policy."""
        return 1.0 / (1.0 + max(0.0, now - segment.touched))

    def rank(self, segment: Segment, now: float) -> tuple[int, float, float]:
        """Returns a rank by which segments in order can be compared: those of a lower rank leave first."""
        return 0, self.retention_value(segment, now), segment.touched

    def expired(self, now: float) -> bool:
        """Returns True if some segment should leave although memory has others of less use, cached copies included,
        because its time to live has passed."""
        return False

    def rule(self, segment: Segment) -> str:
        """Returns the name of the rule by which `segment`, which is in order, would be evicted; empty for the order of
        retention values."""
        return ""

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Returns the value of keeping a segment that would be stored now. A policy that remembers evicted segments
        uses what it knows of this one."""
        return 1.0

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Returns True if the segment `key` should be stored although memory is full. Called once for each try: a
        refusal is recorded like an access, so that a segment that is wanted again is admitted. True when the order is
        empty."""
        return True

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, last access record, seconds since then) of the last of `keys` that the policy remembers as
        evicted or refused; None without one."""
        return None

    def accesses(self, segment: Segment) -> int:
        """Returns the counted accesses of a segment, in order or not, as far as the policy knows; at least 1."""
        return 1

    def recall(self, key: SegmentKey, accesses: int, hints: Hints, now: float) -> None:  # noqa: B027
        """Take note that a segment, which comes back from disk and is not in order, had so many accesses, the last one
        with these hints. Has no effect if the policy remembers the segment, or counts no accesses."""
