"""Grants: bounds per session, items and slots that several processes hold, and their end."""

from __future__ import annotations

import pytest

from tests.core.scenes import answer, calm, match, prepare, release, store
from tests.sim.prompts import prompt
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, CoreConfig
from tokenlake.core.engines import grants
from tokenlake.core.engines.access import Touches
from tokenlake.core.engines.grants import Grants, Lease, SessionGrants, Write
from tokenlake.core.engines.pins import Pins
from tokenlake.core.report.account import Account
from tokenlake.core.report.misses import Beyond
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import NO_HINTS
from tokenlake.identity import ConnectionId, Incarnation, LeaseId, NodeId, SegmentKey, TenantId, WriteId
from tokenlake.memory import Kind, Segment
from tokenlake.wire import Code, engine

RED, SLOT_BYTES, TOKENS = TenantId("red"), 1024, 16
ONE, TWO = ConnectionId(1), ConnectionId(2)
OTHER = NodeId("b")


def key(number: int) -> SegmentKey:
    return SegmentKey(number.to_bytes(32, "big"))


class Scene:
    """A node with eight slots, and one session."""

    def __init__(self) -> None:
        self.context = Context(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1}), 1, 8 * SLOT_BYTES))
        peers = Peers(self.context, *4 * [lambda peer_: None])
        peers.came_up(OTHER, Incarnation(1))
        touches = Touches(self.context, peers, lambda tenant, key: None, lambda segments: None, Pins(self.context))
        self.grants = Grants(self.context, peers, touches, lambda tenant, keys, session: None)
        self.session = SessionGrants(RED, SLOT_BYTES, TOKENS)

    def reserve(self, number: int) -> Segment:
        segment = self.context.store.reserve(RED, SLOT_BYTES, key(number), Kind.CACHED, number, 0.0)
        assert isinstance(segment, Segment)
        return segment

    def write(self) -> Write:
        write = Write(WriteId(7), ONE)
        write.open = {0: self.reserve(0)}
        self.grants.add_write(self.session, write)
        return write

    def lease(self, count: int) -> Lease:
        segments: list[Segment | None] = [self.reserve(number) for number in range(count)]
        for segment in segments:
            assert segment is not None
            self.context.store.publish(segment, b"", 0.0)
        keys = [key(number) for number in range(count)]
        account = Account(RED, TOKENS, SLOT_BYTES, count, 0, range(count), Beyond())
        lease = Lease(LeaseId(9), keys, ONE, NO_HINTS, account, segments, [None] * count, [])
        self.grants.add_lease(self.session, lease)
        return lease

    def check(self) -> None:
        self.session.check_integrity()
        self.grants.check_integrity([self.session])
        pins = list(self.session.pins())
        assert all(segment.pins == pins.count(segment) for segment in self.context.store.segments())


@pytest.mark.parametrize(
    ("given_back", "touched"),
    [
        ([(0.0, TWO, 0, 2), (1.0, ONE, 0, 1), (2.0, ONE, 1, 2)], [2.0, 2.0]),
        ([(1.0, ONE, 1, 2), (1.0, TWO, 1, 2), (2.0, ONE, 0, 1), (2.0, TWO, 0, 1)], [2.0, 1.0]),
    ],
    ids=["beginning first", "deepest first"],
)
def test_a_beginning_counts_as_read_last(
    given_back: list[tuple[float, ConnectionId, int, int]], touched: list[float]
) -> None:
    """A beginning that the last process gave back first counts as read with the rest, and once where two processes gave
    back the deepest items first."""
    scene = Scene()
    lease = scene.lease(2)
    segments = [segment for segment in lease.segments if segment is not None]
    assert scene.grants.attach_lease(scene.session, lease, TWO)
    for now, connection, start, stop in given_back:
        scene.context.now = now
        scene.grants.release(scene.session, connection, [(lease, start, stop)], False)
        scene.check()
    assert [segment.touched for segment in segments] == touched


def test_grants_move_to_a_new_connection() -> None:
    scene = Scene()
    write = scene.write()
    scene.session.move(ONE, TWO)
    scene.grants.give_back(scene.session, write, ONE)
    assert scene.session.reserved == 1
    scene.grants.give_back(scene.session, write, TWO)
    assert scene.session.reserved == 0


def test_leases_of_a_session_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same segment may be leased often: the leases take memory, although they take no further slot."""
    monkeypatch.setattr(grants, "MAX_SESSION_BYTES", 5 * (grants.GRANT_BYTES + 2 * grants.ITEM_BYTES))
    cluster = calm(1)
    engine_, other = cluster.join(0), cluster.join(0)
    keys = prompt("p", 2)
    store(cluster, engine_, keys)
    replies = [match(cluster, engine_, keys) for _ in range(8)]
    assert [reply.hits for reply in replies] == [2] * 5 + [0] * 3
    assert replies[7].codes[0] == Code.SESSION_LIMIT
    (again,) = prompt("q", 1)
    assert prepare(cluster, engine_, [again]).codes == bytes([Code.SESSION_LIMIT])
    assert match(cluster, other, keys).hits == 2
    cluster.check()
    for reply in replies[:5]:
        release(cluster, engine_, reply.lease, 2)
    assert match(cluster, engine_, keys).hits == 2
    cluster.check()


def test_leases_of_a_tenant_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "MAX_BYTES", 2 * 5 * (grants.GRANT_BYTES + grants.ITEM_BYTES))
    cluster = calm(1, quotas={"red": 1.0, "blue": 1.0})
    red = [cluster.join(0) for _ in range(3)]
    blue = cluster.join(0, tenant="blue")
    keys = prompt("p", 1)
    store(cluster, red[0], keys)
    store(cluster, blue, keys)
    assert [match(cluster, red[number % 3], keys).hits for number in range(8)] == [1] * 5 + [0] * 3
    assert match(cluster, blue, keys).hits == 1
    cluster.check()


def test_processes_of_grants_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a lease and of a write are bounded in bytes."""
    cluster = calm(1)
    engine_ = cluster.join(0, processes=3)
    keys = prompt("p", 2)
    store(cluster, engine_, keys)
    _, second, third = engine_.processes
    lease = match(cluster, engine_, keys).lease
    write = prepare(cluster, engine_, prompt("q", 2)).write
    kept = 2 * grants.GRANT_BYTES + 4 * grants.ITEM_BYTES
    more = 2 * grants.PROCESS_BYTES + 2 * (grants.HELD_BYTES + grants.WRITER_BYTES)
    monkeypatch.setattr(grants, "MAX_SESSION_BYTES", kept + more)
    attached = [answer(cluster, process, engine.Attach, at) for process in (second, third) for at in (lease, write)]
    assert [reply.codes for reply in attached] == [
        bytes([Code.LOCAL] * 2),
        bytes([Code.RESERVED] * 2),
        b"",
        bytes([Code.SESSION_LIMIT] * 2),
    ]
    cluster.check()
