"""Simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Clock"]


class Clock:
    """What happens when; things due at the same time happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        """Things that were to happen so far."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """Call `callback(argument)` at `time`, or next when that is past."""
        self.asked += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self.asked, callback, argument))

    def after(self, delay_s: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """Call `callback(argument)` in `delay_s` from now."""
        self.asked += 1
        heapq.heappush(self._heap, (self.now + delay_s, self.asked, callback, argument))

    def run_until(self, time: float) -> None:
        """Let everything happen that is due by then."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time:
            self.now, _, callback, argument = pop(heap)
            callback(argument)
        self.now = max(self.now, time)
