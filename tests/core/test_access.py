"""What a request did with its prompt reaches whoever keeps the segments, whichever node served it."""

from __future__ import annotations

import pytest

from tests.core.scenes import answer, calm, copies, fetch, match, prepare, store, tell
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core.access import MAX_RECENT_MATCHES, RecentMatches, access_after
from tokenlake.hints import NEVER, AccessRecord, Hints, Outlook
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import Kind
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys

KEYS = prompt("uses", 12)
PATIENCE_S = 0.5


def turn(cluster: Cluster, reader: Engine, keys: list[SegmentKey], window: int = 100) -> int:
    """Match, fetch, release, store what was missing, in windows. How many were found."""
    reply = match(cluster, reader, keys)
    if reply.hits:
        fetch(cluster, reader, reply.lease, reply.hits)
        tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, reply.hits),)))
    for start in range(reply.hits, len(keys), window):
        store(cluster, reader, keys[start : start + window], start)
    cluster.run_for(PATIENCE_S)
    return int(reply.hits)


def accesses(cluster: Cluster, keys: list[SegmentKey]) -> list[AccessRecord]:
    """As the keeper of each segment knows it."""
    directory_nodes = [[each for each in copies(cluster, key).values() if each.kind is Kind.PRIMARY] for key in keys]
    return [directory_node[0].hints.access for directory_node in directory_nodes]


def test_the_second_turn_reaches_every_keeper_through_another_node() -> None:
    cluster = calm(regions=16)
    first, second = cluster.join(0), cluster.join(1)
    assert turn(cluster, first, KEYS[:4]) == 0
    assert accesses(cluster, KEYS[:4]) == [AccessRecord(4, 0)] * 4
    cluster.run_for(2.0)
    assert turn(cluster, second, KEYS[:7], window=2) == 4
    known = accesses(cluster, KEYS[:7])
    assert [access.segments for access in known] == [7] * 7
    assert [(access.hits, access.turn, access.left, access.previous_gap_s) for access in known] == [
        (4, 1, 0, NEVER)
    ] * 7
    gap = known[0].gap_s
    assert 2.0 < gap < 5.0
    assert known == [AccessRecord(7, 4, 1, gap, NEVER, 0)] * 7
    cluster.run_for(1.0)
    assert turn(cluster, first, KEYS[:9]) == 7
    third = accesses(cluster, KEYS[:9])
    assert {(access.turn, access.previous_gap_s) for access in third} == {(2, gap)}
    assert all(access.gap_s < gap for access in third)


def test_a_branch_starts_anew_and_the_trunk_remembers_only_the_branch() -> None:
    cluster = calm(regions=16)
    first, second = cluster.join(0), cluster.join(1)
    turn(cluster, first, KEYS[:8])
    branch = [*KEYS[:3], *prompt("branch", 2)]
    assert turn(cluster, second, branch) == 3
    known = accesses(cluster, branch)
    assert {(access.segments, access.hits, access.turn, access.left) for access in known} == {(5, 3, 0, 5)}
    assert accesses(cluster, KEYS[3:8]) == [AccessRecord(8, 0)] * 5


def last_access(cluster: Cluster, key: SegmentKey) -> AccessRecord:
    """As any copy of it shows."""
    return next(iter(copies(cluster, key).values())).hints.access


def test_what_lies_behind_a_gap_is_known() -> None:
    cluster = calm(regions=16)
    writer = cluster.join(0)
    store(cluster, writer, KEYS[2:5], 2)
    for node, known in enumerate((5, 6, 7)):
        cluster.run_for(1.0)
        reader = cluster.join(node)
        assert turn(cluster, reader, KEYS[:known]) == (0 if node == 0 else known - 1)
        if node == 0:
            access = last_access(cluster, KEYS[0])
            assert (access.segments, access.hits, access.remembered, access.turn, access.left) == (5, 0, 5, 1, 0)
            assert 1.0 < access.gap_s < 3.0


@pytest.mark.parametrize("asker", [0, 1], ids=["the node that wrote it", "another"])
def test_a_conversation_goes_on_after_all_of_it_was_evicted(asker: int) -> None:
    cluster = calm(2, regions=3, eviction="forecast")
    engines = [cluster.join(0), cluster.join(1)]
    assert turn(cluster, engines[0], KEYS[:6]) == 0
    for number in range(200):
        turn(cluster, engines[number % 2], prompt(f"crowd {number}", 6))
        if not any(copies(cluster, key) for key in KEYS[:6]):
            break
    assert not any(copies(cluster, key) for key in KEYS[:6])
    stores = [cluster.core(node).store for node in (0, 1)]
    remembered = [store.remembers(TenantId("red"), KEYS[:6], cluster.clock.now) for store in stores]
    # What nobody took as a primary copy nobody remembers.
    depth = max(each[0] for each in remembered if each is not None) + 1
    assert depth > 1
    assert turn(cluster, engines[asker], KEYS[:8]) == 0
    kept = [key for key in KEYS[:8] if copies(cluster, key)]
    known = last_access(cluster, kept[0])
    assert (known.segments, known.hits, known.remembered, known.left) == (8, 0, depth, 6 - depth)
    assert known.gap_s >= PATIENCE_S


