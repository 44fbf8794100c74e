"""Simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A simulated clock: a queue of callbacks by time, in seconds from 0. Callbacks due at the same time run in the
    order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scheduled = 0
        """Number of callbacks scheduled so far, including those that have run."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, time: float, callback: Callable[..., None], *arguments: object) -> None:
        """Schedule `callback(*arguments)` for `time`; a time in the past means now."""
        self.scheduled += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self.scheduled, callback, arguments))

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Schedule `callback(*arguments)` for `delay_s` from now; `delay_s` is at least 0."""
        self.scheduled += 1
        heapq.heappush(self._heap, (self.now + delay_s, self.scheduled, callback, arguments))

    def run_until(self, time: float) -> None:
        """Advance the clock to `time` and run every callback due until then, including those that callbacks schedule
        meanwhile."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time:
            self.now, _, callback, arguments = pop(heap)
            callback(*arguments)
        self.now = max(self.now, time)

    def run_for(self, seconds: float) -> None:
        """Advance the clock by `seconds` and run every callback due until then."""
        self.run_until(self.now + seconds)
