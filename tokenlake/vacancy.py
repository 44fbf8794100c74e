"""How much room a node has for further segments, compared between nodes."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MAX_RETENTION_VALUE", "UNKNOWN_VACANCY", "Vacancy"]

MAX_RETENTION_VALUE = 1e9
"""The victim's value where nothing can be evicted."""
FULL = 0.1
"""Free share below which a node counts as full: the memory of a request that ends is free for a moment."""
FREE_NOISE, FREE_CLEAR = 0.005, 0.05
"""Difference of free shares: below the first it is noise, beyond the second one node is clearly emptier."""
RATIO_NOISE = math.log(1.02)
VALUE_CLEAR, AGE_CLEAR = math.log(8.0), math.log(1.3)
"""The same for the retention values of the victims, and for their ages, as logarithms of ratios. Learned statistics
make one victim several times as valuable as another although neither node is fuller."""
_MIN_RETENTION_VALUE = 1e-12


class Vacancy(NamedTuple):
    """How much room a node has for a new segment."""

    free_share: float
    """Free slots / all slots, 0 to 1."""
    victim_age_s: float
    """Seconds since the last access of the segment that would be evicted next."""
    victim_value: float
    """Retention value of that segment; all nodes have the same eviction policy."""

    @property
    def full(self) -> bool:
        """Does a new segment evict another one, now or soon?"""
        return self.free_share < FULL

    def lead(self, other: Vacancy) -> float:
        """How much emptier this node is than the other, from the first of these that differs: the free share, the value
        of the next victim, its age. Above 1: clearly emptier; 0: equal; below 0: fuller."""
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
