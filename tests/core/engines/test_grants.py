"""Grants: bounds per session, items and slots that several processes hold, and their end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.scenes import answer, calm, match, missed, prepare, release, store, supplied
from tests.sim.prompts import prompt
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, CoreConfig
from tokenlake.core.engines import grants
from tokenlake.core.engines.access import Touches
from tokenlake.core.engines.grants import Grants, Lease, SessionGrants, Write
from tokenlake.core.instructions import SendToPeer
from tokenlake.core.report.account import Account, Source
from tokenlake.core.report.misses import Beyond
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import NO_HINTS
from tokenlake.identity import ConnectionId, Incarnation, LeaseId, NodeId, SegmentKey, TenantId, WriteId
from tokenlake.memory import Kind, Segment, State
from tokenlake.wire import Code, engine, peer

RED, SLOT_BYTES, TOKENS = TenantId("red"), 1024, 16
ONE, TWO = ConnectionId(1), ConnectionId(2)
OTHER = NodeId("b")


def key(number: int) -> SegmentKey:
    return SegmentKey(number.to_bytes(32, "big"))


class Scene:
    """A node with eight slots and one session of `processes`."""

    def __init__(self) -> None:
        self.context = Context(CoreConfig("a", 1, RingRecord.of({"a": 1, "b": 1}), 1, 8 * SLOT_BYTES))
        peers = Peers(self.context, *4 * [lambda peer_: None])
        peers.came_up(OTHER, Incarnation(1))
        self.withdrawn: list[SegmentKey] = []
        touches = Touches(self.context, peers, lambda tenant, key: None, lambda segments: None)
        self.grants = Grants(self.context, peers, touches, lambda tenant, keys: self.withdrawn.extend(keys))
        self.session = SessionGrants(RED, SLOT_BYTES, TOKENS)

    def reserve(self, number: int) -> Segment:
        segment = self.context.store.reserve(RED, SLOT_BYTES, key(number), Kind.CACHED, number, 0.0)
        assert isinstance(segment, Segment)
        return segment

    def write(self, count: int, *connections: ConnectionId) -> Write:
        write = Write(WriteId(7), connections[0])
        write.open = {number: self.reserve(number) for number in range(count)}
        self.grants.add_write(self.session, write)
        for connection in connections[1:]:
            assert self.grants.attach(self.session, write, connection)
        return write

    def lease(self, places: Sequence[NodeId | None]) -> Lease:
        """One item per place: None is a segment of this node."""
        segments = [self.reserve(number) if place is None else None for number, place in enumerate(places)]
        for segment in segments:
            if segment is not None:
                self.context.store.publish(segment, b"", 0.0)
        keys = [key(number) for number in range(len(places))]
        remote_leases = [(OTHER, 4711)] if OTHER in places else []
        account = Account(RED, TOKENS, SLOT_BYTES, len(keys), 0, range(len(keys)), Beyond())
        lease = Lease(LeaseId(9), keys, ONE, NO_HINTS, account, segments, places, remote_leases)
        self.grants.add_lease(self.session, lease)
        return lease

    def check(self) -> None:
        self.session.check_integrity()
        self.grants.check_integrity([self.session])
        pins = list(self.session.pins())
        assert all(segment.pins == pins.count(segment) for segment in self.context.store.segments())

    def released(self) -> list[tuple[int, ...]]:
        frames = [each.message for each in self.context.out if isinstance(each, SendToPeer)]
        return [frame.leases for frame in frames if isinstance(frame, peer.ReleaseLease)]


def test_an_item_is_pinned_until_its_last_process_gave_it_back() -> None:
    scene = Scene()
    lease = scene.lease([None, None])
    assert scene.grants.attach_lease(scene.session, lease, TWO)
    scene.grants.release(scene.session, ONE, [(lease, 0, 2)], False)
    scene.check()
    assert (scene.session.leased, scene.session.pinned) == (2, 2)
    scene.grants.release(scene.session, TWO, [(lease, 1, 2), (lease, 1, 9)], False)
    scene.check()
    assert [lease.code(0), lease.code(1)] == [Code.LOCAL, Code.LOST]
    scene.grants.release(scene.session, TWO, [(lease, 0, 1), (lease, 0, 2)], False)
    assert not scene.session.leases
    scene.check()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_beginning_given_back_first(processes: int) -> None:
    """A beginning that the last process gave back first counts as read last."""
    scene = Scene()
    lease = scene.lease([None, None])
    segments = [segment for segment in lease.segments if segment is not None]
    if processes == 2:
        assert scene.grants.attach_lease(scene.session, lease, TWO)
        scene.grants.release(scene.session, TWO, [(lease, 0, 2)], False)
    scene.context.now = 1.0
    scene.grants.release(scene.session, ONE, [(lease, 0, 1)], False)
    scene.context.now = 2.0
    scene.grants.release(scene.session, ONE, [(lease, 1, 2)], False)
    assert [segment.touched for segment in segments] == [2.0, 2.0]
    scene.check()


def test_a_beginning_of_two_processes() -> None:
    """The beginning counts as read once where two processes gave back the deepest items first."""
    scene = Scene()
    lease = scene.lease([None, None])
    segments = [segment for segment in lease.segments if segment is not None]
    assert scene.grants.attach_lease(scene.session, lease, TWO)
    for now, start in ((1.0, 1), (2.0, 0)):
        scene.context.now = now
        for connection in (ONE, TWO):
            scene.grants.release(scene.session, connection, [(lease, start, start + 1)], False)
    assert [segment.touched for segment in segments] == [2.0, 1.0]
    scene.check()


def test_the_end_of_a_lease_releases_the_leases_at_other_nodes() -> None:
    scene = Scene()
    lease = scene.lease([None, OTHER, OTHER])
    scene.grants.release(scene.session, ONE, [(lease, 0, 2)], True)
    assert scene.released() == []
    scene.grants.release(scene.session, ONE, [(lease, 2, 3)], False)
    assert scene.released() == [(4711,)]
    counters = scene.context.counters
    assert (supplied(counters, Source.LOCAL), supplied(counters, Source.SHIPPED)) == (TOKENS, TOKENS)
    assert missed(counters) == {"skipped": TOKENS}


def test_a_fetched_item_counts_as_one_slot() -> None:
    scene = Scene()
    lease = scene.lease([OTHER])
    for _ in range(2):
        scene.grants.item_expected(scene.session, lease, 0)
    assert scene.session.coming == 1
    segment = scene.reserve(0)
    scene.context.store.publish(segment, b"", 0.0)
    scene.grants.item_settled(scene.session, lease, 0)
    scene.grants.item_arrived(scene.session, lease, 0, segment)
    scene.grants.item_settled(scene.session, lease, 0)
    assert (scene.session.coming, scene.session.pinned, lease.code(0)) == (0, 1, Code.LOCAL)
    scene.check()


def test_an_expired_write_keeps_only_slots_that_may_be_written() -> None:
    scene = Scene()
    write = scene.write(2, ONE)
    segments = list(write.open.values())
    scene.grants.filled(write, ONE, 0)
    scene.grants.expire(scene.session, write)
    scene.grants.expire(scene.session, write)
    assert scene.withdrawn == [key(0), key(1)]
    assert [(segment.state, segment.pins) for segment in segments] == [(State.GONE, 0), (State.GONE, 1)]
    scene.session.check_integrity()
    scene.grants.give_back(scene.session, write, ONE)
    assert not scene.session.writes


def test_grants_move_to_a_new_connection() -> None:
    scene = Scene()
    write = scene.write(1, ONE)
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
