"""Sessions: their limit, their end, and the grants of a session that is silent or dead."""

from __future__ import annotations

import pytest

from tests.core.scenes import answer, calm, fetch, match, most_at_once, placed, prepare, said, stored
from tokenlake.core import events, instructions
from tokenlake.core.engines import sessions
from tokenlake.wire import Code, engine, peer


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
