"""The driver: one Tick per deadline, the rules' clock, and events on which the rules fail."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.live import LAYOUT
from tokenlake.core import CoreConfig, NodeCore, events
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.events import Event
from tokenlake.core.instructions import Answer, CheckSlot, Instruction, SendToPeer, Stamp, Welcomed
from tokenlake.core.node import HandlerFailed
from tokenlake.directory.ring_record import RingRecord
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.slot_checker import SlotChecker
from tokenlake_server.loop.driver import Driver, Handle
from tokenlake_testing.event_log import Recorder, replay


def ran(loop: asyncio.AbstractEventLoop, scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene on the loop, and close the loop."""
    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


def driver_of(core: NodeCore, loop: asyncio.AbstractEventLoop, sink: Callable[[Any], None], **of: Any) -> Driver:
    """A driver that gives its answers to `sink`. An event on which the rules fail fails the test."""

    def failed(event: Event, error: Exception) -> None:
        raise AssertionError(event) from error

    driver = Driver(core, loop, failed, **of)
    for kind in (Answer, Welcomed, Stamp):
        driver.carry_out(kind, sink)
    return driver


JOINED = events.Joined(1, 1, "t", LAYOUT.segment_bytes, LAYOUT.shards, LAYOUT.segment_tokens, 0, 0)


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose time changes only when it is set."""

    now = 0.0

    def time(self) -> float:
        return self.now


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_answer_between_alarm_and_tick() -> None:
    """A reply between the alarm of a deadline and its Tick leaves no further alarm. Otherwise, after hours of matches,
    each deadline would cost thousands of ticks."""
    loop = SteppedLoop()
    said: list[peer.PeerMessage] = []
    ticks: list[float] = []

    def counting(handle: Handle) -> Handle:
        def counted(event: Event, now: float) -> list[Instruction]:
            if isinstance(event, events.Tick):
                ticks.append(now)
            return handle(event, now)

        return counted

    async def scene() -> None:
        # No node pings for 5 s, so that the next deadline is that of the match.
        core = NodeCore(
            CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1}), regions=1, region_bytes=1 << 20, gossip_s=5.0)
        )
        core.start(0.0)
        driver = driver_of(core, loop, lambda _: None)
        driver.carry_out(SendToPeer, lambda say: said.append(say.message))
        driver.wrap(counting, lambda sink: sink)
        driver.start()
        drawn = (bytes([number]) * 32 for number in range(256))
        keys = [key for key in drawn if core.ring.candidates(key)[0][0] == "b"][:5]
        driver.handle(events.PeerUp("b", 1))
        driver.handle(JOINED)
        for round_ in range(5):
            driver.handle(events.Requested(1, engine.Match(2, keys[round_], 0.0)))
            lookup = said[-1]
            assert isinstance(lookup, peer.Lookup)
            loop.now += 0.010
            await turns(4)
            loop.now += 0.010
            # The alarm rang, and the reply is read before the Tick.
            await turns(2)
            reply = peer.LookupReply(lookup.call, 0, bytes([Code.MISSING]), (), (1.0, 0.0, 1.0), 0.0)
            driver.handle(events.PeerSent("b", reply))
            await turns(4)
        ticks.clear()
        wake = core.next_wake()
        assert wake is not None
        loop.now = wake
        await turns(10)
        assert ticks == [wake]
        driver.stop()

    ran(loop, scene)


def test_instructions_of_a_failed_handler_are_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's failed handler had given a slot to a new segment: without its instructions the slot keeps the previous
    generation."""
    loop = SteppedLoop()
    config = CoreConfig("a", 1, RingRecord.of({"a": 1}), regions=1, region_bytes=1 << 20)
    core = NodeCore(config)
    core.start(0.0)
    failures: list[tuple[type[Event], type[Exception]]] = []
    carried: list[type[Instruction]] = []
    driver = Driver(core, loop, lambda event, error: failures.append((type(event), type(error))))
    for kind in (Answer, Welcomed, Stamp):
        driver.carry_out(kind, lambda each: carried.append(type(each)))
    path = tmp_path / "events"
    recorder = Recorder(path, config, 0.0)
    driver.wrap(recorder.rules, lambda sink: sink)
    driver.start()

    def fail(*of: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(DirectoryNode, "announce", fail)
    try:
        driver.handle(JOINED)
        carried.clear()
        driver.handle(events.Requested(1, engine.Prepare(2, bytes(31), 0)))
        assert (carried, failures) == ([], [(events.Requested, ValueError)])
        driver.handle(events.Requested(1, engine.Prepare(3, bytes(32), 0)))
        assert (carried, failures[1:]) == ([Stamp], [(events.Requested, HandlerFailed)])
        driver.handle(events.Requested(1, engine.Heartbeat(4)))
        assert carried == [Stamp, Answer]
        driver.stop()
    finally:
        loop.close()
    recorder.close()
    replayed = replay(path)
    assert (replayed.events, replayed.difference) == (4, "")


class DueTimers(NodeCore):
    """Rules with 40 timers that are due at once, each of which takes half a millisecond."""

    called = 0

    def next_wake(self) -> float | None:
        return 0.0 if self.called < 40 else None

    def handle(self, event: events.Event, now: float) -> list[Instruction]:
        self.called += 1
        until = time.thread_time() + 0.0005
        while time.thread_time() < until:
            pass
        return []


def test_timers_leave_the_loop_to_others() -> None:
    """Timers that are due at once, and take 20 ms together, are called in several iterations of the loop."""
    loop = asyncio.SelectorEventLoop()
    core = DueTimers(CoreConfig("a", 1, RingRecord.of({"a": 1}), regions=1, region_bytes=1 << 20))
    driver = Driver(core, loop, lambda event, error: None)
    called: list[int] = []

    async def scene() -> None:
        driver.start()
        deadline = loop.time() + 10.0
        while core.called < 40 and loop.time() < deadline:
            await asyncio.sleep(0)
            called.append(core.called)
        driver.stop()

    ran(loop, scene)
    assert called[-1] == 40
    assert max(after - before for before, after in itertools.pairwise(called)) <= 4


@pytest.mark.parametrize("started", [True, False])
def test_a_check_that_cannot_be_made_finds_no_wrong_bytes(started: bool) -> None:
    """The thread of the check fails, or does not begin."""
    loop, found = asyncio.SelectorEventLoop(), list[events.SlotChecked]()
    core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1}), regions=1, region_bytes=1 << 20))
    driver = Driver(core, loop, lambda event, error: None)
    checker = SlotChecker(Arena(), driver)

    def rules(event: Event, now: float) -> list[Instruction]:
        if not isinstance(event, events.SlotChecked):
            return [CheckSlot(7, SlotRef(0, 0, 1).pack(), 512, bytes(8))]
        found.append(event)
        return []

    async def scene() -> None:
        driver.wrap(lambda handle: rules, lambda sink: sink)
        if not started:
            checker.close()
        driver.handle(events.Tick())
        deadline = loop.time() + 10.0
        while not found and loop.time() < deadline:
            await asyncio.sleep(0)
        checker.close()

    ran(loop, scene)
    assert found == [events.SlotChecked(7, right=True)]
