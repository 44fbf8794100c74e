"""What this process counts; its daemon shows it on the metrics page."""

from __future__ import annotations

import threading

from tokenlake.wire.supervision import Report

__all__ = ["Tally"]


class Tally:
    """From any thread. Names are those of `Report`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(Report.__struct_fields__, 0)

    def add(self, **amounts: int) -> None:
        """To the counts of these names."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def report(self) -> Report:
        """As they are now."""
        with self._lock:
            return Report(**self._counts)
