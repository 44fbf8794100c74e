"""Samples of the soak's processes, from the kernel and from the daemons' metrics, and whether a gauge grows.

The later half of a process's life is compared with the earlier half, after a warm-up. Medians are compared, because a
gauge jumps when another process is killed, when the metrics page is read, or when an allocator returns memory: that
moves few samples, while a leak moves all later ones. A difference below the tolerance cannot be distinguished from
noise; the corresponding leak per hour is reported beside the verdict, and shrinks with the length of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

WARM_SHARE: Final = 1 / 3
"""Share of a process's life that is left out as warm-up, in which memory fills, and thread pools and the allocator
reach their size."""
FEWEST: Final = 5
"""Minimum number of samples of a gauge in each half of a process's life."""
HOLDS: Final = ("leases", "writes", "leases to peers", "transfers", "segments in transfer", "sends", "matches")
"""Metrics of those maps of a daemon whose entries keep segments pinned."""
MEMORIES: Final = ("explained requests", "segments they missed", "segments that went")
"""Metrics of those maps of a daemon that grow to a bound of their own and then stay full; the soak does not check that
they stay flat."""
HELD: Final = ("quarantined", "holds")
"""Gauges of a daemon that must return to 0 after the load: slots, and entries of the maps in `HOLDS`."""


@dataclass
class Life:
    """One process from its start to its end. `samples`: by gauge, pairs of (seconds since the start of the run,
    value)."""

    name: str
    number: int
    pid: int
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class Recorder:
    """The samples of all processes. A process that is started again under the same name counts as a new one, with
    another `Life`."""

    def __init__(self) -> None:
        self.lives: dict[str, list[Life]] = {}

    def add(self, at_s: float, name: str, pid: int, values: Mapping[str, float]) -> None:
        """Add a sample of a process's gauges; a `pid` that differs from the last one begins a new `Life`."""
        lives = self.lives.setdefault(name, [])
        if not lives or lives[-1].pid != pid:
            lives.append(Life(name, len(lives), pid))
        for gauge, value in values.items():
            lives[-1].samples.setdefault(gauge, []).append((at_s, value))


def process_gauges(pid: int) -> dict[str, float]:
    """Sample of a process from the kernel: resident bytes without shared memory (the arena), open descriptors, threads.
    Raises OSError when the process has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    resident, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
    return {
        "memory": float(resident - shared),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(fields["Threads"]),
    }


def held(metrics: Mapping[str, float]) -> dict[str, float]:
    """The values of the gauges `HELD` in a daemon's metrics."""
    return {
        "quarantined": total(metrics, "tokenlake_quarantined_slots"),
        "holds": sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in HOLDS),
    }


def entries(metrics: Mapping[str, float]) -> float:
    """Number of entries of all maps of a daemon except those in `MEMORIES`, from its metrics."""
    remembered = sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in MEMORIES)
    return total(metrics, "tokenlake_map_entries") - remembered


def total(metrics: Mapping[str, float], name: str) -> float:
    """Value of a metric, summed over its labels."""
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name)


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
