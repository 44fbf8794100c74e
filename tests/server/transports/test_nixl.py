"""Faults of reads out of another node's memory: no wrong bytes, no slot that is free while bytes may come, an end in
time, and TCP meanwhile."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tests.server.transports.fake_agent import Fabric, FakeAgent
from tests.server.transports.pair import NETWORKS, Pair, pair
from tokenlake.core.events import FetchDone
from tokenlake.wire import Code, peer
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena
from tokenlake_server.nixl import transport as module
from tokenlake_server.nixl.read import PIECE_BYTES

SIZE, COUNT = PIECE_BYTES, 6
"""Each segment is a piece of its own."""
LOCAL = bytes([Code.LOCAL])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_S", "RETIRE_S", "PAUSE_S", "BIRTH_S"):
        monkeypatch.setattr(module, name, 0.1)


@contextlib.contextmanager
def faulty() -> Iterator[tuple[Pair, Fabric]]:
    fabric = Fabric()
    with pair(SIZE, COUNT, nixl=True, fabric=fabric) as two:
        assert two.fetch().codes == LOCAL * COUNT
        yield two, fabric
        fabric.mode = "sound"
        wait_until(two.read_with_nixl, "the memory is read again", LIMIT_S)
        assert two.fetch().codes == LOCAL * COUNT
        wait_until(lambda: two.owner.sent == two.owner.answered, "no segment is pinned")
        assert not fabric.released_early
        assert {fetch for fetch, done in two.reader.done.items() if done.held} == two.reader.settled


def held(done: FetchDone) -> list[int]:
    return [number for number, flag in enumerate(done.held) if flag]


@pytest.mark.parametrize("mode", ["hang", "fail"])
def test_a_read_that_does_not_end(mode: str) -> None:
    """The fetch ends in time. Segments whose slots no read writes into come over TCP."""
    with faulty() as (two, fabric):
        fabric.mode = mode
        fetch = two.start(answer_s=0.5)
        done = two.end(fetch)
        assert held(done)
        assert len(held(done)) <= 2 * module.WINDOW, "in two halves"
        assert all((done.codes[number] == Code.LOST) == (number in held(done)) for number in range(COUNT))
        assert done.answered is True
        wait_until(lambda: fetch in two.reader.settled, "the slots are free")
        assert fabric.wake() == 0, "no bytes come later"
        while not two.read_with_nixl():
            assert two.fetch().codes == LOCAL * COUNT, "over TCP meanwhile"
            fabric.mode = "sound"


def test_late_bytes_come_into_held_slots_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty() as (two, fabric):
        monkeypatch.setattr(module, "SETTLE_S", math.inf)
        fabric.mode = "hang"
        fetch = two.start()
        wait_until(lambda: any(agent.reading for agent in fabric.agents.values()), "a read hangs")
        two.abort(fetch)
        done = two.end(fetch)
        assert done.answered is None
        for number in range(COUNT):
            two.reader.slot(number)[:] = bytes(SIZE)
        assert fabric.wake()
        written = [number for number in range(COUNT) if any(two.reader.slot(number)[:: SIZE // 8])]
        assert written
        assert set(written) <= set(held(done))
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
        wait_until(lambda: fetch in two.reader.settled, "the slots are free")


@pytest.mark.parametrize("whole", [True, False])
def test_a_slot_that_is_used_again_during_the_read(whole: bool) -> None:
    with faulty() as (two, fabric):
        fabric.mode = "hang"
        fetch = two.start()
        wait_until(lambda: any(agent.reading for agent in fabric.agents.values()), "a read is under way")
        changed = SIZE if whole else SIZE // 2
        for number in range(COUNT):
            two.owner.slot(number)[:changed] = bytes(changed)
        fabric.mode = "sound"
        done = two.end(fetch)
        assert set(done.codes) <= {Code.BAD_CHECKSUM, Code.LOCAL}
        assert done.codes.count(Code.BAD_CHECKSUM) >= COUNT - 2
        for number, content in enumerate(two.content):
            two.owner.slot(number)[:] = content


def test_a_former_life_of_the_owner() -> None:
    """The reader has not heard of the owner's present agent: the owner answers with bytes."""
    with faulty() as (two, fabric):
        assert two.owner.nixl is not None
        two.owner.nixl.tell = lambda: None
        end_life(two, fabric)
        assert two.read_with_nixl(), "the reader does not know"
        done = two.fetch()
        assert (done.codes, done.held) == (LOCAL * COUNT, b"")
        two.introduce()


def end_life(two: Pair, fabric: Fabric) -> None:
    """Let the owner's agent end, since it cannot register memory, and wait for the next one."""
    nixl = two.owner.nixl
    assert nixl is not None
    before = nixl.introduction
    nixl.remove(0)
    fabric.refusals = 1
    nixl.add(0)
    wait_until(lambda: nixl.introduction.agent not in ("", before.agent), "there is another agent")


def test_the_agent_of_the_owner_ends_during_a_read() -> None:
    with faulty() as (two, fabric):
        fabric.mode = "hang"
        fetch = two.start(answer_s=1.0)
        wait_until(lambda: any(agent.reading for agent in fabric.agents.values()), "a read hangs")
        end_life(two, fabric)
        fabric.mode = "sound"
        done = two.end(fetch)
        assert all((done.codes[number] == Code.LOST) == (number in held(done)) for number in range(COUNT))


