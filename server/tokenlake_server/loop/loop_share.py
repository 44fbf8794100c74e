"""The part of the control loop's time that the connections of one tenant, or all calls of the control plane, share.

Every connection could otherwise take a slice in each pass of the loop, and a tenant with many connections would get
more of the loop than one with few.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class LoopShare:
    """Time that its users have together in one pass of the loop: about `seconds`. Slices beyond it are taken in later
    passes, by turns of the keys under which they were asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._used = 0.0
        """Seconds that slices took since `_next_pass` was last called. It is called after a pass that used up the share
        only, so that slices of several short passes add up and may cause a call without need."""
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By key; the turn of the first key is next."""
        self._scheduled = False

    @property
    def used_up(self) -> bool:
        """True while a slice must wait for a later pass: take it by `later`."""
        return self._used >= self._seconds or bool(self._waiting)

    def spent(self, seconds: float) -> None:
        """Count the time of a slice."""
        self._used += seconds
        if self._used >= self._seconds:
            self._schedule()

    def later(self, call: Callable[[], None], of: str = "") -> None:
        """Call the function `call`, which takes a slice, in a later pass of the loop. `of`: the key that has turns of
        its own."""
        self._waiting.setdefault(of, deque()).append(call)
        self._schedule()

    def run(self, call: Callable[[], None], of: str) -> None:
        """Call the function `call`, and count its time: now if the share is not used up, else in a later pass. On the
        loop."""

        def timed() -> None:
            began = time.perf_counter()
            try:
                call()
            finally:
                self.spent(time.perf_counter() - began)

        if self.used_up:
            self.later(timed, of)
        else:
            timed()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._scheduled = False
        self._used = 0.0
        while self._waiting and self._used < self._seconds:
            of = next(iter(self._waiting))
            waiting = self._waiting.pop(of)
            call = waiting.popleft()
            if waiting:
                self._waiting[of] = waiting
            call()
        if self._waiting:
            self._schedule()
