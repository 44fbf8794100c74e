"""One thread that calls back at a time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timer"]

log = logging.getLogger(__name__)


class Timer:
    """`at` from any thread. What is no longer needed is called all the same, and must know."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call once it is `when` (monotonic time)."""
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
                # The other deadlines are others'.
                log.exception("a deadline could not be dealt with")
            # Nothing is kept while it waits.
            del call
