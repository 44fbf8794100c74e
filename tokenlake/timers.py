"""Timers of the rules. The driver of the rules only needs to know the earliest deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable

KEPT_CANCELLED = 64
"""Number of cancelled timers that may stay in the heap even if it has few other timers."""


class Timer:
    """One deadline, at which a callback is called unless the timer is cancelled."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancel the timer: its callback is not called any more. Further calls have no effect."""
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled()


class Timers:
    """A heap of deadlines; equal deadlines fire in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._set = 0
        """Number of timers set so far; it orders timers of equal deadline."""
        self._cancelled = 0
        """Number of cancelled timers that are still in the heap."""

    def at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        """Set a timer: the first `fire` at or after the time `deadline` (seconds) calls `callback`. Returns the
        timer."""
        timer = Timer(self, callback)
        self._set += 1
        heapq.heappush(self._heap, (deadline, self._set, timer))
        return timer

    def next(self) -> float | None:
        """Returns the earliest deadline of the timers that were not cancelled, in seconds; None without one."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def cancelled(self) -> None:
        """A timer calls this when it is cancelled. Most calls, leases and writes end long before their deadline, so the
        heap fills with cancelled timers; they are removed when they are more than half of it."""
        self._cancelled += 1
        if self._cancelled > max(KEPT_CANCELLED, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def __len__(self) -> int:
        """Number of timers that are set and not cancelled."""
        return len(self._heap) - self._cancelled

    def fire_next(self, now: float) -> None:
        """Call the callback of the earliest timer if its deadline is at most `now`."""
        deadline = self.next()
        if deadline is not None and deadline <= now:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            assert callback is not None
            callback()

    def fire(self, now: float) -> None:
        """Call the callbacks of all timers whose deadline is at most `now`. A timer that such a callback sets waits for
        the next `fire`, even if it is due already."""
        last = self._set
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                callback()
