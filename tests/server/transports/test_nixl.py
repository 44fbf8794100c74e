"""Faults of reads out of another node's memory: no wrong bytes, no slot that is free while bytes may come, an end in
time, and TCP meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tests.server.transports.fake_agent import Fabric
from tests.server.transports.pair import Pair, pair
from tokenlake.core.events import FetchDone
from tokenlake.wire import Code, peer
from tokenlake_server.transports import nixl as module

SIZE, COUNT = module.PIECE_BYTES, 6
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


def test_late_bytes_come_into_held_slots_only() -> None:
    with faulty() as (two, fabric):
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
        wait_until(lambda: fetch in two.reader.settled, "the slots are free")


def test_a_slow_read_ends_in_time_or_not_at_all() -> None:
    """A read that goes on although its reader has left gives its slots free without a new agent."""
    with faulty() as (two, fabric):
        fabric.mode = "slow"
        assert two.fetch().codes == LOCAL * COUNT
        assert two.read_with_nixl()
        assert len(fabric.agents) == 2


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
