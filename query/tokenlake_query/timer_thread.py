"""The thread that calls functions at given times: deadlines of queries, and the regular report to the daemon."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["TimerThread"]

log = logging.getLogger(__name__)


class TimerThread:
    """The thread that calls functions at given times. A scheduled call cannot be cancelled: a function that is no
    longer needed is still called, and must do nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call the function `call` in the timer thread at the time `when` (monotonic seconds). Thread-safe."""
        with self._changed:
            sooner = not self._due or when < self._due[0][0]
            heapq.heappush(self._due, (when, next(self._order), call))
            if sooner:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, call = heapq.heappop(self._due)
            try:
                call()
            except Exception:
                # A failing call must not end this thread, which serves the deadlines of other queries too.
                log.exception("a timed call failed")
            # While the thread waits for the next call, a reference to this one would keep the query's segments leased.
            del call
