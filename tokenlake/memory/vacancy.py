"""How much room the memory of a node has for further segments, for comparison between nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from tokenlake.memory.pool import SlotPool
from tokenlake.memory.region_allocator import RegionAllocator
from tokenlake.memory.segment import Segment
from tokenlake.wire.fields import MAX_SECONDS

MAX_RETENTION_VALUE = 1e9
"""Retention value that stands for "no segment can be evicted"."""
FULL = 0.1
"""Share of free memory, 0 to 1, below which a node counts as full. It is above 0, because memory that a finished
request used is free for a moment."""
FREE_NOISE, FREE_CLEAR = 0.005, 0.05
"""Differences between the free shares of two nodes: up to the first it is noise, at the second one node is clearly
emptier."""
RATIO_NOISE = math.log(1.02)
VALUE_CLEAR, AGE_CLEAR = math.log(8.0), math.log(1.3)
"""Ratios, as logarithms, at which one node is clearly emptier: of the retention values of the segments that both nodes
would evict next, and of their ages. The ratio of values is large, because learned statistics can make one such segment
several times as valuable as another although neither node is fuller."""
_MIN_RETENTION_VALUE = 1e-12
MAX_VICTIM_SCAN = 64
"""Maximum number of segments to examine to find the age of the segment that would be evicted next."""


class Vacancy(NamedTuple):
    """How much room a node has for a new segment."""

    free_share: float
    """Share of the node's memory that is free, 0 to 1."""
    victim_age_s: float
    """Seconds since the last access of the segment that would be evicted next."""
    victim_value: float
    """Retention value of the segment that would be evicted next; comparable, because all nodes have the same eviction
    policy."""

    @property
    def full(self) -> bool:
        """True if storing a new segment evicts another one, now or soon."""
        return self.free_share < FULL

    def lead(self, other: Vacancy) -> float:
        """Returns how much emptier this node is than the other, from the first of these that differs by more than
        noise: the free share (greater: emptier), the value of the segment that would be evicted next (less: emptier),
        the seconds since its last access (more: emptier). 0: equal; 1: the least difference that counts as clear; below
        0: fuller."""
        free = self.free_share - other.free_share
        if abs(free) > FREE_NOISE:
            return free / FREE_CLEAR
        value = _log_ratio(other.victim_value, self.victim_value)
        if abs(value) > RATIO_NOISE:
            return value / VALUE_CLEAR
        return _log_ratio(self.victim_age_s, other.victim_age_s) / AGE_CLEAR


def _log_ratio(a: float, b: float) -> float:
    return math.log((a + _MIN_RETENTION_VALUE) / (b + _MIN_RETENTION_VALUE))


UNKNOWN_VACANCY = Vacancy(0.0, 0.0, MAX_RETENTION_VALUE)


def vacancy_of(regions: RegionAllocator, pools: Iterable[SlotPool], now: float) -> Vacancy:
    """Returns the vacancy of a node: the share of its memory that is free and, over the primary copies that its pools
    would evict next, the greatest time since the last access and the least retention value."""
    free, age, retention_value = regions.free, 0.0, MAX_RETENTION_VALUE
    for pool in pools:
        free += len(pool.free) * pool.slot_bytes
        if not len(order := pool.primary):
            continue
        # The vacancy is computed for each answer to another node, so that it must not change the order of eviction:
        # pinned segments are skipped and stay in the order. If the first `MAX_VICTIM_SCAN` segments are all pinned, the
        # pool counts as one without a segment to evict.
        victim: Segment | None = order.victim(now)
        if victim is not None and victim.pins:
            victim = next((segment for segment in islice(order, MAX_VICTIM_SCAN) if not segment.pins), None)
        if victim is not None:
            age = max(age, now - victim.touched)
            retention_value = min(retention_value, order.retention_value(victim, now))
    # Memory beyond the node's own, which the daemon before had, is given back.
    share = max(0, free - regions.excess) / regions.total if regions.total else 0.0
    return Vacancy(share, min(MAX_SECONDS, max(0.0, age)), retention_value)
