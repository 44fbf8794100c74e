"""The thread that calls functions at given times: deadlines of queries, and the regular report to the daemon."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tokenlake.timers import Timer, Timers

log = logging.getLogger(__name__)


class TimerThread:
    """The thread that calls functions at given times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._timers = Timers()
        """Each timer puts its function into `_due`: the functions are called without the lock."""
        self._due: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """The number of functions that are to be called."""
        return len(self._timers)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Call the function `call` in the timer thread at the time `when` (monotonic seconds), unless the returned
        timer is passed to `cancel` before. Thread-safe."""
        with self._changed:
            earliest = self._timers.next()
            timer = self._timers.at(when, lambda: self._due.append(call))
            if earliest is None or when < earliest:
                self._changed.notify()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Do not call the function of `timer`; a call under way goes on. Thread-safe."""
        with self._changed:
            timer.cancel()

    def _run(self) -> None:
        while True:
            self._call_due()

    def _call_due(self) -> None:
        """Wait for functions that are due, and call them. This is a function of its own so that its local variables are
        gone when the thread waits again: a reference to a function keeps the segments of its query leased."""
        with self._changed:
            earliest = self._timers.next()
            self._changed.wait(None if earliest is None else max(0.0, earliest - time.monotonic()))
            self._timers.fire(time.monotonic())
            due, self._due = self._due, []
        for call in due:
            try:
                call()
            except Exception:
                # A failing call must not end this thread, which serves the deadlines of other queries too.
                log.exception("a timed call failed")
