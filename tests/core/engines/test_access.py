"""Access records and hints: they reach every copy of a prompt's segments, whichever node served the request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.core.scenes import answer, calm, copies, fetch, match, most_at_once, placed, release, said, store, tell
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core import context
from tokenlake.core.engines import access
from tokenlake.core.engines.access import MAX_RECENT_MATCHES, RecentMatches, access_after
from tokenlake.hints import NEVER, NO_ACCESS, NO_HINTS, AccessRecord, Hints, Outlook
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind
from tokenlake.memory.eviction import LeastRecentlyUsed
from tokenlake.wire import engine, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys

KEYS = prompt("uses", 12)
REPORTED_S = 0.5
"""Two gossip intervals: reads are reported to the owners by then."""


def turn(cluster: Cluster, reader: Engine, keys: list[SegmentKey], window: int = 100) -> int:
    """Match, fetch, release, and store the missing part in windows. The number of hits."""
    reply = match(cluster, reader, keys)
    if reply.hits:
        fetch(cluster, reader, reply.lease, reply.hits)
        release(cluster, reader, reply.lease, reply.hits)
    for start in range(reply.hits, len(keys), window):
        store(cluster, reader, keys[start : start + window], start)
    cluster.run_for(REPORTED_S)
    return int(reply.hits)


def accesses(cluster: Cluster, keys: list[SegmentKey]) -> list[AccessRecord]:
    """The access record of each primary copy."""
    owned = [[each for each in copies(cluster, key).values() if each.kind is Kind.PRIMARY] for key in keys]
    return [segments[0].hints.access for segments in owned]


def last_access(cluster: Cluster, key: SegmentKey) -> AccessRecord:
    """The access record of any copy."""
    return next(iter(copies(cluster, key).values())).hints.access


def test_the_second_turn_reaches_every_primary_copy() -> None:
    cluster = calm(regions=16)
    first, second = cluster.join(0), cluster.join(1)
    assert turn(cluster, first, KEYS[:4]) == 0
    assert accesses(cluster, KEYS[:4]) == [AccessRecord(4, 0)] * 4
    cluster.run_for(2.0)
    assert turn(cluster, second, KEYS[:7], window=2) == 4
    known = accesses(cluster, KEYS[:7])
    assert [access.segments for access in known] == [7] * 7
    assert [(access.hits, access.turn, access.unshared, access.previous_gap_s) for access in known] == [
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


def test_a_segment_behind_a_gap_is_known() -> None:
    cluster = calm(regions=16)
    writer = cluster.join(0)
    store(cluster, writer, KEYS[2:5], 2)
    for node, known in enumerate((5, 6, 7)):
        cluster.run_for(1.0)
        reader = cluster.join(node)
        assert turn(cluster, reader, KEYS[:known]) == (0 if node == 0 else known - 1)
        if node == 0:
            access = last_access(cluster, KEYS[0])
            assert (access.segments, access.hits, access.remembered, access.turn, access.unshared) == (5, 0, 5, 1, 0)
            assert 1.0 < access.gap_s < 3.0


@pytest.mark.parametrize("asker", [0, 1], ids=["the writing node", "another node"])
def test_an_evicted_conversation_goes_on(asker: int) -> None:
    cluster = calm(2, regions=3)
    engines = [cluster.join(0), cluster.join(1)]
    keys = placed(cluster, 0, 1, 8, "evicted")
    assert turn(cluster, engines[0], keys[:6]) == 0
    for number in range(200):
        turn(cluster, engines[number % 2], prompt(f"crowd {number}", 6))
        if not any(copies(cluster, key) for key in keys[:6]):
            break
    assert not any(copies(cluster, key) for key in keys[:6])
    # Another node asks the directory node, which wrote them, for the keys at places 0, 1, 3 and 7.
    looked_up = [keys[:8], [keys[index] for index in (0, 1, 3, 7)]][asker]
    remembered = cluster.core(0).store.last_access(TenantId("red"), looked_up, cluster.clock.now)
    # Only segments that became primary copies are remembered.
    assert remembered is not None
    depth = keys.index(looked_up[remembered[0]]) + 1
    assert depth > 1
    assert turn(cluster, engines[asker], keys) == 0
    kept = [key for key in keys if copies(cluster, key)]
    known = last_access(cluster, kept[0])
    assert (known.segments, known.hits, known.remembered, known.unshared) == (8, 0, depth, 6 - depth)
    assert known.gap_s >= REPORTED_S


def test_the_latest_access_of_the_deepest_segment_counts() -> None:
    old, new = (4, AccessRecord(9, 2, 3), 50.0), (4, AccessRecord(5, 3, 7), 2.0)
    shallow = (1, AccessRecord(2, 0, 1), 1.0)
    assert access_after([old, shallow, new], 6, 1) == AccessRecord(6, 1, 8, 2.0, NEVER, 0, remembered=4)
    assert access_after([shallow], 6, 4) == AccessRecord.after(shallow[1], 1.0, 6, 4, 4)
    assert access_after([], 6, 4) == AccessRecord(6, 4)


def test_an_access_record_of_an_engine_is_ignored() -> None:
    cluster = calm(regions=16)
    writer = cluster.join(0)
    store(cluster, writer, KEYS[:2])
    lie = Hints(Outlook.GOES_ON, output_tokens=7, access=AccessRecord(900, 800, 70))
    reply = answer(cluster, writer.processes[0], engine.Match, join_keys(KEYS[:2]), 0.0, True, "", lie)
    tell(cluster, writer.processes[0], engine.Hint(join_keys(KEYS[:2]), lie, reply.lease))
    release(cluster, writer, reply.lease, 2)
    cluster.run_for(REPORTED_S)
    told = [segment.hints for key in KEYS[:2] for segment in copies(cluster, key).values()]
    assert {(hints.outlook, hints.output_tokens) for hints in told} == {(Outlook.GOES_ON, 7)}
    assert {(hints.access.segments, hints.access.turn) for hints in told} == {(2, 1)}


@pytest.mark.parametrize("between", [0, MAX_RECENT_MATCHES - 1, MAX_RECENT_MATCHES])
def test_a_session_remembers_its_recent_matches(between: int) -> None:
    recent = RecentMatches()
    recent.add(join_keys(KEYS), AccessRecord(12, 3, 2))
    for number in range(between):
        recent.add(join_keys(prompt(f"other {number}", 5)), AccessRecord(5, 0))
    known = between < MAX_RECENT_MATCHES
    first = KEYS[2] if known else None
    assert recent.access(KEYS[3:6], 3) == (
        AccessRecord(12, 3, 2) if known else AccessRecord(6, 3),
        (first, KEYS[3], KEYS[4]),
    )
    assert recent.access(KEYS[6:], 6)[0] == (AccessRecord(12, 3, 2) if known else AccessRecord(12, 6))
    assert recent.access(KEYS[:2], 0)[1] == (None, KEYS[0])
    assert recent.access(KEYS[3:6], 4) == (AccessRecord(7, 4), (None, KEYS[3], KEYS[4]))


def test_a_store_of_independent_keys_in_any_order() -> None:
    """A store of independent keys finds its match in any order."""
    recent, record = RecentMatches(), AccessRecord(12, 3, 2)
    recent.add(join_keys(KEYS), record, independent=True)
    assert recent.access([KEYS[6], KEYS[2]], 40) == (record, (None, None))
    assert recent.access(prompt("other", 2), 3)[0] == AccessRecord(5, 3)


def test_a_record_at_its_bounds_can_be_sent_on() -> None:
    """A record that arrives with values at their bounds stays within them when it is passed on. Otherwise the next
    receiver would refuse the frame."""
    lie = peer.LookupReply(1, 0, b"", (), (0.0, 0.0, 0.0), 0.0, 4, AccessRecord(4, 4, (1 << 32) - 1, 1e9, 1e9, 4), 1e9)
    heard = decode(peer.peer_decoder, encode(lie))
    assert isinstance(heard, peer.LookupReply)
    told = peer.Touched(
        "red", bytes(32), Hints(access=AccessRecord.after(heard.last_access, heard.last_access_age_s, 5, 4, 4))
    )
    assert decode(peer.peer_decoder, encode(told)) == told


# -- hints

CHAT = Hints(Outlook.GOES_ON, "chat")
OVER = Hints(Outlook.OVER, stop_reason="stop")
CHAT_OVER = Hints(Outlook.OVER, "chat", "stop")


def hints_of(cluster: Cluster, key: SegmentKey) -> dict[int, Hints]:
    """The hints of each copy, by node, without access records."""
    return {node: replace(segment.hints, access=NO_ACCESS) for node, segment in copies(cluster, key).items()}


def test_a_readers_hints_reach_the_owner() -> None:
    cluster = calm()
    writer, reader = cluster.join(2), cluster.join(1)
    keys = placed(cluster, 0, 2, 2)
    store(cluster, writer, keys)
    assert hints_of(cluster, keys[0]) == {2: NO_HINTS}
    reply = answer(cluster, reader.processes[0], engine.Match, join_keys(keys), 0.0, True, "r", CHAT)
    fetch(cluster, reader, reply.lease, 2)
    release(cluster, reader, reply.lease, 2)
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{1: CHAT, 2: CHAT}] * 2
    # A read without hints leaves the earlier ones.
    tell(cluster, reader.processes[0], engine.Release(((match(cluster, reader, keys).lease, 0, 2),)))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{1: CHAT, 2: CHAT}] * 2


@pytest.mark.parametrize("how", ["cached copies", "remote segments", "a lease"])
def test_late_hints_reach_every_copy_and_count_as_no_read(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner knows of no cached copies. Hints for a lease outlive its release. Those of another tenant have no
    effect."""
    # The learned policy counts the age of a segment from its last hints.
    monkeypatch.setattr(context, "Forecast", LeastRecentlyUsed)
    cluster = calm()
    writer, reader, stranger = cluster.join(2), cluster.join(1), cluster.join(1, tenant="blue")
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    tell(cluster, writer.processes[0], engine.Hint(join_keys(keys), CHAT))
    if how != "remote segments":
        fields = join_keys(keys), 0.0, True, "r", CHAT
        lease = answer(cluster, reader.processes[0], engine.Match, *fields).lease
        fetch(cluster, reader, lease, 2)
        if how == "cached copies":
            release(cluster, reader, lease, 2)
        cluster.run_for(0.5)
    touched = {node: segment.touched for node, segment in copies(cluster, keys[0]).items()}
    late = engine.Hint(b"", OVER, lease) if how == "a lease" else engine.Hint(join_keys(keys), OVER)
    tell(cluster, reader.processes[0], late)
    tell(cluster, stranger.processes[0], engine.Hint(join_keys(keys), CHAT))
    if how == "a lease":
        release(cluster, reader, lease, 2)
    cluster.run_for(0.5)
    told = {2: CHAT_OVER} if how == "remote segments" else {1: CHAT_OVER, 2: CHAT_OVER}
    assert [hints_of(cluster, key) for key in keys] == [told] * 2
    if how != "a lease":
        assert {node: segment.touched for node, segment in copies(cluster, keys[0]).items()} == touched
    cluster.check()