def test_of_two_who_remember_the_same_segment_the_later_word_counts() -> None:
    old, new = (4, AccessRecord(9, 2, 3), 50.0), (4, AccessRecord(5, 3, 7), 2.0)
    shallow = (1, AccessRecord(2, 0, 1), 1.0)
    assert access_after([old, shallow, new], 6, 1) == AccessRecord(6, 1, 8, 2.0, NEVER, 0, remembered=4)
    assert access_after([shallow], 6, 4) == AccessRecord.after(shallow[1], 1.0, 6, 4, 4)
    assert access_after([], 6, 4) == AccessRecord(6, 4)


def test_a_node_that_knows_of_more_keys_than_it_was_asked_for_is_refused() -> None:
    cluster = calm(2, regions=16)
    reader = cluster.join(0)
    cluster.core(1)._serving.lookup = lambda node, message: peer.LookupReply(  # type: ignore[method-assign]
        message.call,
        0,
        bytes([Code.MISSING]) * 4,
        (),
        (0.0, 0.0, 0.0),
        0.0,
        5,
        AccessRecord(9, 9),
        1.0,
    )
    with pytest.raises(ValueError, match="knows of key 5 of 4"):
        match(cluster, reader, KEYS[:4])


def test_what_is_stored_without_a_match_says_what_it_shows() -> None:
    cluster = calm(regions=16)
    writer = cluster.join(0)
    prepare(cluster, writer, KEYS[2:5], 2)
    reserved = [next(iter(copies(cluster, key).values())) for key in KEYS[2:5]]
    assert [segment.hints.access for segment in reserved] == [AccessRecord(5, 2)] * 3


def test_what_an_engine_says_of_its_use_is_not_listened_to() -> None:
    cluster = calm(regions=16)
    writer = cluster.join(0)
    store(cluster, writer, KEYS[:2])
    lie = Hints(Outlook.GOES_ON, output_tokens=7, access=AccessRecord(900, 800, 70))
    reply = answer(cluster, writer.processes[0], engine.Match, join_keys(KEYS[:2]), 0.0, True, "", lie)
    tell(cluster, writer.processes[0], engine.Hint(join_keys(KEYS[:2]), lie, reply.lease))
    tell(cluster, writer.processes[0], engine.Release(((reply.lease, 0, 2),)))
    cluster.run_for(PATIENCE_S)
    told = [segment.hints for key in KEYS[:2] for segment in copies(cluster, key).values()]
    assert {(hints.outlook, hints.output_tokens) for hints in told} == {(Outlook.GOES_ON, 7)}
    assert {(hints.access.segments, hints.access.turn) for hints in told} == {(2, 1)}


@pytest.mark.parametrize("between", [0, MAX_RECENT_MATCHES - 1, MAX_RECENT_MATCHES])
def test_a_session_remembers_its_last_matches(between: int) -> None:
    recent = RecentMatches()
    recent.add(join_keys(KEYS), AccessRecord(12, 3, 2))
    for number in range(between):
        recent.add(join_keys(prompt(f"other {number}", 5)), AccessRecord(5, 0))
    known = between < MAX_RECENT_MATCHES
    assert recent.access(KEYS[3:6], 3) == (AccessRecord(12, 3, 2) if known else AccessRecord(6, 3))
    assert recent.access(KEYS[6:], 6) == (AccessRecord(12, 3, 2) if known else AccessRecord(12, 6))
    assert recent.access(KEYS[3:6], 4) == AccessRecord(7, 4)


def test_what_a_node_that_lies_says_of_a_turn_can_be_told_on() -> None:
    """Else whoever is told it would take this node for a liar."""
    lie = peer.LookupReply(1, 0, b"", (), (0.0, 0.0, 0.0), 0.0, 4, AccessRecord(4, 4, (1 << 32) - 1, 1e9, 1e9, 4), 1e9)
    heard = decode(peer.peer_decoder, encode(lie))
    assert isinstance(heard, peer.LookupReply)
    told = peer.Touched(
        "red", bytes(32), Hints(access=AccessRecord.after(heard.last_access, heard.last_access_age_s, 5, 4, 4))
    )
    assert decode(peer.peer_decoder, encode(told)) == told
