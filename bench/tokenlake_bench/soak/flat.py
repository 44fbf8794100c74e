"""Does a gauge grow? The later half of a process's life against the earlier, after it has warmed up.

Medians, because a gauge jumps when another process is killed, when a page of metrics is asked for, when an allocator
gives back: that moves few samples, while a leak moves all that come after it. A difference below the tolerance is not
told from the noise; what that means as a leak per hour is reported beside the verdict, and shrinks with the length of
the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

__all__ = ["FEWEST", "Flatness", "Tolerance", "flatness"]

WARM_SHARE: Final = 1 / 3
"""Of a life: memory fills, pools of threads reach their size, the allocator finds its level."""
FEWEST: Final = 5
"""Samples in each half."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Growth that counts as none: `absolute` plus `share` of the earlier median."""

    absolute: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Flatness:
    """`earlier`, `later`: medians of the halves; `allowed`: most by which the later may exceed the earlier;
    `least_rate`: growth per second that would have been noticed."""

    earlier: float
    later: float
    allowed: float
    least_rate: float

    @property
    def flat(self) -> bool:
        """The later half does not lie above the earlier by more than is allowed."""
        return self.later - self.earlier <= self.allowed


def flatness(samples: Sequence[tuple[float, float]], tolerance: Tolerance) -> Flatness | None:
    """Of (seconds, value), in order of time. None when there are too few."""
    if not samples:
        return None
    first, last = samples[0][0], samples[-1][0]
    warm = first + WARM_SHARE * (last - first)
    middle = (warm + last) / 2
    earlier = [value for at, value in samples if warm < at <= middle]
    later = [value for at, value in samples if at > middle]
    if min(len(earlier), len(later)) < FEWEST:
        return None
    allowed = tolerance.absolute + tolerance.share * median(earlier)
    return Flatness(median(earlier), median(later), allowed, allowed / (middle - warm))
