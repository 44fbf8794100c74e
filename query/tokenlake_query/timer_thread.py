"""The thread that calls functions at given times: deadlines of queries, and the regular report to the daemon."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["TimedCall", "TimerThread"]

log = logging.getLogger(__name__)

LEAST_CANCELLED = 64
"""Cancelled calls are not removed from the heap while there are so few."""


class TimedCall:
    """A call that `TimerThread.at` scheduled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call
        """None once the call was cancelled or made."""


class TimerThread:
    """The thread that calls functions at given times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, TimedCall]] = []
        """A heap of the calls, by time. Cancelled calls stay in it until they are more than the others."""
        self._cancelled = 0
        self._order = itertools.count()

    def __len__(self) -> int:
        """The number of calls that are kept, including some of the cancelled ones."""
        return len(self._due)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def at(self, when: float, call: Callable[[], None]) -> TimedCall:
        """Call the function `call` in the timer thread at the time `when` (monotonic seconds), unless the returned
        object is passed to `cancel` before. Thread-safe."""
        timed = TimedCall(call)
        with self._changed:
            sooner = not self._due or when < self._due[0][0]
            heapq.heappush(self._due, (when, next(self._order), timed))
            if sooner:
                self._changed.notify()
        return timed

    def cancel(self, timed: TimedCall) -> None:
        """Forget a call; nothing if it was made or cancelled before. Thread-safe."""
        with self._changed:
            if timed.call is None:
                return
            timed.call = None
            self._cancelled += 1
            if 2 * self._cancelled > len(self._due) + LEAST_CANCELLED:
                self._due = [entry for entry in self._due if entry[2].call is not None]
                heapq.heapify(self._due)
                self._cancelled = 0

    def _run(self) -> None:
        while True:
            call = self._next()
            try:
                call()
            except Exception:
                # A failing call must not end this thread, which serves the deadlines of other queries too.
                log.exception("a timed call failed")
            # While the thread waits for the next call, a reference to this one would keep the query's segments leased.
            del call

    def _next(self) -> Callable[[], None]:
        """Wait until a call is due, and remove it."""
        with self._changed:
            while True:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, timed = heapq.heappop(self._due)
                call, timed.call = timed.call, None
                if call is not None:
                    return call
                self._cancelled -= 1
