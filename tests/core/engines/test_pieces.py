"""Requests of an engine that are cut into pieces: no event handles more than `PIECE` segments."""

from __future__ import annotations

import pytest

from tests.core.scenes import answer, calm, match, prepare
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.engines.grants import PIECE
from tokenlake.core.engines.pieces import RANGES, LongRequest
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys

COUNT = 3 * PIECE + 7
KEYS = prompt("long", COUNT)


def large() -> tuple[Cluster, Engine]:
    """A node that holds a prompt of `COUNT` segments, and its engine."""
    cluster = calm(2, regions=200, session_reserve_share=1.0, session_lease_share=1.0, dirty_share=0.9)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    stored = 0
    while stored < COUNT:
        prepared = prepare(cluster, writer, KEYS[stored:], stored)
        assert prepared.codes.count(Code.RESERVED) == min(PIECE, COUNT - stored), "more than a piece is not reserved"
        indices = tuple(range(prepared.codes.count(Code.RESERVED)))
        done = answer(cluster, writer.processes[0], engine.Commit, prepared.write, indices, 3, bytes(16 * len(indices)))
        assert set(done.codes) == {Code.COMMITTED}
        stored += len(indices)
    return cluster, writer


def pieces(cluster: Cluster, reader: Engine, message: LongRequest) -> list[engine.EngineRequest]:
    """The pieces of a request, each of which is handled before the next one is made."""
    found, connection = [], reader.processes[0].connection
    for piece in cluster.core(0).pieces(connection, message):
        found.append(piece)
        cluster.core(0).handle(events.Requested(connection, piece), cluster.clock.now)
        cluster.core(0).check_integrity()
    return found


@pytest.mark.parametrize("step", [1, 5, PIECE, 2 * PIECE, COUNT])
def test_no_piece_of_a_release_gives_back_more_than_a_piece(step: int) -> None:
    cluster, reader = large()
    lease = match(cluster, reader, KEYS).lease
    ranges = tuple((lease, at, at + step) for at in range(0, COUNT, step))
    found = pieces(cluster, reader, engine.Release(((4711, 0, 9), *ranges)))
    for piece in found:
        assert isinstance(piece, engine.Release)
        assert len(piece.ranges) <= RANGES
        assert sum(stop - start for _, start, stop in piece.ranges) <= PIECE
    assert cluster.core(0).census()["leases"] == 0


def test_a_range_is_given_back_from_its_end_on() -> None:
    """The eviction policy keeps the segment longest that was given back last: the first one of the prompt."""
    cluster, reader = large()
    lease = match(cluster, reader, KEYS).lease
    found = pieces(cluster, reader, engine.Release(((lease, 0, (1 << 32) - 1),)))
    ranges = [each for piece in found if isinstance(piece, engine.Release) for each in piece.ranges]
    assert [stop for _, _, stop in ranges] == [COUNT, *(start for _, start, _ in ranges[:-1])]
    assert ranges[-1][1] == 0


def test_a_lease_of_the_session_only() -> None:
    cluster, reader = large()
    other = cluster.join(0)
    cluster.run_for(0.05)
    lease = match(cluster, reader, KEYS).lease
    assert pieces(cluster, other, engine.Release(((lease, 0, COUNT),))) == []
    assert cluster.core(0).census()["leases"] == 1


def test_no_piece_of_a_hint_names_more_than_a_piece() -> None:
    cluster, reader = large()
    lease = match(cluster, reader, KEYS).lease
    hints = Hints(Outlook.OVER, priority=-1)
    found = pieces(cluster, reader, engine.Hint(join_keys(KEYS[:PIECE]), hints, lease))
    named: list[SegmentKey] = []
    for piece in found:
        assert isinstance(piece, engine.Hint)
        assert len(piece.keys) <= PIECE * KEY_BYTES
        named += [SegmentKey(piece.keys[at : at + KEY_BYTES]) for at in range(0, len(piece.keys), KEY_BYTES)]
    assert named == [*KEYS[:PIECE], *KEYS]
    assert {segment.hints.priority for segment in cluster.core(0).store.segments()} == {-1}
    short = engine.Hint(join_keys(KEYS[:3]), hints)
    assert pieces(cluster, reader, short) == [short]


def test_pieces_of_a_reconciliation() -> None:
    """No piece of a reconciliation gives back more than a piece."""
    cluster, reader = large()
    kept, *lost = [match(cluster, reader, KEYS).lease for _ in range(3)]
    writes = tuple(prepare(cluster, reader, prompt(f"new {at}", 3)).write for at in range(2))
    found = pieces(cluster, reader, engine.ReconcileGrants((kept,), writes[:1]))
    for piece in found:
        if isinstance(piece, engine.Release):
            assert sum(stop - start for _, start, stop in piece.ranges) <= PIECE
            assert {lease for lease, _, _ in piece.ranges} <= set(lost)
        else:
            assert piece == engine.Abort(writes[1]) or isinstance(piece, engine.ReconcileGrants)
    [session] = cluster.core(0)._sessions
    assert list(session.leases) == [LeaseId(kept)]
    assert [int(write) for write in session.writes] == [writes[0]]


def test_what_no_client_sends_is_refused_as_a_whole() -> None:
    cluster, reader = large()
    connection = reader.processes[0].connection
    for message in (engine.Release(((1, 5, 2),)), engine.Hint(bytes(KEY_BYTES * PIECE + 1), Hints(Outlook.OVER))):
        assert list(cluster.core(0).pieces(connection, message)) == [message]
        with pytest.raises(ValueError, match=r"begins at|multiple of"):
            cluster.core(0).handle(events.Requested(connection, message), cluster.clock.now)


def test_pieces_of_a_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of a dead process are given back a piece at a time."""
    cluster, reader = large()
    leased = sum(match(cluster, reader, KEYS).hits for _ in range(2))
    core, given = cluster.core(0), []
    release = core._grants.release

    def counted(session, connection, ranges, read):  # type: ignore[no-untyped-def]
        ranges = list(ranges)
        given.append(sum(stop - start for _, start, stop in ranges))
        release(session, connection, ranges, read)

    monkeypatch.setattr(core._grants, "release", counted)
    reader.die()
    cluster.run_for(1.0)
    assert max(given) <= PIECE
    assert sum(given) == leased > COUNT
    assert core.idle()
