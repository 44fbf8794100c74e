"""Samples of the processes from the kernel and from the daemons' metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["HELD", "Life", "Recorder", "entries", "held", "process_gauges", "total"]

HOLDS: Final = ("leases", "writes", "leases to peers", "transfers", "segments in transfer", "sends", "matches")
"""Maps of a daemon whose entries keep segments pinned."""
MEMORIES: Final = ("explained requests", "segments they missed", "segments that went")
"""Maps that grow to a bound of their own and then stay full; while they grow they are not flat."""
HELD: Final = ("quarantined", "holds")
"""Gauges of a daemon that must return to 0: slots, and entries of `HOLDS`."""


@dataclass
class Life:
    """One process from its start to its end. `samples`: by gauge, (seconds of the run, value)."""

    name: str
    number: int
    pid: int
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class Recorder:
    """The samples of all processes. A process that is started again under the same name begins another life."""

    def __init__(self) -> None:
        self.lives: dict[str, list[Life]] = {}

    def add(self, at_s: float, name: str, pid: int, values: Mapping[str, float]) -> None:
        """Add a sample; a new `pid` begins a life."""
        lives = self.lives.setdefault(name, [])
        if not lives or lives[-1].pid != pid:
            lives.append(Life(name, len(lives), pid))
        for gauge, value in values.items():
            lives[-1].samples.setdefault(gauge, []).append((at_s, value))

    def peak(self, gauge: str) -> float:
        """The largest value over all lives."""
        samples = (life.samples.get(gauge, []) for lives in self.lives.values() for life in lives)
        return max((value for values in samples for _, value in values), default=0.0)


def process_gauges(pid: int) -> dict[str, float]:
    """Resident bytes without shared memory (the arena), open descriptors, threads. OSError when the process is gone."""
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
    """The values of `HELD` from a daemon's metrics."""
    return {
        "quarantined": total(metrics, "tokenlake_quarantined_slots"),
        "holds": sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in HOLDS),
    }


def entries(metrics: Mapping[str, float]) -> float:
    """Entries of all maps of a daemon except `MEMORIES`."""
    remembered = sum(metrics[f'tokenlake_map_entries{{map="{name}"}}'] for name in MEMORIES)
    return total(metrics, "tokenlake_map_entries") - remembered


def total(metrics: Mapping[str, float], name: str) -> float:
    """A metric summed over its labels."""
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name)
