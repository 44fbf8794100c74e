"""What a policy of eviction is: it orders segments; the store decides when one goes, and passes over pinned ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.segment import Segment

__all__ = ["SAME_ACCESS_S", "EvictionPolicy", "recency", "refuse"]

SAME_ACCESS_S = 1.0
"""Touches of a segment within this time are one use: a lease that is released in parts touches twice."""


class EvictionPolicy(Protocol):
    """Order of the READY segments of one slot size, kind and tenant.

    Deterministic: the same calls at the same times lead to the same answers. `now` never decreases. A use of a
    segment is its first `insert`, and each `touch`; the caller touches a prompt's deepest segment first.
    """

    def insert(self, segment: Segment, now: float) -> None:
        """`segment` became evictable in principle. The first time this is its first use; again, after it was
        removed without being evicted (a pin, another kind for a while), it is none."""

    def touch(self, segment: Segment, now: float) -> None:
        """`segment`, which is in order, was used. Touches within `SAME_ACCESS_S` are one use."""

    def hinted(self, segment: Segment, now: float) -> None:
        """`segment.hints` of `segment`, which is in order, changed; no use."""

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """`segment` left. `evicted`: for good, for want of memory; else it may be inserted again."""

    def coldest(self, now: float) -> Segment:
        """The next victim, which stays. KeyError when empty."""

    def retention_value(self, segment: Segment, now: float) -> float:
        """Of keeping `segment`, which is in order: what is worth more stays longer. At least 0. Comparable between
        the nodes of a cluster, which all run the same policy."""

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Of a segment that would be stored now, with what is remembered of evicted ones."""

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Memory is full and `key` would be stored: is it worth more than what would go? Asked once for each try;
        a refusal is remembered like a use, so that what is wanted again comes in. Always, when the order is empty."""

    def remembers(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Of the last of these that was evicted or refused and is not forgotten: its index, how it was used last, and
        how long ago. None where there is none, or nothing is ever remembered."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Segment]:
        """Coldest first, approximately."""

    def save(self) -> bytes:
        """What was learned, for `restore` in a later life; of segments nothing. Empty when nothing is learned."""

    def absorb(self, learned: bytes) -> None:
        """What another node's policy of the same name saved just now: from here on what was learned lies between
        both. Raises `ValueError` when it cannot be used, and nothing was changed."""

    def restore(self, learned: bytes) -> None:
        """Begin with what an earlier life of the same policy saved; before the first `insert`. Nothing is nothing.
        Raises `ValueError` when it cannot be used, and nothing was changed."""


def recency(segment: Segment, now: float) -> float:
    """Worth of a segment to policies that weigh nothing else: falls with the time since it was used."""
    return 1.0 / (1.0 + max(0.0, now - segment.touched))


def refuse(learned: bytes) -> None:
    """`restore` of a policy that learns nothing."""
    if learned:
        raise ValueError("this policy learns nothing, so these are the statistics of another")
