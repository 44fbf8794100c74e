"""The watchdog counts long callbacks by kind, in processor time, and logs those that delay requests."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

import pytest

from tokenlake.core import events
from tokenlake.metrics import Counters
from tokenlake.wire import engine
from tokenlake_server.loop.watchdog import LIMIT_S, LOG_S, LONG, WARN_S, Watchdog, new_event_loop


def use_processor(seconds: float) -> None:
    """Use that much processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def busy() -> None:
    """Long enough to be counted, not long enough to be logged."""
    use_processor(3 * LIMIT_S)


def slow() -> None:
    """Long enough to be logged."""
    use_processor(1.5 * WARN_S)


def idle() -> None:
    """As much real time as `busy`, and no processor time."""
    time.sleep(3 * LIMIT_S)


class Watched:
    """A watchdog with its own clock and counters."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.watchdog = Watchdog(lambda: self.now)
        self.watchdog.use(self.counters)

    def kinds(self) -> dict[str, float]:
        return {
            kind: value
            for metric, (kind,), value in self.watchdog.gauges()
            if metric.name == "tokenlake_long_callbacks_by_kind"
        }

    def longest(self, kind: str) -> float:
        return next(v for metric, (at,), v in self.watchdog.gauges() if "longest" in metric.name and at == kind)


def test_processor_time_is_counted_and_sleep_is_not() -> None:
    watched = Watched()
    watched.watchdog.watch(idle)()
    assert not watched.kinds()
    watched.watchdog.watch(busy)()
    watched.watchdog.watch(busy)()
    assert watched.kinds() == {"busy": 2}
    assert watched.counters[LONG] == 2
    assert watched.longest("busy") > LIMIT_S


def test_a_callback_is_named_after_its_event() -> None:
    watched = Watched()

    def handle(event: events.Event, now: float) -> list[object]:
        busy()
        return []

    rules = watched.watchdog.noting(handle)  # type: ignore[arg-type]
    for event in (events.Requested(1, engine.Heartbeat(1)), events.Tick()):
        watched.watchdog.watch(rules)(event, 0.0)
    watched.watchdog.watch(busy)()
    assert watched.kinds() == {"Heartbeat": 1, "Tick": 1, "busy": 1}


def test_a_full_collection_is_a_kind_of_its_own() -> None:
    watched = Watched()

    def interrupted() -> None:
        busy()
        watched.watchdog.collected("stop", {"generation": 2})

    watched.watchdog.watch(interrupted)()
    assert watched.kinds() == {"garbage collection": 1}


def test_the_start_is_not_counted() -> None:
    watched = Watched()

    def start() -> None:
        watched.watchdog.use(watched.counters)
        # A daemon handles such an event when it loads the statistics of an earlier one.
        watched.watchdog.noting(lambda event, now: [])(events.Tick(), 0.0)
        busy()

    watched.watchdog.watch(start)()
    assert not watched.kinds()
    watched.watchdog.watch(busy)()
    assert watched.kinds() == {"busy": 1}


def test_an_error_passes_through_and_is_timed() -> None:
    watched = Watched()

    def failing() -> None:
        busy()
        raise KeyError("as before")

    with pytest.raises(KeyError, match="as before"):
        watched.watchdog.watch(failing)()
    assert list(watched.kinds().values()) == [1]


def test_the_log_has_at_most_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 1.0, LOG_S - 1, LOG_S + 1):
            watched.now = now
            watched.watchdog.watch(slow)()
            watched.watchdog.watch(busy)()
    messages = [record.getMessage() for record in caplog.records]
    assert ["(slow)" in message for message in messages] == [True, True]
    assert [message.rpartition(" ")[2] for message in messages] == ["1", "3"]


def test_the_loop_watches_every_callback_once() -> None:
    """Also readers, writers and tasks."""
    loop = new_event_loop()
    watchdog: Watchdog = loop.watchdog  # type: ignore[attr-defined]
    near, far = socket.socketpair()
    ran: dict[str, asyncio.Future[None]] = {}

    def made(name: str) -> Callable[[], None]:
        """A callback of this name, which is busy."""
        ran[name] = loop.create_future()

        def callback() -> None:
            busy()
            loop.remove_reader(near)
            loop.remove_writer(near)
            ran[name].set_result(None)

        callback.__qualname__ = name
        return callback

    async def task() -> None:
        far.send(b"x")
        for name, call in (
            ("soon", loop.call_soon),
            ("threadsafe", loop.call_soon_threadsafe),
            ("later", lambda callback: loop.call_later(0.0, callback)),
            ("at", lambda callback: loop.call_at(loop.time(), callback)),
            ("reader", lambda callback: loop.add_reader(near, callback)),
            ("writer", lambda callback: loop.add_writer(near, callback)),
        ):
            call(made(name))
            await ran[name]
        busy()

    try:
        loop.run_until_complete(task())
    finally:
        loop.close()
        near.close()
        far.close()
    found = {kind.rpartition(".")[2]: value for metric, (kind,), value in watchdog.gauges() if "by_kind" in metric.name}
    assert {name: found[name] for name in ran} == dict.fromkeys(ran, 1)
    assert "task" in found
