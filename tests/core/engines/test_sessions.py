"""Sessions: their limit, their end, and the grants of a session that is silent or dead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.scenes import (
    answer,
    calm,
    fetch,
    match,
    most_at_once,
    placed,
    prepare,
    said,
    store,
    stored,
)
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core import events, instructions
from tokenlake.core.engines import sessions
from tokenlake.hints import NO_HINTS
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys


def test_an_expired_write_keeps_its_slots_quarantined() -> None:
    cluster = calm(reservation_s=60.0)
    silent, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    cluster.run_for(0.01)
    prepared = prepare(cluster, silent, keys)
    silent.silent_until = cluster.clock.now + 5.0
    cluster.run_for(2 * cluster.lease_s)
    assert list(prepare(cluster, other, keys).codes) == [Code.RESERVED] * 2
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [2]
    beat = answer(cluster, silent.processes[0], engine.Heartbeat)
    assert not beat.alive
    late = answer(cluster, silent.processes[0], engine.Commit, prepared.write, (0, 1), 3, bytes(32))
    assert list(late.codes) == [Code.EXPIRED] * 2
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [0]


def test_writes_of_an_expired_session_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PIECE", 2)
    cluster = calm(reservation_s=60.0, dirty_share=1.0, session_reserve_share=1.0)
    silent = cluster.join(2)
    keys = placed(cluster, 0, 1, 6)
    cluster.run_for(0.01)
    for key in keys:
        prepare(cluster, silent, [key])
    silent.silent_until = cluster.clock.now + 5.0
    cluster.run_for(2 * cluster.lease_s)
    assert len(said(cluster, 2, peer.ClearInFlight)) == 6
    assert most_at_once(cluster, 2, peer.ClearInFlight) == 2
    assert [pool.quarantined for pool in cluster.core(2).store.pools()] == [6]
    cluster.check()


def test_sessions_beyond_the_limit_and_unknown_ones_are_refused() -> None:
    cluster = calm(max_sessions=1)
    for connection, session in enumerate((0, 0, 4711), 1):
        cluster.node(0).deliver(events.Joined(connection, 1, "red", 64, 2, 16, session, 0))
    refused = [i.message.reason for i in said(cluster, 0, instructions.Answer) if isinstance(i.message, engine.Failed)]
    assert "max_sessions" in refused[0]
    assert "session 4711 does not exist" in refused[1]


def test_each_tenant_has_its_part_of_the_sessions() -> None:
    cluster = calm(max_sessions=5, quotas={"red": 1.0, "blue": 1.0})
    for connection, tenant in enumerate(("red", "red", "red", "blue", "blue", "blue"), 1):
        cluster.node(0).deliver(events.Joined(connection, 1, tenant, 64, 2, 16, 0, 0))
    refused = [i.message.reason for i in said(cluster, 0, instructions.Answer) if isinstance(i.message, engine.Failed)]
    expected = [f"tenant '{name}' has 2 sessions, its part of 'max_sessions' of 5" for name in ("red", "blue")]
    assert [text.partition(";")[0] for text in refused] == expected
    cluster.node(0).deliver(events.ProcessGone(1))
    cluster.node(0).deliver(events.Joined(7, 1, "red", 64, 2, 16, 0, 0))
    assert cluster.core(0).census()["sessions"] == 4
    cluster.check()


def test_remote_leases_are_renewed_until_the_engine_ends() -> None:
    cluster, reader, keys = stored(2, peer_lease_s=1.0)
    lease = match(cluster, reader, keys).lease
    for _ in range(6):
        cluster.run_for(0.5)
        answer(cluster, reader.processes[0], engine.Heartbeat)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) > 0
    assert list(fetch(cluster, reader, lease, 2).codes) == [Code.LOCAL] * 2
    reader.die()
    cluster.run_for(1.5)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) == 0


def test_remote_leases_of_a_silent_node_end() -> None:
    cluster, reader, keys = stored(2, peer_lease_s=1.0)
    match(cluster, reader, keys)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) > 0
    cluster.node(2).freeze()
    cluster.run_for(1.5)
    assert sum(cluster.core(node).census()["leases to peers"] for node in (0, 1)) == 0


def test_remote_leases_are_renewed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PIECE", 2)
    cluster, reader, keys = stored(peer_lease_s=1.0)
    leases = [match(cluster, reader, keys).lease for _ in range(5)]
    for _ in range(6):
        cluster.run_for(0.5)
        answer(cluster, reader.processes[0], engine.Heartbeat)
    assert all(len(message.leases) <= 2 for message in said(cluster, 2, peer.RenewLease))
    assert most_at_once(cluster, 2, peer.RenewLease) == 1
    assert list(fetch(cluster, reader, leases[0], 1).codes) == [Code.LOCAL]
    assert cluster.core(0).census()["leases to peers"] == 5


def large() -> tuple[Cluster, Engine, list[SegmentKey]]:
    """A node that holds a prompt of more than three times `PIECE` segments, and its engine."""
    keys = prompt("long", 3 * sessions.PIECE + 7)
    cluster = calm(2, regions=500, session_reserve_share=1.0, session_lease_share=1.0, dirty_share=0.9)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    for first in range(0, len(keys), sessions.PIECE):
        store(cluster, writer, keys[first : first + sessions.PIECE], first)
    return cluster, writer, keys


def given_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items that each event of node 0 gives back from now on."""
    grants, counts = cluster.core(0)._grants, list[int]()
    release = grants.release

    def counted(session, connection, ranges, read):  # type: ignore[no-untyped-def]
        ranges = list(ranges)
        counts.append(sum(stop - start for _, start, stop in ranges))
        release(session, connection, ranges, read)

    monkeypatch.setattr(grants, "release", counted)
    return counts


