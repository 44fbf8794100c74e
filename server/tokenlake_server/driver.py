"""Drives a `NodeCore`: events in, one at a time; instructions out, to whoever carries out their kind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from tokenlake.core import NodeCore
from tokenlake.core.events import Event, Tick
from tokenlake.core.instructions import Instruction
from tokenlake.core.node import HandlerFailed
from tokenlake_server.recording import Recorder

__all__ = ["Driver", "Handle", "Sink"]

log = logging.getLogger(__name__)

Handle = Callable[[Event, float], list[Instruction]]
Sink = Callable[[Any], None]


class Driver:
    """Lives on the control loop. Other threads come in through `post`."""

    def __init__(
        self,
        core: NodeCore,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[Event, Exception], None],
        speed: float = 1.0,
    ) -> None:
        """`on_failure`: the rules refused an event (ValueError: its sender broke the protocol; nothing was changed) or
        failed (HandlerFailed). Called after what came of it was carried out.
        `speed`: seconds of the rules' clock in each second of the loop's."""
        self.core = core
        self._on_failure = on_failure
        self._speed = speed
        self._loop = loop
        self._handle: Handle = core.handle
        self._sinks: dict[type[Instruction], Sink] = {}
        self._queue: deque[Event] = deque()
        self._running = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self._rang = False
        """A Tick comes within two turns of the loop."""
        self._recorder: Recorder | None = None

    @property
    def now(self) -> float:
        """The time of the rules."""
        return self._loop.time() * self._speed

    def carry_out(self, kind: type[Instruction], sink: Sink) -> None:
        """`sink` is called with each instruction of `kind`; it must not block."""
        self._sinks[kind] = sink

    def wrap(self, rules: Callable[[Handle], Handle], sink: Callable[[Sink], Sink]) -> None:
        """Put something around the rules and around every sink there is, before the first event."""
        self._handle = rules(self._handle)
        self._sinks = {kind: sink(inner) for kind, inner in self._sinks.items()}

    def start(self, recorder: Recorder | None) -> None:
        """Begin; `core.start` was called."""
        self._recorder = recorder
        self._rearm()

    def stop(self) -> None:
        """No more timers; the event log is complete."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._end_record(None)

    def post(self, event: Event) -> None:
        """From any thread."""
        # A loop that is closed needs no events any more: threads may return after the daemon stopped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.handle, event)

    def handle(self, event: Event) -> None:
        """On the loop. An event that a sink makes waits until the current one is done."""
        self._queue.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._running = False
        self._rearm()

    def _step(self, event: Event) -> None:
        now = self.now
        failure: Exception | None = None
        instructions: list[Instruction] = []
        try:
            instructions = self._handle(event, now)
        except HandlerFailed as error:
            # What goes with the changes that the rules made before they failed: a Stamp above all.
            instructions, failure = error.instructions, error
        except Exception as error:
            # One sender's broken message, or one of our mistakes, ends nobody else's work.
            failure = error
        if self._recorder is not None:
            try:
                self._recorder.add(now, event, instructions)
            except OSError as error:
                self._end_record(error)
        for instruction in instructions:
            try:
                self._sinks[type(instruction)](instruction)
            except Exception:
                log.exception("%s could not be carried out", type(instruction).__name__)
        if failure is not None:
            self._on_failure(event, failure)

    def _end_record(self, error: OSError | None) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        try:
            recorder.close()
        except OSError as failure:
            error = error or failure
        if error is not None:
            log.error("the event log ends before this daemon does: %s", error.strerror)

    def _rearm(self) -> None:
        wake = self.core.next_wake()
        if wake is None or wake == self._alarm_at or self._rang:
            return
        # An alarm that comes too early only costs a Tick; re-arming for every later deadline would cost more.
        if self._alarm is not None and self._alarm_at < wake and self._alarm_at > self.now:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = wake
        self._alarm = self._loop.call_at(wake / self._speed, self._ring)

    def _ring(self) -> None:
        # A loop that stood still looks at its timers before all that came meanwhile is read. After two turns it is.
        self._rang = True
        self._loop.call_soon(self._loop.call_soon, self._tick)

    def _tick(self) -> None:
        self._rang = False
        if self._alarm is not None:
            self._alarm = None
            self._alarm_at = float("inf")
            self.handle(Tick())
