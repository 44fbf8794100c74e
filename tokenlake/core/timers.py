"""Deadlines inside the rules. The driver needs to know only the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["KEPT_CANCELLED", "Timer", "Timers"]

KEPT_CANCELLED = 64
"""Cancelled timers that may stay in the heap, however few others there are."""


class Timer:
    """One deadline."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """The callback is not called any more. Idempotent."""
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled()


class Timers:
    """A heap of deadlines; equal deadlines fire in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._set = 0
        """Timers set so far; breaks ties."""
        self._cancelled = 0
        """Cancelled timers in the heap."""

    def at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` at the first `fire` at or after `deadline`."""
        timer = Timer(self, callback)
        self._set += 1
        heapq.heappush(self._heap, (deadline, self._set, timer))
        return timer

    def next(self) -> float | None:
        """The earliest deadline that was not cancelled."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def cancelled(self) -> None:
        """Called by a timer. Most deadlines belong to calls, leases and writes that end long before, so cancelled
        timers are removed when they are more than half of the heap."""
        self._cancelled += 1
        if self._cancelled > max(KEPT_CANCELLED, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def __len__(self) -> int:
        """Deadlines that were not cancelled."""
        return len(self._heap) - self._cancelled

    def fire(self, now: float) -> None:
        """Call every callback that is due. One that a callback sets for `now` or earlier waits for the next `fire`."""
        last = self._set
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                callback()
