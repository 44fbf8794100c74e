"""Samples of the soak's processes, from the kernel and from the daemons' metrics, and whether a gauge grows.

The later half of a process's life is compared with the earlier half, after a warm-up. Medians are compared, because a
gauge jumps when another process is killed, when the metrics page is read, or when an allocator returns memory: that
moves few samples, while a leak moves all later ones. A difference below the tolerance cannot be distinguished from
noise; the corresponding leak per hour is reported beside the verdict, and shrinks with the length of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import msgspec

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


class Tolerance(NamedTuple):
    """The largest growth of a gauge that counts as noise: `absolute` plus `share` of the earlier median."""

    absolute: float
    share: float = 0.0


MEMORY: Final = Tolerance(2 * (1 << 20), 0.02)
"""The allocator keeps freed memory for each thread. Without a leak the median therefore moves by about 1 MiB after a
read of the metrics page or several restarts of other processes."""
DAEMON: Final = {
    "memory": MEMORY,
    "descriptors": Tolerance(16),
    "threads": Tolerance(8),
    "entries": Tolerance(100, 0.1),
}
"""Gauges of a daemon: resident memory beside the arena, open descriptors, threads, entries of its maps. A daemon keeps
up to four bulk connections open per peer and direction, the incoming ones with a thread each, from the time when the
load first needs so many. The entries of its maps include the directory, which has one per segment in the memory."""
ENGINE: Final = {"memory": MEMORY, "descriptors": Tolerance(16), "threads": Tolerance(2)}
"""Gauges of an engine, which opens each of the eight regions at its first read and at its first write there, and again
after each restart of its daemon."""


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one gauge of one process: medians of the earlier and the later half after warm-up, the allowed
    difference, and the smallest growth per hour that the comparison detects."""

    process: str
    gauge: str
    earlier: float
    later: float
    allowed: float
    least_per_hour: float

    @property
    def flat(self) -> bool:
        """Whether the later median exceeds the earlier one by at most `allowed`."""
        return self.later - self.earlier <= self.allowed


def compared(process: str, gauge: str, samples: Sequence[tuple[float, float]], tolerance: Tolerance) -> Gauge | None:
    """Compare the two halves of samples of one gauge, (seconds, value) in order of time. None with too few samples."""
    first, last = (samples[0][0], samples[-1][0]) if samples else (0.0, 0.0)
    warm = first + WARM_SHARE * (last - first)
    middle = (warm + last) / 2
    earlier = [value for at, value in samples if warm < at <= middle]
    later = [value for at, value in samples if at > middle]
    if min(len(earlier), len(later)) < FEWEST:
        return None
    allowed = tolerance.absolute + tolerance.share * median(earlier)
    return Gauge(
        process=process,
        gauge=gauge,
        earlier=median(earlier),
        later=median(later),
        allowed=allowed,
        least_per_hour=3600 * allowed / (middle - warm),
    )


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


def held(metrics: Mapping[str, float]) -> float:
    """Quarantined slots and entries of the maps `HOLDS` of a daemon, which must return to 0 after the load."""
    maps = sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in HOLDS)
    return maps + total(metrics, "tokenlake_quarantined_slots")


def entries(metrics: Mapping[str, float]) -> float:
    """Number of entries of all maps of a daemon except those in `MEMORIES`, from its metrics."""
    remembered = sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in MEMORIES)
    return total(metrics, "tokenlake_map_entries") - remembered


def total(metrics: Mapping[str, float], name: str) -> float:
    """Value of a metric, summed over its labels."""
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name)
