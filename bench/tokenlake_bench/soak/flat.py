"""Whether a gauge grows: compares the later half of a process's life with the earlier half, after a warm-up.

Medians are compared, because a gauge jumps when another process is killed, when the metrics page is read, or when an
allocator returns memory: that moves few samples, while a leak moves all later ones. A difference below the tolerance
cannot be distinguished from noise; the corresponding leak per hour is reported beside the verdict, and shrinks with the
length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

WARM_SHARE: Final = 1 / 3
"""Share of a process's life that is left out as warm-up, in which memory fills, and thread pools and the allocator
reach their size."""
FEWEST: Final = 5
"""Minimum number of samples of a gauge in each half of a process's life."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest growth of a gauge that counts as noise: `absolute` plus `share` of the earlier median."""

    absolute: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Flatness:
    """The comparison of the two halves of a process's life. `earlier`, `later`: medians of the gauge; `allowed`:
    largest difference that counts as noise; `least_rate`: smallest growth per second that the comparison detects."""

    earlier: float
    later: float
    allowed: float
    least_rate: float

    @property
    def flat(self) -> bool:
        """Whether the later median exceeds the earlier one by at most `allowed`."""
        return self.later - self.earlier <= self.allowed


def flatness(samples: Sequence[tuple[float, float]], tolerance: Tolerance) -> Flatness | None:
    """Compare the two halves of samples of one gauge, (seconds, value) in order of time. None with too few samples."""
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
