"""The contract of a policy of eviction: it orders segments; the store decides when one leaves, and passes over pinned
ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.segment import Segment

__all__ = ["SAME_ACCESS_S", "EvictionPolicy"]

SAME_ACCESS_S = 1.0
"""Touches of a segment within this time are one access: a lease that is released in parts touches twice."""


class EvictionPolicy(ABC):
    """The order in which READY segments of one tenant, slot size and kind leave. By default a policy learns nothing,
    admits every new segment, and values a segment by the time since its last access.

    Deterministic: the same calls at the same times give the same answers. `now` never decreases, but for segments that
    are inserted again. An access of a segment is its first `insert`, and each `touch`; the caller touches the deepest
    segment of a prompt first. A policy writes `touched` and `policy_state` of the segments in its order, and no other
    field.
    """

    @abstractmethod
    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the order. The first insert of a segment is an access; another one, after a `remove` that
        was no eviction (a pin, another kind for a while), is none."""

    @abstractmethod
    def touch(self, segment: Segment, now: float) -> None:
        """`segment`, which is in order, was accessed."""

    @abstractmethod
    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Take `segment` out of the order. `evicted`: it left for want of memory; else it may be inserted again."""

    @abstractmethod
    def victim(self, now: float) -> Segment:
        """The segment to evict next, which stays in order. KeyError when the order is empty."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Segment]:
        """The segments, approximately in the order in which they would leave, as of the last call that passed `now`."""

    def hints_changed(self, segment: Segment, now: float) -> None:  # noqa: B027  most policies ignore hints
        """`segment`, which is in order, has other hints than before; no access."""

    def retention_value(self, segment: Segment, now: float) -> float:
        """Value of keeping `segment`, which is in order: a segment of greater value stays longer. At least 0, and
        comparable between the nodes of a cluster, which all run the same policy."""
        return 1.0 / (1.0 + max(0.0, now - segment.touched))

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Value of keeping a segment that would be stored now, with the help of ghosts."""
        return 1.0

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Whether `key` should be stored though memory is full. Called once for each try: a refusal is recorded like an
        access, so that a segment that is wanted again is admitted. True when the order is empty."""
        return True

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Of the last of `keys` that has a ghost: its index, its last access, and the seconds since then."""
        return None

    def save(self) -> bytes:
        """The statistics of a policy that learns, for `restore`, without anything about single segments."""
        return b""

    def exchange_among(self, nodes: int) -> None:  # noqa: B027  most policies learn nothing
        """So many nodes, this one included, `merge` each other's statistics, and each sees a part of the requests."""

    def merge(self, learned: bytes) -> None:
        """Take over half of the difference to the statistics that an equal policy saved on another node. ValueError
        for data that is no such thing; nothing is changed then."""
        _refuse(learned)

    def restore(self, learned: bytes) -> None:
        """Begin with the statistics that an equal policy saved, before the first `insert`; empty data changes nothing.
        ValueError for data that is no such thing; nothing is changed then."""
        _refuse(learned)


def _refuse(learned: bytes) -> None:
    if learned:
        raise ValueError("this policy learns nothing, so these are the statistics of another policy")
