"""Counters and gauges of this process. The daemon receives them once a second and shows them on its metrics page."""

from __future__ import annotations

import threading

from tokenlake.wire.supervision import Report


class Counters:
    """The counters and gauges of the query engine, named after the fields of the message `Report`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(Report.__struct_fields__, 0)

    def add(self, **amounts: int) -> None:
        """Add an amount to each of the named counters; a negative amount lowers a gauge."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def report(self) -> Report:
        """A copy of all counters and gauges, taken at one moment."""
        with self._lock:
            return Report(**self._counts)
