"""The driver of simulated nodes: events in, instructions out, timers, freezes, ends and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tokenlake.core import NodeCore, events, instructions
from tokenlake.core.context import CoreConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake.wire import engine, peer
from tokenlake_testing.clock import Clock
from tokenlake_testing.driver import NodeDriver, Pull

MEMBERS = RingRecord.of({"a": 1 << 20, "b": 1 << 20})


@dataclass
class Recorder:
    """Engines, network and memory that record their calls; a pull ends only when the test says so."""

    driver: NodeDriver | None = None
    answers: list[object] = field(default_factory=list)
    frames: list[peer.PeerMessage] = field(default_factory=list)

    def answer(self, order: instructions.Answer) -> None:
        self.answers.append(order.message)

    def welcome(self, order: instructions.Welcomed) -> None:
        self.answers.append(order)

    def say(self, order: instructions.SendToPeer) -> None:
        self.frames.append(order.message)

    def pull(self, order: instructions.StartFetch) -> Pull:
        assert self.driver is not None
        return Recorded(self.driver, order, 1)

    def stamp(self, order: instructions.Stamp) -> None:
        pass

    def check(self, order: instructions.CheckSlot) -> None:
        pass

    def make(self, order: instructions.MakeRegion) -> None:
        pass


class Recorded(Pull):
    """A transfer that records its calls."""

    bulk: instructions.SendBulk | None = None

    def send(self, bulk: instructions.SendBulk) -> None:
        self.bulk = bulk

    def abort(self) -> None:
        """The tests end their transfers themselves."""


def node(clock: Clock, name: str = "a") -> tuple[NodeDriver, Recorder]:
    parts = Recorder()
    core = NodeCore(CoreConfig(name, 1, MEMBERS, 1, 1 << 20))
    parts.driver = NodeDriver(core, clock, engines=parts, network=parts, memory=parts)
    parts.driver.start()
    return parts.driver, parts


def joined(connection: int) -> events.Joined:
    return events.Joined(connection, connection, "red", 4096, 1, 16, 0, 0)


def test_events_lead_to_instructions_and_timers_fire() -> None:
    clock = Clock()
    driver, parts = node(clock)
    driver.deliver(joined(1))
    assert isinstance(parts.answers[0], instructions.Welcomed)
    driver.deliver(events.PeerUp("b", 1))
    before = len(parts.frames)
    clock.run_for(1.0)
    assert any(isinstance(frame, peer.Ping) for frame in parts.frames[before:])


def test_events_for_frozen_and_stopped_nodes() -> None:
    """Events wait for a frozen node, and are lost on a stopped one."""
    clock = Clock()
    driver, parts = node(clock)
    driver.freeze()
    driver.deliver(joined(1))
    clock.run_for(5.0)
    assert (driver.frozen, parts.answers, parts.frames) == (True, [], [])
    driver.thaw()
    assert len(parts.answers) == 1
    driver.stop()
    driver.deliver(joined(2))
    driver.freeze()
    clock.run_for(5.0)
    assert (driver.frozen, len(parts.answers)) == (False, 1)


def test_the_observer_sees_events_with_their_instructions() -> None:
    seen: list[tuple[events.Event, int]] = []
    parts = Recorder()
    core = NodeCore(CoreConfig("a", 1, MEMBERS, 1, 1 << 20))

    def observe(event: events.Event, orders: list[instructions.Instruction]) -> None:
        seen.append((event, len(orders)))
        assert parts.answers == []

    driver = NodeDriver(core, Clock(), engines=parts, network=parts, memory=parts, observer=observe)
    driver.start()
    driver.deliver(joined(1))
    # The region that the engine gets slots in, and the answer.
    assert seen == [(joined(1), 2)]


def test_a_pull_delivers_each_end_once() -> None:
    clock = Clock()
    receiver, _ = node(clock)
    sender, _ = node(clock, "b")
    sender.deliver(events.PeerUp("a", 1))
    order = instructions.StartFetch(7, "b", "red", bytes(32), bytes(16), 4096, 1, 0.25)
    pull = Recorded(receiver, order, 5)
    receiver.receives[7] = pull
    pull.ask(sender)
    assert pull.bulk is not None
    assert list(sender.sends) == [5]
    for _ in range(2):
        pull.end_sending()
    # The rules of the receiver began no fetch 7 and refuse its end: the error shows that the end reached them.
    with pytest.raises(ValueError, match="fetch 7 is not under way"):
        pull.end_receiving(b"", b"")
    assert (sender.sends, receiver.receives, pull.returned) == ({}, {}, True)
    assert sender.core.idle()


def test_replies_reach_engines() -> None:
    driver, parts = node(Clock())
    driver.deliver(joined(1))
    driver.deliver(events.Requested(1, engine.Heartbeat(3)))
    assert isinstance(parts.answers[-1], engine.HeartbeatReply)