def test_a_reader_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner does not keep its segments for a frozen reader."""
    monkeypatch.setattr(module, "SEND_STALL_S", 0.2)
    with faulty() as (two, fabric):
        fabric.mode = "hang"
        fetch = two.start()
        wait_until(lambda: two.owner.sent == two.owner.answered, "the pins have ended")
        two.abort(fetch)
        two.end(fetch)


def test_a_region_that_is_replaced() -> None:
    with faulty() as (two, fabric):
        assert two.owner.nixl is not None
        two.owner.nixl.remove(0)
        assert two.fetch().codes == LOCAL * COUNT, "over TCP: its memory is not lent"
        two.owner.nixl.add(0)
        wait_until(two.read_with_nixl, "it is lent again")
        assert len(fabric.agents) == 2


def test_nodes_without_a_common_network() -> None:
    with faulty() as (two, _):
        assert two.owner.nixl is not None
        assert two.reader.nixl is not None
        told = two.owner.nixl.introduction
        two.reader.nixl.heard("owner", peer.MemoryAgent(told.agent, told.version, ("another",), told.description))
        assert not two.read_with_nixl()
        assert two.fetch().codes == LOCAL * COUNT
        two.introduce()


def test_a_node_that_is_gone() -> None:
    with faulty() as (two, _):
        assert two.reader.nixl is not None
        two.reader.nixl.lost("owner")
        assert not two.read_with_nixl()
        two.introduce()


def test_an_agent_that_cannot_be_reached_is_tried_again() -> None:
    with faulty() as (two, fabric):
        assert two.reader.nixl is not None
        fabric.unreachable = 2
        two.reader.nixl.lost("owner")
        two.introduce()
        wait_until(lambda: fabric.unreachable < 0, "it was tried again")


def test_a_defect_ends_the_agent_and_nothing_else() -> None:
    with faulty() as (two, fabric):
        before = set(fabric.agents)
        fabric.broken = 1
        wait_until(lambda: two.fetch().codes == LOCAL * COUNT and not fabric.broken, "an agent meets the defect")
        wait_until(lambda: set(fabric.agents) > before, "there is another agent")


@contextlib.contextmanager
def alone() -> Iterator[tuple[module.Nixl, FakeAgent, Fabric]]:
    """A node that lends region 0 of three, and its first agent."""
    fabric, arena = Fabric(), Arena()
    for region in range(3):
        arena.make(region, 1 << 20)
    make: Callable[[str], Any] = fabric.make
    nixl = module.Nixl("a", 1, arena, NETWORKS, make)
    nixl.add(0)
    try:
        wait_until(lambda: lends(nixl, nixl.introduction, 0), "there is an agent")
        yield nixl, fabric.agents[nixl.introduction.agent], fabric
    finally:
        nixl.close()
        arena.close()


def told(fabric: Fabric, node: str, version: int = 1) -> peer.MemoryAgent:
    """What a node tells, whose agent has the node's name."""
    if node not in fabric.agents:
        fabric.make(node)
    return peer.MemoryAgent(node, version, NETWORKS, f"{node}@{version}".encode())


def during_meetings(agent: FakeAgent, calls: dict[bytes, Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call each of `calls` while the agent meets the agent with that description for the first time."""
    meet = agent.meet

    def meeting(description: bytes) -> str:
        calls.pop(description, lambda: None)()
        return meet(description)

    monkeypatch.setattr(agent, "meet", meeting)


def test_a_node_that_is_met_again_before_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone() as (nixl, agent, fabric):
        b, c, d = (told(fabric, node) for node in "bcd")

        def two_meetings() -> None:
            nixl.heard("c", c)
            nixl.heard("d", d)

        def connect_again() -> None:
            nixl.lost("b")
            nixl.heard("b", b)

        during_meetings(agent, {b.description: two_meetings, c.description: connect_again}, monkeypatch)
        nixl.heard("b", b)
        wait_until(lambda: "d" in agent.known, "the first of the two meetings is over")
        nixl.remove(0)  # It returns when the orders before it are done.
        assert "b" in agent.known


def lends(nixl: module.Nixl, to: peer.MemoryAgent, region: int) -> bool:
    """True if a slot of the region is lent to a reader that was told this."""
    return nixl.lends(peer.Pull("", b"k" * 32, agent=to.agent, version=to.version), [SlotRef(region, 0, 1)])


def test_a_new_region_is_lent_with_a_description_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone() as (nixl, agent, _):
        before, describe = nixl.introduction, agent.description
        lent: list[bool] = []

        def description() -> bytes:
            lent.append(lends(nixl, before, 1))
            return describe()

        monkeypatch.setattr(agent, "description", description)
        nixl.add(1)
        wait_until(lambda: nixl.introduction != before, "the region is described")
        assert lent == [False]
        assert lends(nixl, nixl.introduction, 1)
        nixl.remove(1)
        assert not lends(nixl, nixl.introduction, 1)
        assert lends(nixl, nixl.introduction, 0)