def test_hints_of_several_requests_stay_apart() -> None:
    cluster = calm()
    reader = cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, cluster.join(1), keys)
    assert turn(cluster, reader, keys) == 3
    before = len(said(cluster, 2, peer.Touched))
    process = reader.processes[0]
    for key, hints in zip(keys, (CHAT, OVER, CHAT), strict=True):
        reply = answer(cluster, process, engine.Match, key, 0.0, True, "r", hints)
        tell(cluster, process, engine.Release(((reply.lease, 0, 1),)))
    cluster.run_for(0.5)
    touched = [message for message in said(cluster, 2, peer.Touched)[before:] if message.hints is not None]
    told = [
        (message.keys, replace(message.hints, access=NO_ACCESS)) for message in touched if message.hints is not None
    ]
    assert told == [(keys[0], CHAT), (keys[1], OVER), (keys[2], CHAT)]


def test_reports_are_sent_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REPORTS", 2)
    cluster = calm()
    reader = cluster.join(2)
    (key,) = placed(cluster, 0, 1)
    store(cluster, cluster.join(1), [key])
    assert turn(cluster, reader, [key]) == 1
    before = len(said(cluster, 2, peer.Touched))
    for number in range(9):
        reader.processes[0].tell(engine.Hint(key, Hints(category=f"c{number}")))
    cluster.run_for(0.5)
    told = [message.hints for message in said(cluster, 2, peer.Touched)[before:]]
    assert [hints.category for hints in told if hints is not None] == [f"c{number}" for number in range(9)]
    assert most_at_once(cluster, 2, peer.Touched) == 2