def test_a_dead_process_gives_back_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, reader, keys = large()
    leased = sum(match(cluster, reader, keys).hits for _ in range(2))
    counts = given_back(cluster, monkeypatch)
    reader.die()
    cluster.run_for(1.0)
    assert max(counts) <= sessions.PIECE
    assert sum(counts) == leased == 2 * len(keys)
    assert cluster.core(0).idle()


def test_lost_grants_are_given_back_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that attaches to one of them again meanwhile keeps what it holds then."""
    cluster, reader, keys = large()
    kept, lost, again = [match(cluster, reader, keys).lease for _ in range(3)]
    writes = [prepare(cluster, reader, prompt(f"new {at}", 3)).write for at in range(2)]
    counts = given_back(cluster, monkeypatch)
    process = reader.processes[0]
    process.tell(engine.ReconcileGrants((kept,), tuple(writes[:1])))
    assert answer(cluster, process, engine.Attach, again).hits == len(keys)
    [session] = cluster.core(0)._sessions
    assert len(session.leases) == 3, "some is given back later"
    cluster.check()
    cluster.run_for(1.0)
    assert max(counts) <= sessions.PIECE
    assert sum(counts) == 2 * len(keys), "the process holds one of the two anew"
    assert [int(lease) for lease in session.leases] == [kept, again]
    assert [int(write) for write in session.writes] == writes[:1]
    assert lost not in session.leases
    reader.die()
    cluster.run_for(1.0)
    assert cluster.core(0).idle()


def test_what_names_more_than_one_event_may_change_is_refused() -> None:
    cluster, reader, keys = large()
    lease, many = match(cluster, reader, keys).lease, join_keys(keys[: engine.MAX_CHANGED + 1])
    ranges = (lease, 0, engine.MAX_CHANGED), (lease, engine.MAX_CHANGED, engine.MAX_CHANGED + 1)
    for message in (engine.Release(ranges), engine.Hint(many, NO_HINTS), engine.Prepare(1, many, 0)):
        with pytest.raises(ValueError, match="the limit is 128"):
            cluster.core(0).handle(events.Requested(reader.processes[0].connection, message), cluster.clock.now)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 900), st.integers(0, 500)), max_size=80))
def test_releases_of_any_ranges(drawn: list[tuple[int, int, int]]) -> None:
    """Each is within the limits; together they name the same segments, those of a range from its end on."""
    ranges = [(lease, start, start + count) for lease, start, count in drawn]
    parts = list(engine.releasable(ranges))
    for part in parts:
        assert 0 < len(part) <= engine.MAX_RANGES
        assert sum(stop - start for _, start, stop in part) <= engine.MAX_CHANGED
    named = [each for part in parts for each in part]
    whole: list[tuple[int, int, int]] = []
    for lease, start, stop in named:
        # A piece that ends where the one before began continues it.
        if whole and len(whole) <= len(ranges) and whole[-1] != ranges[len(whole) - 1]:
            assert whole[-1][:2] == (lease, stop)
            whole[-1] = lease, start, whole[-1][2]
        else:
            whole.append((lease, start, stop))
    assert whole == ranges
