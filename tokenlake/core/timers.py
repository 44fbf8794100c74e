"""Deadlines inside the rules. The driver only needs to know the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Timer", "Timers"]


LEAST_DROPPED = 64


class Timer:
    """One deadline. `cancel` is idempotent."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """It will not fire."""
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled()


class Timers:
    """A heap of deadlines; equal deadlines fire in order of arming."""

    def __init__(self, least_dropped: int = LEAST_DROPPED) -> None:
        """`least_dropped`: so many cancelled ones stay in the heap in any case."""
        self._least_dropped = least_dropped
        self._heap: list[tuple[float, int, Timer]] = []
        self._armed = 0
        self._cancelled = 0
        """Of those in the heap."""

    def at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` at the first `fire` at or after `deadline`."""
        timer = Timer(self, callback)
        self._armed += 1
        heapq.heappush(self._heap, (deadline, self._armed, timer))
        return timer

    def next(self) -> float | None:
        """The earliest deadline that was not cancelled."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def cancelled(self) -> None:
        """By a timer. Most deadlines are those of calls, leases and writes that end long before: what is left of them
        is dropped when it is half of the heap."""
        self._cancelled += 1
        if self._cancelled > max(self._least_dropped, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def __len__(self) -> int:
        """Deadlines that were not cancelled."""
        return len(self._heap) - self._cancelled

    @property
    def in_heap(self) -> int:
        """Cancelled ones included."""
        return len(self._heap)

    def fire(self, now: float) -> None:
        """Call what is due. What it arms for `now` or earlier waits for the next `fire`."""
        last = self._armed
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                callback()
