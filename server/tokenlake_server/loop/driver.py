"""Drives a `NodeCore`: passes it one event at a time, and each instruction to the function that carries it out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tokenlake.core import NodeCore
from tokenlake.core.events import (
    ColdLooked,
    ColdWritten,
    DiskErased,
    DiskWritten,
    Event,
    FetchDone,
    SendDone,
    SlotChecked,
    Tick,
)
from tokenlake.core.instructions import (
    CheckSlot,
    ColdLook,
    ColdRead,
    ColdWrite,
    DiskErase,
    DiskRead,
    DiskWrite,
    Instruction,
    SendBulk,
    StartFetch,
)
from tokenlake.core.node import HandlerFailed
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code
from tokenlake.wire.fields import CHECKSUM_BYTES

log = logging.getLogger(__name__)

TIMERS_S = 0.001
"""Limit of the seconds that timers which are due take in one iteration of the loop; the others wait for the next one.
The last timer may exceed it."""

Handle = Callable[[Event, float], list[Instruction]]
Sink = Callable[[Any], None]


class Driver:
    """Runs the rules of the node (a `NodeCore`) on the control loop. Other threads may call `post` only."""

    def __init__(
        self,
        core: NodeCore,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[Event, Exception], None],
    ) -> None:
        """`on_failure(event, error)` is called when the rules did not complete an event, after the instructions of the
        event were carried out. ValueError: the sender violated the protocol, and the rules changed nothing.
        HandlerFailed: the rules changed their state in part, and its instructions belong to these changes. Another
        exception: a defect, and the rules changed nothing."""
        self.core = core
        self._on_failure = on_failure
        self._loop = loop
        self._handle: Handle = core.handle
        self._sinks: dict[type[Instruction], Sink] = {}
        self._queue: deque[Event] = deque()
        self._running = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self._tick_scheduled = False
        """True: Ticks are scheduled within the next two iterations of the loop."""

    @property
    def now(self) -> float:
        """The time of the rules' clock, in seconds: that of the loop."""
        return self._loop.time()

    def carry_out(self, kind: type[Instruction], sink: Sink) -> None:
        """Register `sink`, which is then called with each instruction of the type `kind` that the rules return. `sink`
        must not block."""
        assert kind not in self._sinks, f"{kind.__name__} is carried out twice"
        self._sinks[kind] = sink

    def wrap(self, rules: Callable[[Handle], Handle], sink: Callable[[Sink], Sink]) -> None:
        """Put `rules(...)` in place of the rules' `handle`, and `sink(...)` in place of each function that carries out
        instructions. Called before the first event."""
        self._handle = rules(self._handle)
        self._sinks = {kind: sink(inner) for kind, inner in self._sinks.items()}

    def start(self) -> None:
        """Begin to serve timers. Called after `core.start`."""
        self._rearm()

    def stop(self) -> None:
        """Stop the timers."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def post(self, event: Event) -> None:
        """Let the rules handle an event, on the loop. May be called from any thread. Does nothing once the loop is
        closed."""
        # A closed loop raises RuntimeError: the daemon may stop before the threads that post events have returned.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.handle, event)

    def handle(self, event: Event) -> None:
        """Let the rules handle an event, on the loop. An event that arises while another one is handled is queued
        behind it."""
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
        instructions, failure = self._decide(event, self.now)
        for instruction in instructions:
            try:
                self._sinks[type(instruction)](instruction)
            except Exception:
                log.exception("%s could not be carried out", type(instruction).__name__)
                self._queue.extend(_end_of(instruction))
        if failure is not None:
            self._on_failure(event, failure)

    def _decide(self, event: Event, now: float) -> tuple[list[Instruction], Exception | None]:
        """Pass an event to the rules. Returns the instructions of the event, and the reason that the rules did not
        complete it (else None). A failure concerns the sender of this event only; the driver continues with the next
        event."""
        try:
            return self._handle(event, now), None
        except HandlerFailed as failure:
            # The rules changed their state before the error, and the instructions that belong to these changes must be
            # carried out (docs/decisions/013-instructions-of-a-failed-handler.md).
            return failure.instructions, failure
        except Exception as failure:
            return [], failure

    def _rearm(self) -> None:
        wake = self.core.next_wake()
        if wake is None or wake == self._alarm_at or self._tick_scheduled:
            return
        # The timer of the next deadline is not moved to a later time: a call that comes too early costs one Tick, which
        # is cheaper than moving the timer whenever the next deadline gets later.
        if self._alarm is not None and self._alarm_at < wake and self._alarm_at > self.now:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = wake
        self._alarm = self._loop.call_at(wake, self._alarm_due)

    def _alarm_due(self) -> None:
        # After a pause of the process the loop runs expired timers before it reads the frames that arrived meanwhile,
        # such as the answer whose deadline has just passed. The Tick waits for two iterations, until they are read.
        self._tick_scheduled = True
        self._loop.call_soon(self._loop.call_soon, self._tick)

    def _tick(self) -> None:
        """Pass in one Tick for each timer that is due. Those that are left after `TIMERS_S` follow in the next
        iteration of the loop, so that many timers at once do not keep it from its sockets."""
        until = time.perf_counter() + TIMERS_S
        while self._alarm is not None and (wake := self.core.next_wake()) is not None and wake <= self.now:
            if time.perf_counter() >= until:
                self._loop.call_soon(self._tick)
                return
            self.handle(Tick())
        self._tick_scheduled = False
        if self._alarm is not None:
            self._alarm = None
            self._alarm_at = float("inf")
            self._rearm()


def _end_of(instruction: Instruction) -> list[Event]:
    """The event that ends an instruction that could not be carried out: no thread will post it, and the rules keep
    slots reserved or pinned until then. Empty for an instruction that no event ends."""
    match instruction:
        case StartFetch() | DiskRead() | ColdRead():
            count = len(instruction.keys) // KEY_BYTES
            lost = bytes([Code.LOST]) * count
            return [FetchDone(instruction.fetch, lost, bytes(CHECKSUM_BYTES * instruction.shards * count), None)]
        case DiskWrite():
            return [DiskWritten(instruction.write, bytes([Code.LOST]) * (len(instruction.keys) // KEY_BYTES))]
        case DiskErase():
            return [DiskErased(instruction.erase, bytes([Code.LOST]) * (len(instruction.keys) // KEY_BYTES))]
        case ColdLook():
            return [ColdLooked(instruction.look, bytes(len(instruction.keys) // KEY_BYTES))]
        case ColdWrite():
            return [ColdWritten(instruction.write, bytes([Code.LOST]) * (len(instruction.keys) // KEY_BYTES))]
        case SendBulk():
            return [SendDone(instruction.stream)]
        case CheckSlot():
            return [SlotChecked(instruction.check, right=True)]
    return []
