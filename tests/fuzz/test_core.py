"""NodeCore takes every message that decodes, however senseless. It refuses the whole message with ValueError or handles
it, and keeps its bounds."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import KEYS, NODES, TENANTS, hostile
from tests.profiles import examples
from tests.sim.malformed import malformed
from tests.sim.snapshot import changes, snapshot
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.core.instructions import (
    Answer,
    CheckSlot,
    Instruction,
    MakeRegion,
    SendBulk,
    SendToPeer,
    StartFetch,
    Welcomed,
)
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import AccessRecord
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine, peer

SLOT_BYTES, SHARDS = 512, 2
PEERS = ("n1", "n2")
CONNECTIONS = (1, 2, 3)
MEMORY = 16 << 10


class Node:
    """A core and its driver, which carries out instructions, but fails or delays them as its contract allows."""

    def __init__(self) -> None:
        config = CoreConfig(
            "n0", 1, RingRecord.of(dict.fromkeys(("n0", *PEERS), MEMORY)), 2, MEMORY, max_sessions=2, directory_limit=16
        )
        self.core = NodeCore(config)
        self.now = 100.0
        self.core.start(self.now)
        self.fetches: list[StartFetch] = []
        self.sending: list[int] = []
        self.making: list[int] = []
        self.checks: list[int] = []
        self.up: set[str] = set()
        self.sessions: list[int] = []
        self.joined: set[int] = set()
        self.calls: list[tuple[str, Any]] = []
        """(peer, request to it) without an answer so far."""
        self.watched = False
        """Is the state compared before and after each event that is refused?"""

    def feed(self, event: events.Event) -> list[Instruction]:
        """Deliver one event. ValueError is the documented refusal, after which the core is as before."""
        before = snapshot(self.core) if self.watched else []
        try:
            out = self.core.handle(event, self.now)
        except ValueError:
            out = []
            assert not self.watched or not changes(before, snapshot(self.core)), event
        for instruction in out:
            match instruction:
                case StartFetch():
                    self.fetches.append(instruction)
                case SendBulk():
                    self.sending.append(instruction.stream)
                case CheckSlot():
                    self.checks.append(instruction.check)
                case MakeRegion():
                    self.making.append(instruction.region)
                case Welcomed():
                    self.sessions.append(instruction.session)
                case SendToPeer(message=peer.Lookup() | peer.Offer()):
                    self.calls.append((instruction.node, instruction.message))
        return out

    # -- the driver's part of the contract

    def join(self, connection: int, tenant: str, session: int, slot_bytes: int) -> None:
        if connection not in self.joined:
            known = [0, *self.sessions]
            before = len(self.sessions)
            self.feed(events.Joined(connection, 1, tenant, slot_bytes, SHARDS, 16, known[session % len(known)], 0))
            if len(self.sessions) > before:
                self.joined.add(connection)

    def gone(self, connection: int) -> None:
        if connection in self.joined:
            self.joined.discard(connection)
            self.feed(events.ProcessGone(connection))

    def request(self, connection: int, message: engine.EngineRequest) -> None:
        if connection in self.joined:
            self.feed(events.Requested(connection, message))

    def said(self, node: str, message: peer.PeerMessage) -> None:
        if node in self.up:
            self.feed(events.PeerSent(node, message))

    def store(self, connection: int, keys: bytes, committed: int, shards: int) -> None:
        """Prepare, and commit the first `committed`."""
        if connection not in self.joined:
            return
        for instruction in self.feed(events.Requested(connection, engine.Prepare(1, keys, 0))):
            if isinstance(instruction, Answer) and isinstance(instruction.message, engine.Prepared):
                written = tuple(i for i, code in enumerate(instruction.message.codes) if code == Code.RESERVED)
                filled = written[:committed]
                checksums = bytes(8 * shards.bit_count() * len(filled))
                commit = engine.Commit(2, instruction.message.write, filled, shards, checksums)
                self.feed(events.Requested(connection, commit))

    def read(self, connection: int, keys: bytes, fetched: int, independent: bool) -> None:
        """Match, and fetch the first `fetched`; the lease stays."""
        if connection not in self.joined:
            return
        match = engine.Match(3, keys, 0.0, True, "r", independent=independent)
        for instruction in self.feed(events.Requested(connection, match)):
            if isinstance(instruction, Answer) and isinstance(instruction.message, engine.Matched):
                lease = instruction.message.lease
                self.feed(events.Requested(connection, engine.Fetch(4, lease, 0, fetched, 0.0)))

    def report(self, node: str, keys: bytes, lease: int) -> None:
        """A peer reports wrong copies of these keys, and an engine those of a lease."""
        self.said(node, peer.Corrupt("red", keys))
        self.request(1, engine.Corrupt((1 << 31) + lease, lease % 3))

    def ask(self, connection: int, tenant: str, message: engine.Explain) -> None:
        """A process of the tenant, joined or not, asks about a request."""
        self.feed(events.ExplainRequested(connection, tenant, message))

    def answer(self, codes: list[Code], nodes: tuple[str, ...], lease: int) -> None:
        """A peer answers the oldest open request with a reply of the right form."""
        if not self.calls:
            return
        node, asked = self.calls.pop(0)
        count = len(asked.keys) // KEY_BYTES
        allowed = [code for code in codes if code in ANSWERS.get(type(asked), codes)] or [ANSWERS[type(asked)][-1]]
        known = bytes(allowed[at % len(allowed)] for at in range(count))

        def named(code: Code) -> tuple[str, ...]:
            # One node name per such code, mostly of members.
            return tuple((nodes or ("n1",))[at % len(nodes or ("n1",))] for at in range(known.count(code)))

        match asked:
            case peer.Lookup():
                # The depth is sometimes beyond the segments that were asked for.
                deepest = lease % (count + 2)
                last_access = AccessRecord(lease % 7, lease % 3, gap_s=1.0, unshared=lease % 2, remembered=lease % 5)
                vacancy = (0.5, 1.0, 0.5)
                self.said(
                    node,
                    peer.LookupReply(
                        asked.call, lease, known, named(Code.ELSEWHERE), vacancy, 1e6, deepest, last_access, 2.0
                    ),
                )
            case peer.ExplainMissing():
                self.said(
                    node, peer.ExplainMissingReply(asked.call, ("reuse",) * count, ("n2",) * count, (1.0,) * count)
                )
            case peer.Offer():
                self.said(node, peer.OfferReply(asked.call, known, (0.5, 1.0, 0.5), 1e6))

    def connect(self, node: str, incarnation: int) -> None:
        self.up.add(node)
        self.feed(events.PeerUp(node, incarnation))

    def disconnect(self, node: str, incarnation: int) -> None:
        self.feed(events.PeerDown(node, incarnation))

    def fetched(self, codes: list[Code]) -> None:
        """The receiver ends the oldest fetch with these codes, the only ones that it knows."""
        if self.fetches:
            fetch = self.fetches.pop(0)
            count = len(fetch.keys) // KEY_BYTES
            known = bytes(codes[at % len(codes)] for at in range(count))
            self.feed(events.FetchDone(fetch.fetch, known, bytes(8 * fetch.shards * count)))

    def pull(self, stream: int, tenant: str, keys: bytes) -> None:
        """Node n1 pulls keys as a sender lets it: whole keys, and one request at a time on a stream."""
        if stream not in self.sending and not len(keys) % KEY_BYTES:
            self.feed(events.PullRequested(stream, "n1", tenant, keys))

    def sent(self) -> None:
        if self.sending:
            self.feed(events.SendDone(self.sending.pop(0)))

    def checked(self, right: bool) -> None:
        """The thread that checks copies ends the oldest check."""
        if self.checks:
            self.feed(events.SlotChecked(self.checks.pop(0), right))

    def made(self) -> None:
        if self.making:
            self.feed(events.RegionReady(self.making.pop(0)))

    def nonsense(self, connection: int, node: str) -> None:
        """Every kind of malformed event: each is refused, and all together leave no trace."""
        if connection not in self.joined:
            return
        before = snapshot(self.core)
        for event in malformed(self.core, connection, node):
            with pytest.raises(ValueError, match=r"\w"):
                self.core.handle(event, self.now)
        assert not changes(before, snapshot(self.core))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while (wake := self.core.next_wake()) is not None and wake <= self.now:
            self.feed(events.Tick())

    def check(self) -> None:
        """Whole, and within bounds."""
        self.core.check_integrity()
        census = self.core.census()
        assert census["directory"] <= 16
        assert census["sessions"] <= 2

    def settle(self) -> None:
        """End all engines and peers, complete all instructions, and let all deadlines pass: the core must have no state
        of them left."""
        for connection in CONNECTIONS:
            self.gone(connection)
        for node in sorted(self.up):
            self.feed(events.PeerDown(node, self.incarnation(node)))
        for _ in range(20):
            self.wait(5.0)
            while self.fetches or self.sending or self.making or self.checks:
                self.fetched([Code.LOST])
                self.sent()
                self.checked(True)
                self.made()
        self.check()
        left = {name: count for name, count in self.core.census().items() if count}
        remembered = {"explained requests", "segments they missed", "segments that went"}
        assert set(left) <= {"directory", "timers", *remembered}, left
        assert left["timers"] < 20

    def incarnation(self, node: str) -> int:
        known = self.core._peers.get(node)  # type: ignore[arg-type]
        assert known is not None
        return known.incarnation


ANSWERS: dict[type, tuple[Code, ...]] = {
    peer.Lookup: (Code.LOCAL, Code.ELSEWHERE, Code.PENDING, Code.MISSING, Code.UNKNOWN),
    peer.Offer: (Code.COMMITTED, Code.EXISTS, Code.NOT_ADMITTED, Code.LOST),
}
"""The codes that are valid in the reply to each request."""
Step = Callable[[Node], None]


def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """A call of the method `name` with drawn arguments."""
    return st.tuples(*arguments).map(lambda drawn: lambda node: getattr(node, name)(*drawn))


REQUESTS = tuple(kind for kind in typing.get_args(engine.EngineRequest) if kind is not engine.Hello)
connections = st.sampled_from(CONNECTIONS)
requests = st.sampled_from(REQUESTS).flatmap(hostile)
tellings = st.sampled_from(typing.get_args(peer.PeerMessage)).flatmap(hostile)
codes = st.lists(st.sampled_from(list(Code)), min_size=1, max_size=3)
plain = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True).map(b"".join)
sane = st.one_of(
    st.builds(engine.Prepare, st.just(1), plain, st.integers(0, 3)),
    st.builds(engine.Match, st.just(2), plain, st.just(0.0)),
    st.builds(
        engine.Commit,
        st.just(3),
        st.integers((1 << 31) + 1, (1 << 31) + 40),
        st.just((0, 1, 2)),
        st.just(3),
        st.just(bytes(48)),
    ),
)
steps = st.one_of(
    step(
        "join", connections, st.sampled_from(TENANTS[:2]), st.integers(0, 4), st.sampled_from([SLOT_BYTES, 1, 1 << 20])
    ),
    step("gone", connections),
    step("store", connections, plain, st.integers(0, 8), st.integers(0, 3)),
    step("store", connections, plain, st.just(8), st.just(3)),
    step("read", connections, plain, st.integers(0, 9), st.booleans()),
    step("answer", codes, st.lists(st.sampled_from(NODES), max_size=8).map(tuple), st.integers(0, 9)),
    step("request", connections, requests),
    step("ask", connections, st.sampled_from(TENANTS), hostile(engine.Explain)),
    step("ask", connections, st.sampled_from(TENANTS[:2]), st.just(engine.Explain(9, "r"))),
    step("said", st.sampled_from(PEERS), tellings),
    step("said", st.sampled_from(PEERS), tellings),
    step("connect", st.sampled_from(PEERS), st.integers(1, 3)),
    step("disconnect", st.sampled_from(PEERS), st.integers(1, 3)),
    step("fetched", st.lists(st.sampled_from([Code.LOCAL, Code.LOST, Code.BAD_CHECKSUM]), min_size=1, max_size=3)),
    step("pull", st.integers(1, 3), st.sampled_from(TENANTS), plain),
    step("nonsense", connections, st.sampled_from(PEERS)),
    step("sent"),
    step("report", st.sampled_from(PEERS), plain, st.integers(0, 40)),
    step("checked", st.booleans()),
    step("made"),
    step("wait", st.sampled_from([0.0, 0.001, 0.03, 0.3, 2.0, 12.0, 40.0])),
)


def begun() -> Node:
    """A node with a connection to both peers, and one engine."""
    node = Node()
    for name in PEERS:
        node.connect(name, 1)
        node.said(name, peer.AdvertisingDone())
    node.join(1, "red", 0, SLOT_BYTES)
    return node


@given(st.lists(steps, min_size=10, max_size=40))
@settings(max_examples=examples(300))
def test_senseless_messages_break_nothing(story: list[Step]) -> None:
    node = begun()
    for each in story:
        each(node)
        node.check()
    node.settle()


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=examples(15))
def test_each_request_at_its_bounds(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    node = begun()
    node.watched = True
    for message in data.draw(st.lists(st.one_of(sane, hostile(kind)), min_size=1, max_size=8)):
        node.request(1, message)
        node.check()
    node.watched = False
    node.settle()


@pytest.mark.parametrize("kind", typing.get_args(peer.PeerMessage), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=examples(15))
@pytest.mark.timeout(600)  # a search of 10 s on an idle machine
def test_each_telling_at_its_bounds(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    node = begun()
    node.watched = True
    for message in data.draw(st.lists(hostile(kind), min_size=1, max_size=8)):
        node.said("n1", message)
        node.check()
        node.request(1, data.draw(sane))
        node.check()
    node.watched = False
    node.settle()
