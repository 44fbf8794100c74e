"""Who keeps the control loop: every callback of the loop is timed, those that take over a millisecond are told.

Processor time of the thread, so that a busy machine accuses nobody. It is read at the begin of each callback, and
at its end only where more than a millisecond went by: 1 us per callback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.metrics import Counters, Metric
from tokenlake_server.driver import Handle

__all__ = ["LIMIT_S", "Watchdog", "new_event_loop"]

log = logging.getLogger(__name__)

LONG = Metric("tokenlake_long_callbacks_total", "Callbacks that took over 1 ms of processor time on the control loop")

LIMIT_S = 0.001
LOG_S = 60.0
"""Between two lines of the log."""
COLLECTION = "garbage collection"
STARTED = "start"
"""Of the callback in which the daemon is made: nobody waits for it yet."""


class Watchdog:
    """Of one loop; lives on it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counters = Counters()
        self._event: Event | str | None = None
        """What the callback that runs now handled last."""
        self._counts: dict[str, int] = {}
        self._longest: dict[str, float] = {}
        self._told_at = -LOG_S
        self._untold = 0

    def use(self, counters: Counters) -> None:
        """From now on count there: the daemon is made, and about to serve."""
        self._counters = counters
        self._event = STARTED

    def watch(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """The same callback, timed."""

        def timed(*args: Any) -> Any:
            self._event = None
            began, processor = time.perf_counter(), time.thread_time()
            try:
                return callback(*args)
            finally:
                if time.perf_counter() - began > LIMIT_S:
                    self._took(callback, time.thread_time() - processor)

        # The loops' own methods call each other.
        return callback if getattr(callback, "__code__", None) is timed.__code__ else timed

    def noting(self, handle: Handle) -> Handle:
        """The same rules; what takes long is then called after the event it handled."""

        def noted(event: Event, now: float) -> Any:
            self._event = event
            return handle(event, now)

        return noted

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`: a collection of everything is nobody's fault whose callback it interrupts."""
        if phase == "stop" and info["generation"] == 2 and threading.current_thread() is threading.main_thread():
            self._event = COLLECTION

    def _took(self, callback: Callable[..., Any], seconds: float) -> None:
        if seconds <= LIMIT_S or self._event is STARTED:
            return
        kind = _kind(self._event, callback)
        self._counters.add(LONG)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        self._untold += 1
        now = self._clock()
        if now - self._told_at >= LOG_S:
            log.warning(
                "%s took %.1f ms on the control loop; %d callbacks took over 1 ms since the last such line",
                kind,
                seconds * 1e3,
                self._untold,
            )
            self._told_at, self._untold = now, 0

    def gauges(self) -> list[tuple[str, str, dict[str, str], float]]:
        """(name, help, labels, value) for the metrics page."""
        counted = "Callbacks that took over 1 ms of processor time on the control loop, by what they did"
        longest = "Processor time of the longest callback on the control loop that took over 1 ms, by what it did"
        return [
            *(("tokenlake_long_callbacks_by_kind", counted, {"kind": kind}, n) for kind, n in self._counts.items()),
            *(("tokenlake_longest_callback_seconds", longest, {"kind": kind}, s) for kind, s in self._longest.items()),
        ]


def _kind(event: Event | str | None, callback: Callable[..., Any]) -> str:
    """A name from the code, so that there are only so many."""
    if isinstance(event, str):
        return event
    if isinstance(event, events.Requested | events.PeerSent):
        return type(event.message).__name__
    if event is not None:
        return type(event).__name__
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", "Task"))
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, else asyncio's own; `watchdog` of it times every callback."""
    base: Any = asyncio.SelectorEventLoop
    try:
        import uvloop
    except ImportError:
        pass
    else:
        base = uvloop.Loop

    class WatchedLoop(base):  # type: ignore[misc]
        """Hands every callback to its watchdog."""

        def __init__(self) -> None:
            super().__init__()
            self.watchdog = Watchdog()

        def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
            return super().call_soon(self.watchdog.watch(callback), *args, context=context)

        def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
            return super().call_soon_threadsafe(self.watchdog.watch(callback), *args, context=context)

        def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
            return super().call_later(delay, self.watchdog.watch(callback), *args, context=context)

        def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
            return super().call_at(when, self.watchdog.watch(callback), *args, context=context)

        def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
            return super().add_reader(fd, self.watchdog.watch(callback), *args)

        def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
            return super().add_writer(fd, self.watchdog.watch(callback), *args)

    loop: asyncio.AbstractEventLoop = WatchedLoop()
    return loop
