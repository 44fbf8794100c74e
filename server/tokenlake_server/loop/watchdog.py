"""Times every callback of the control loop, counts the long ones by kind, and logs the ones that delay requests.

While a callback runs, all engines and peers of the node wait. The watchdog measures processor time of the thread, so
that a busy machine causes no count. It reads that time at the start of each callback, and at its end only where more
than `LIMIT_S` of real time passed, which costs 1 us per callback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.metrics import Counters, Level, Metric
from tokenlake_server.loop.driver import Handle

log = logging.getLogger(__name__)

LONG = Metric("tokenlake_long_callbacks_total", "Callbacks that took over 1 ms of processor time on the control loop")
BY_KIND = Metric(
    "tokenlake_long_callbacks_by_kind",
    "Callbacks that took over 1 ms of processor time on the control loop, by kind of event",
    "kind",
    kind="gauge",
)
LONG_SECONDS = Metric(
    "tokenlake_long_callback_seconds",
    "Processor time of the callbacks that took over 1 ms on the control loop, by kind of event",
    "kind",
    kind="gauge",
)
LONGEST = Metric(
    "tokenlake_longest_callback_seconds",
    "Processor time of the longest callback on the control loop that took over 1 ms, by kind of event",
    "kind",
    kind="gauge",
)

LIMIT_S = 0.001
"""Seconds: a callback of the control loop that takes longer is counted."""
WARN_S = 0.02
"""Seconds: a callback of the control loop that takes longer is logged, because matches of other nodes miss their
default deadline (`match_deadline_ms`)."""
LOG_S = 60.0
"""Least seconds between two lines of the log about long callbacks."""
COLLECTION = "garbage collection"
STARTED = "start"
"""The kind of the callback that makes the daemon. It is not counted, because no client waits for it."""


class Watchdog:
    """Measures the time of the callbacks of one event loop. Used in the thread of that loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counters = Counters()
        self._event: Event | str | None = None
        """The event that the current callback of the loop handled last, else `STARTED` or `COLLECTION`, else None."""
        self._stopped = False
        self._counts: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._logged_at = -LOG_S
        self._unlogged = 0
        """Number of callbacks over `WARN_S` since the last line of the log about them."""

    def use(self, counters: Counters) -> None:
        """Count long callbacks in `counters` from now on. Called in the callback that makes the daemon, which itself is
        not counted."""
        self._counters = counters
        self._event = STARTED

    def stop(self) -> None:
        """Count and log no more callbacks from now on. To be called when the daemon stops, because no client waits any
        more."""
        self._stopped = True

    def watch(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callback that calls this one and measures its time."""

        def timed(*args: Any) -> Any:
            self._event = None
            began, processor = time.perf_counter(), time.thread_time()
            try:
                return callback(*args)
            finally:
                if time.perf_counter() - began > LIMIT_S:
                    self._took(callback, time.thread_time() - processor)

        # A loop's `call_later` may call its `call_at`, and both wrap: a callback that is timed already is returned as
        # it is.
        return callback if getattr(callback, "__code__", None) is timed.__code__ else timed

    def noting(self, handle: Handle) -> Handle:
        """Return `handle`, wrapped so that the watchdog knows the event that the current callback handles: the event
        gives the callback its kind."""

        def noted(event: Event, now: float) -> Any:
            if self._event is not STARTED:
                self._event = event
            return handle(event, now)

        return noted

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Record a garbage collection: a callback that a full collection interrupts is counted under the kind
        `COLLECTION`. To be appended to `gc.callbacks`."""
        if phase == "stop" and info["generation"] == 2 and threading.current_thread() is threading.main_thread():
            self._event = COLLECTION

    def _took(self, callback: Callable[..., Any], seconds: float) -> None:
        if seconds <= LIMIT_S or self._event is STARTED or self._stopped:
            return
        kind = _kind(self._event, callback)
        self._counters.add(LONG)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        if seconds <= WARN_S:
            return
        self._unlogged += 1
        now = self._clock()
        if now - self._logged_at >= LOG_S:
            log.warning(
                "the control loop was busy for %.0f ms (%s): every engine and peer of this node waited that long; "
                "pauses over %.0f ms since the last such line: %d",
                seconds * 1e3,
                kind,
                WARN_S * 1e3,
                self._unlogged,
            )
            self._logged_at, self._unlogged = now, 0

    def gauges(self) -> list[Level]:
        """The number, the time and the longest time of long callbacks by kind, for the metrics page."""
        measured: tuple[tuple[Metric, Mapping[str, float]], ...] = (
            (BY_KIND, self._counts),
            (LONG_SECONDS, self._seconds),
            (LONGEST, self._longest),
        )
        return [Level(metric, (kind,), value) for metric, values in measured for kind, value in values.items()]


def _kind(event: Event | str | None, callback: Callable[..., Any]) -> str:
    """The kind of a callback: the name of its event or, without an event, of a function or type. All of these are names
    in the source code, so the number of kinds is bounded."""
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
    """uvloop's event loop where it is installed, else asyncio's. Its attribute `watchdog` times every callback."""
    base: Any = asyncio.SelectorEventLoop
    try:
        import uvloop
    except ImportError:
        pass
    else:
        base = uvloop.Loop

    class WatchedLoop(base):  # type: ignore[misc]
        """An event loop that passes every callback to its watchdog."""

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
