"""The part of the machine's processors that other programs use while a benchmark runs: durations depend on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE = (3, 4, 8, 9)
"""Columns of `cpu` in /proc/stat that are no work of their own: idle, iowait, and guests, which `user` includes."""
PARENT, TIMES = 1, slice(11, 15)
"""Fields of /proc/PID/stat behind the name: the parent, and user and system time, own and of reaped children."""


class OtherPrograms:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s(os.getpid())

    def share(self) -> float:
        """Processor time that others than this process and its descendants used since the start / all processors' time,
        0 to 1."""
        passed_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_own_s(os.getpid()) - self._own_s)
        return min(1.0, max(0.0, others_s / max(passed_s, 1 / TICKS_PER_S)))


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    return sum(int(ticks) for at, ticks in enumerate(fields) if at not in IDLE) / TICKS_PER_S


def _own_s(root: int) -> float:
    """Processor seconds of a process and all its descendants, with those that it has reaped."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            found[int(entry)] = int(fields[PARENT]), sum(map(int, fields[TIMES]))
    own = {root}
    while grown := {pid for pid, (parent, _) in found.items() if parent in own} - own:
        own |= grown
    return sum(found[pid][1] for pid in own if pid in found) / TICKS_PER_S
