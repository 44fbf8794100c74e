"""Samples of the soak's processes, from the kernel and from the daemons' metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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

    def peak(self, gauge: str) -> float:
        """The largest value of a gauge over all processes that had the name."""
        samples = (life.samples.get(gauge, []) for lives in self.lives.values() for life in lives)
        return max((value for values in samples for _, value in values), default=0.0)


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
