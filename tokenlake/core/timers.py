"""Deadlines inside the rules. The driver only needs to know the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Timer", "Timers"]


class Timer:
    """One deadline. `cancel` is idempotent."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """It will not fire."""
        self.callback = None


class Timers:
    """A heap of deadlines; equal deadlines fire in order of arming."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._armed = 0

    def at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` at the first `fire` at or after `deadline`."""
        timer = Timer(callback)
        self._armed += 1
        heapq.heappush(self._heap, (deadline, self._armed, timer))
        return timer

    def next(self) -> float | None:
        """The earliest deadline that was not cancelled."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        """Deadlines in the heap, cancelled ones included until they would have fired."""
        return len(self._heap)

    def fire(self, now: float) -> None:
        """Call what is due. What it arms for `now` or earlier waits for the next `fire`."""
        last = self._armed
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
