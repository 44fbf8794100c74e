"""Waiting for in-flight segments: a prompt that many engines ask for at once is computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.scenes import answer, ask, calm, copies, missed, placed, release, said, store, tell
from tests.sim.arena import REGION_BYTES, SHARDS, SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import SEGMENT_TOKENS, Engine, Storing
from tests.sim.prompts import prompt
from tokenlake.core import events
from tokenlake.core.engines import waiting
from tokenlake.core.engines.waiting import (
    IN_FLIGHT_MARKERS,
    IN_FLIGHT_WAITS,
    MAX_IN_FLIGHT_WAIT_S,
    MAX_MARKERS,
    UNANSWERED_WAITS,
)
from tokenlake.core.instructions import Welcomed
from tokenlake.directory.ring import Ring
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

COMPUTES_S = 0.3


def wait_for(
    reader: Engine, keys: list[SegmentKey], in_flight_wait_s: float, expected_s: float = 0.0
) -> list[engine.Matched]:
    """Ask for a match that may wait. The list that its reply will be in."""
    fields = join_keys(keys), 0.0, True, "", None, 0, in_flight_wait_s, 0.0, False, expected_s
    return ask(reader.processes[0], engine.Match, *fields)


def crowd(
    cluster: Cluster, engines: list[Engine], keys: list[SegmentKey], in_flight_wait_s: float
) -> tuple[list[engine.Matched], list[Engine]]:
    """All engines match at once, and those with missing segments compute and store them. Returns the replies, and the
    engines that computed."""
    replies = [wait_for(reader, keys, in_flight_wait_s) for reader in engines]
    computed: list[Engine] = []
    for _ in range(2000):
        cluster.run_for(0.001)
        for reader, got in zip(engines, replies, strict=True):
            if got and got[0].hits < len(keys) and reader not in computed:
                computed.append(reader)
                reader.store(keys, 0, Storing(fill_s=COMPUTES_S))
    cluster.check()
    return [reply for (reply,) in replies], computed


def scene(nodes: int = 4, each: int = 2, **rules: float) -> tuple[Cluster, list[Engine], list[SegmentKey]]:
    """`each` engines per node, and a prompt of three segments with different directory nodes."""
    cluster = calm(nodes, regions=16, dirty_share=1.0, session_reserve_share=1.0, **rules)
    engines = [cluster.join(node) for node in range(nodes) for _ in range(each)]
    cluster.run_for(0.1)
    keys = [*placed(cluster, 1, 2, 1), *placed(cluster, 0, 3, 1), *placed(cluster, 3, 0, 1)]
    return cluster, engines, keys


def test_one_engine_computes_and_all_read() -> None:
    cluster, engines, keys = scene()
    replies, computed = crowd(cluster, engines, keys, 2.0)
    assert len(computed) == 1
    assert sorted(reply.hits for reply in replies) == [0, *[3] * 7]
    cores = [cluster.core(node) for node in range(4)]
    assert sum(core.counters[IN_FLIGHT_MARKERS] for core in cores) == 1
    assert sum(core.counters[IN_FLIGHT_WAITS] for core in cores) == 7
    cluster.settle()
    cluster.check_settled()


def test_a_marker_that_ends_hands_the_work_on() -> None:
    cluster, engines, keys = scene(each=1)
    first, *others = engines
    got = wait_for(first, keys, 1.0)
    cluster.run_for(0.1)
    assert got[0].codes[0] == Code.MISSING
    waiting = [wait_for(e, keys, 5.0) for e in others]
    cluster.run_for(0.5)
    assert waiting == [[], [], []]
    # The first engine never stores. Its marker ends after a second, another engine is told to compute, and the wait of
    # the others ends.
    cluster.run_for(0.7)
    assert [len(replies) for replies in waiting].count(1) == 1
    cluster.run_for(5.0)
    assert [len(replies) for replies in waiting] == [1, 1, 1]
    assert all(replies[0].hits == 0 for replies in waiting)
    cluster.settle()
    cluster.check_settled()


def test_an_abort_hands_the_work_on_at_once() -> None:
    cluster, engines, keys = scene(each=1)
    prepared = ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    waiting = wait_for(engines[1], keys, 5.0)
    cluster.run_for(0.2)
    assert waiting == []
    tell(cluster, engines[0].processes[0], engine.Abort(prepared[0].write))
    cluster.run_for(0.2)
    assert waiting[0].hits == 0


def test_the_wait_is_bounded() -> None:
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    waiting = wait_for(engines[1], keys, 1e9)
    cluster.run_for(MAX_IN_FLIGHT_WAIT_S - 1.0)
    assert not waiting
    cluster.run_for(2.0)
    assert waiting[0].codes[0] == Code.PENDING
    cluster.check()


def test_the_wait_grows_with_the_missing_segments() -> None:
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    store(cluster, engines[2], keys[:2])
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys[2:]), 2)
    cluster.run_for(0.05)
    fields = join_keys(keys), 0.0, True, "", None, 0, 5.0
    short = ask(engines[1].processes[0], engine.Match, *fields, 0.3)
    whole = ask(engines[3].processes[0], engine.Match, *fields, 100.0)
    cluster.run_for(0.2)
    assert (short, whole) == ([], [])
    cluster.run_for(0.4)
    assert [(reply.hits, reply.codes[2]) for reply in short] == [(2, Code.PENDING)]
    assert whole == []
    cluster.run_for(5.0)
    assert [reply.hits for reply in whole] == [2]


def test_an_engine_that_dies_while_it_waits_leaves_nothing() -> None:
    cluster, engines, keys = scene(each=1)
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    wait_for(engines[1], keys, 5.0)
    cluster.run_for(0.1)
    engines[1].die()
    cluster.run_for(0.2)
    assert not cluster.core(1).census()["matches"]
    cluster.settle()
    cluster.check_settled()


@pytest.mark.parametrize("marked", [False, True], ids=["", "marked by another"])
@pytest.mark.parametrize("polled", [False, True], ids=["at its lookup", "at its poll"])
def test_death_before_a_marker_is_granted(polled: bool, marked: bool) -> None:
    """An engine that dies before its marker is granted keeps no other from computing, unless another engine of its node
    has set the marker meanwhile."""
    cluster, engines, keys = scene(each=1)
    beside = cluster.join(3)
    cluster.run_for(0.1)
    if polled:
        prepared = ask(engines[0].processes[0], engine.Prepare, keys[0], 0)
        cluster.run_for(0.05)
    wait_for(engines[3], keys[:1], 5.0)
    if polled:
        cluster.run_for(0.2)
        tell(cluster, engines[0].processes[0], engine.Abort(prepared[0].write))
    before = len(said(cluster, 3, peer.Lookup)) if polled else 0
    until = cluster.clock.now + 1.0
    while not any(each.marker_s for each in said(cluster, 3, peer.Lookup)[before:]) and cluster.clock.now < until:
        cluster.run_for(0.0001)
    cluster.node(3).deliver(events.ProcessGone(engines[3].processes[0].connection))
    if marked:
        mark(cluster, beside, keys[:1], 5.0)
    cluster.run_for(0.05)
    waiting = wait_for(engines[2], keys[:1], 5.0)
    cluster.run_for(0.3)
    assert [reply.codes[0] for reply in waiting] == ([] if marked else [Code.MISSING])


def test_segments_of_a_node_that_died_are_not_hits() -> None:
    cluster, engines, keys = scene(each=1)
    store(cluster, engines[1], keys[:1])
    assert copies(cluster, keys[0]).keys() <= {1, 2}
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys[1:]), 1)
    cluster.run_for(0.05)
    waiting = wait_for(engines[3], keys, 5.0)
    cluster.run_for(0.1)
    assert waiting == []
    cluster.node(1).crash()
    cluster.node(2).crash()
    cluster.run_for(0.5)
    assert waiting[0].hits == 0
    assert waiting[0].codes[0] == Code.UNKNOWN
    cluster.settle()
    cluster.check_settled()


@pytest.mark.parametrize("silent", ["directory node", "owner"])
def test_a_lookup_that_was_not_answered_is_repeated(silent: str) -> None:
    cluster, engines, keys = scene(each=1)
    writer, frozen = (0, 1) if silent == "directory node" else (1, 1)
    store(cluster, engines[writer], keys[:1])
    config = cluster.core(3).config
    cluster.node(frozen).freeze()
    waiting = wait_for(engines[3], keys[:1], 2.0)
    cluster.run_for(2 * config.match_deadline_s)
    assert waiting == []
    cluster.node(frozen).thaw()
    cluster.run_for(config.suspect_s)
    assert waiting[0].codes == bytes([Code.REMOTE])
    assert cluster.core(3).counters[UNANSWERED_WAITS] == 1
    release(cluster, engines[3], waiting[0].lease, 1)
    assert missed(cluster.core(3).counters) == {"skipped": SEGMENT_TOKENS}, "the node does not count as slow"
    cluster.settle()
    cluster.check_settled()


def test_lookups_of_a_frozen_node_are_repeated() -> None:
    """Lookups of a frozen node are repeated until it is suspect."""
    cluster, engines, keys = scene(each=1)
    store(cluster, engines[0], keys[:1])
    cluster.node(0).freeze()
    config = cluster.core(3).config
    for _ in range(2):
        waiting = wait_for(engines[3], keys[:1], 5.0)
        cluster.run_for(config.suspect_s + 4 * config.match_deadline_s)
        assert waiting[0].hits == 0
    # A SUSPECT node is not asked again.
    waiting = wait_for(engines[3], keys[:1], 5.0)
    cluster.run_for(2 * config.match_deadline_s)
    assert waiting[0].hits == 0


def test_a_waiting_match_asks_one_directory_node() -> None:
    cluster, engines, keys = scene(each=1)
    prepared = ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    before = {node: len(said(cluster, node, peer.LookupReply)) for node in range(4)}
    waiting = wait_for(engines[3], keys, 5.0)
    cluster.run_for(2.0)
    asked = {node: len(said(cluster, node, peer.LookupReply)) - before[node] for node in range(4)}
    assert asked.pop(1) > 10
    assert asked == {0: 1, 2: 0, 3: 0}
    tell(cluster, engines[0].processes[0], engine.Abort(prepared[0].write))
    cluster.run_for(0.2)
    assert waiting[0].codes[0] == Code.MISSING


# -- markers of engines


def marked() -> tuple[Cluster, Engine, Engine, list[SegmentKey]]:
    """A writer, a reader, and a prompt whose directory nodes are all nodes."""
    cluster = calm(regions=8, dirty_share=1.0, session_reserve_share=1.0, reservation_s=60.0)
    writer, reader = cluster.join(0), cluster.join(2)
    cluster.run_for(0.1)
    return cluster, writer, reader, [*placed(cluster, 1, 2, 2), *placed(cluster, 0, 1, 2), *placed(cluster, 2, 0, 1)]


def mark(cluster: Cluster, writer: Engine, keys: list[SegmentKey], seconds: float) -> None:
    tell(cluster, writer.processes[0], engine.MarkInFlight(join_keys(keys), seconds))
    cluster.run_for(0.02)


def test_a_prompt_stored_in_parts_is_awaited_to_its_end() -> None:
    cluster, writer, reader, keys = marked()
    mark(cluster, writer, keys, 5.0)
    waiting = wait_for(reader, keys, 5.0)
    for start, stop in ((0, 2), (2, 4)):
        cluster.run_for(0.3)
        store(cluster, writer, keys[start:stop], first=start)
        cluster.run_for(0.3)
        assert waiting == []
    store(cluster, writer, keys[4:], first=4)
    cluster.run_for(0.3)
    assert [reply.hits for reply in waiting] == [5]


def test_a_rest_without_markers_is_computed_by_the_reader() -> None:
    cluster, writer, reader, keys = marked()
    mark(cluster, writer, keys[:2], 5.0)
    waiting = wait_for(reader, keys, 5.0)
    cluster.run_for(0.3)
    store(cluster, writer, keys[:2])
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[2]) for reply in waiting] == [(2, Code.MISSING)]


@pytest.mark.parametrize("directory_node", [0, 1, 2], ids=["writer", "third node", "reader"])
def test_a_match_before_the_markers_that_it_expects(directory_node: int) -> None:
    """A match may come before the markers of the segments that it expects."""
    cluster, writer, reader, _ = marked()
    keys = placed(cluster, directory_node, (directory_node + 1) % 3, 2)
    expecting, other = wait_for(reader, keys, 5.0, 0.1), wait_for(cluster.join(2), keys, 5.0, 0.1)
    cluster.run_for(0.05)
    assert (expecting, other) == ([], [])
    mark(cluster, writer, keys, 5.0)
    cluster.run_for(0.3)
    assert (expecting, other) == ([], [])
    store(cluster, writer, keys)
    cluster.run_for(0.05)
    assert [reply.hits for reply in (*expecting, *other)] == [2, 2]


@pytest.mark.parametrize("directory_node", [0, 1, 2], ids=["writer", "third node", "reader"])
def test_expected_markers_that_never_come(directory_node: int) -> None:
    """Expected segments whose markers never come are computed by one reader."""
    cluster, _, reader, _ = marked()
    keys = placed(cluster, directory_node, (directory_node + 1) % 3, 2)
    waiting = [wait_for(one, keys, 5.0, 0.1) for one in (reader, cluster.join(2), cluster.join(1))]
    cluster.run_for(0.09)
    assert waiting == [[], [], []]
    cluster.run_for(0.15)
    (told,) = [replies[0] for replies in waiting if replies]
    assert (told.hits, told.codes[0]) == (0, Code.MISSING)


def test_the_last_segment_is_noticed_as_soon_as_the_first() -> None:
    """A prompt is stored in parts, which takes long; the pauses between the polls grow with each part only."""
    cluster, writer, reader, _ = marked()
    keys = placed(cluster, 1, 0, 8)
    mark(cluster, writer, keys, 5.0)
    waiting = wait_for(reader, keys, 5.0)
    for at, key in enumerate(keys):
        cluster.run_for(0.02)
        assert waiting == []
        writer.store([key], at, Storing(fill_s=0.001))
    until = cluster.clock.now + 0.015
    while not waiting and cluster.clock.now < until:
        cluster.run_for(0.0005)
    assert [reply.hits for reply in waiting] == [8]


def test_the_marker_of_a_reserved_segment_stays() -> None:
    cluster, writer, reader, keys = marked()
    mark(cluster, writer, keys, 5.0)
    ask(writer.processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    mark(cluster, writer, keys, 0.0)
    waiting = wait_for(reader, keys, 2.0)
    cluster.run_for(1.5)
    assert waiting == []


def withdraw(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    mark(cluster, writer, keys, 0.0)


def die(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    writer.die()


def let_time_pass(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    cluster.run_for(2.0)


def push_out(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    """The markers of a process are bounded: the oldest are dropped."""
    mark(cluster, writer, [SegmentKey(number.to_bytes(32, "big")) for number in range(2 * MAX_MARKERS)], 5.0)
    assert cluster.core(0).census()["in-flight markers"] == MAX_MARKERS


@pytest.mark.parametrize("expected_s", [0.0, 1.0], ids=["", "expected"])
@pytest.mark.parametrize("end", [withdraw, die, let_time_pass, push_out], ids=lambda end: end.__name__)
def test_the_end_of_markers_ends_the_wait(
    end: Callable[[Cluster, Engine, list[SegmentKey]], None], expected_s: float
) -> None:
    """Also that of a match that expected markers, once it has seen them."""
    cluster, writer, reader, keys = marked()
    store(cluster, writer, keys[:1])
    mark(cluster, writer, keys, 2.0)
    waiting = wait_for(reader, keys, 5.0, expected_s)
    cluster.run_for(0.3)
    assert waiting == []
    end(cluster, writer, keys)
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[1]) for reply in waiting] == [(1, Code.MISSING)]
    cluster.check()


def abort(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    prepared = answer(cluster, writer.processes[0], engine.Prepare, join_keys(keys), 0)
    tell(cluster, writer.processes[0], engine.Abort(prepared.write))


@pytest.mark.parametrize("end", [withdraw, die, push_out, abort], ids=lambda end: end.__name__)
def test_another_process_keeps_its_markers(
    end: Callable[[Cluster, Engine, list[SegmentKey]], None],
) -> None:
    cluster, writer, reader, keys = marked()
    other = cluster.join(0)
    cluster.run_for(0.1)
    for each in (writer, other):
        mark(cluster, each, keys, 5.0)
    waiting = wait_for(reader, keys, 5.0)
    if end is push_out:
        mark(cluster, writer, [SegmentKey(number.to_bytes(32, "big")) for number in range(MAX_MARKERS)], 5.0)
    else:
        end(cluster, writer, keys)
    cluster.run_for(0.3)
    assert waiting == []
    withdraw(cluster, other, keys)
    cluster.run_for(0.3)
    assert [reply.codes[0] for reply in waiting] == [Code.MISSING]


def test_a_process_told_to_compute_keeps_its_marker() -> None:
    """Its match got the marker; another process of its node withdraws those that it set meanwhile."""
    cluster, writer, reader, keys = marked()
    other = cluster.join(0)
    cluster.run_for(0.1)
    told = wait_for(writer, keys[:1], 5.0)
    cluster.run_for(0.1)
    assert told[0].codes[0] == Code.MISSING
    mark(cluster, other, keys[:1], 5.0)
    withdraw(cluster, other, keys[:1])
    waiting = wait_for(reader, keys[:1], 5.0)
    cluster.run_for(0.3)
    assert waiting == []
    die(cluster, writer, keys)
    cluster.run_for(0.3)
    assert [reply.codes[0] for reply in waiting] == [Code.MISSING]


def stored(cluster: Cluster, writer: Engine, keys: list[SegmentKey]) -> None:
    store(cluster, writer, keys)


@pytest.mark.parametrize("end", [let_time_pass, stored], ids=lambda end: end.__name__)
def test_markers_that_ended_leave_room(
    end: Callable[[Cluster, Engine, list[SegmentKey]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The markers of a tenant are bounded; those whose time is over or whose segments are stored do not count."""
    monkeypatch.setattr(waiting, "MAX_MARKERS_BY_TENANT", 4)
    cluster, writer, reader, keys = marked()
    other = cluster.join(0)
    cluster.run_for(0.1)
    mark(cluster, writer, keys[:4], 2.0)
    mark(cluster, other, keys[4:], 9.0)
    assert cluster.core(0).census()["in-flight markers"] == 4
    end(cluster, writer, keys[:4])
    mark(cluster, other, keys[4:], 9.0)
    assert cluster.core(0).census()["in-flight markers"] == 1
    asked = wait_for(reader, keys[4:], 5.0)
    cluster.run_for(0.3)
    assert asked == []


def test_the_time_of_a_marker_is_bounded() -> None:
    cluster, writer, _, keys = marked()
    mark(cluster, writer, keys, 1e9)
    assert max(message.deadline_s for message in said(cluster, 0, peer.MarkInFlight)) == MAX_IN_FLIGHT_WAIT_S


def test_markers_move_to_the_new_connection_of_a_process() -> None:
    cluster, writer, reader, keys = marked()
    mark(cluster, writer, keys, 5.0)
    session, old, new = said(cluster, 0, Welcomed)[-1].session, writer.processes[0].connection, 4711
    cluster.node(0).deliver(events.Joined(new, 1, "red", SLOT_BYTES, SHARDS, SEGMENT_TOKENS, session, old))
    waiting = wait_for(reader, keys, 5.0)
    cluster.run_for(0.3)
    assert waiting == []
    cluster.node(0).deliver(events.ProcessGone(new))
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[0]) for reply in waiting] == [(0, Code.MISSING)]
    assert cluster.core(0).census()["in-flight markers"] == 0


def test_matches_that_wait_for_one_segment_share_a_poll() -> None:
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    ask(engines[2].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    waiting = [wait_for(engines[0], keys, 5.0) for _ in range(100)]
    cluster.run_for(0.5)
    before = len(said(cluster, 0, peer.Lookup))
    cluster.run_for(1.0)
    assert len(said(cluster, 0, peer.Lookup)) - before <= 25
    assert cluster.core(0).census()["matches that wait"] == 100
    assert cluster.core(0).census()["polls"] == 1
    cluster.check()
    cluster.run_for(5.0)
    assert [replies[0].codes[0] for replies in waiting] == [Code.PENDING] * 100
    cluster.settle()
    cluster.check_settled()


def test_a_stored_segment_ends_the_wait_at_once() -> None:
    """The matches of the writer's node, and of the directory node, need no further poll."""
    cluster, engines, _ = scene(each=2, reservation_s=60.0)
    (key,) = placed(cluster, 1, 2)
    writer, beside, at_directory = engines[0], engines[1], engines[2]
    prepared = ask(writer.processes[0], engine.Prepare, key, 0)
    cluster.run_for(0.05)
    asked = [wait_for(reader, [key], 5.0) for reader in (beside, at_directory)]
    cluster.run_for(0.5)
    polls = len(said(cluster, 0, peer.Lookup))
    ask(writer.processes[0], engine.Commit, prepared[0].write, (0,), (1 << SHARDS) - 1, bytes(8 * SHARDS))
    cluster.run_for(0.005)
    assert [reply.hits for (reply,) in asked] == [1, 1]
    assert len(said(cluster, 0, peer.Lookup)) <= polls + 1
    cluster.check()


def test_a_tenant_has_a_limited_number_of_waiting_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 3)
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    ask(engines[1].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    asked = [wait_for(engines[0], keys, 2.0) for _ in range(5)]
    cluster.run_for(0.5)
    assert [len(replies) for replies in asked] == [0, 0, 0, 1, 1]
    assert asked[4][0].codes[0] == Code.PENDING
    cluster.check()
    cluster.run_for(2.5)
    assert [len(replies) for replies in asked] == [1] * 5
    cluster.settle()
    cluster.check_settled()


def test_polls_for_many_segments_keep_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    cluster, engines, _ = scene(each=1, reservation_s=60.0)
    keys = placed(cluster, 1, 2, 20)
    ask(engines[2].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    for key in keys:
        wait_for(engines[0], [key], 5.0)
    cluster.run_for(0.5)
    before = len(said(cluster, 0, peer.Lookup))
    cluster.run_for(1.0)
    assert len(said(cluster, 0, peer.Lookup)) - before <= 120
    cluster.check()


# -- while the ring changes


def test_waits_that_began_before_a_change() -> None:
    """The engine of n1 computes a segment, and those of other nodes wait for it when n4 joins, which becomes its
    directory node in place of n0 and does not know of the marker. Some engine computes the segment again, and those
    that go on waiting read it."""
    cluster = calm(4, regions=16, dirty_share=1.0, session_reserve_share=1.0, reservation_s=30.0, lease_s=60.0)
    engines = [cluster.join(node) for node in (0, 1, 2, 3)]
    cluster.run_for(0.1)
    before, after = cluster.core(0).ring, Ring(cluster.record.with_member("n4", 16 * REGION_BYTES))
    pairs = ((key, before.candidates(key)[0], after.candidates(key)[0]) for key in prompt("moves", 400))
    key = next(key for key, old, new in pairs if (old[0], new[0]) == ("n0", "n4") and "n0" not in new)
    wait_for(engines[1], [key], 8.0)
    cluster.run_for(0.05)
    waiting = [engines[at] for at in (0, 2, 3)]
    replies = [wait_for(each, [key], 8.0) for each in waiting]
    cluster.run_for(0.05)
    cluster.add()
    cluster.run_for(1.0)
    computing = [engine for engine, reply in zip(waiting, replies, strict=True) if reply]
    assert 1 <= len(computing) < len(waiting)
    for engine_ in (*computing, engines[1]):
        engine_.store([key], 0, Storing(fill_s=0.1))
    cluster.run_for(0.5)
    codes = [Code(reply.codes[0]) for (reply,) in replies]
    assert codes.count(Code.REMOTE) == len(waiting) - len(computing)
    cluster.settle()
    cluster.check_settled()


def test_a_match_whose_node_missed_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former directory node answers MISSING, and UNKNOWN where it is asked for the marker."""
    cluster, engines, _ = scene(each=1)
    before, after = cluster.core(0).ring, Ring(cluster.record.with_member("n4", 16 * REGION_BYTES))
    pairs = ((key, before.candidates(key)[0], after.candidates(key)[0]) for key in prompt("moves", 400))
    key = next(key for key, old, new in pairs if old[0] == "n1" and "n1" not in new)
    monkeypatch.setattr(cluster.node(0), "follow", lambda: None)
    cluster.add(missed=["n0"])
    cluster.run_for(1.0)
    asked = len(said(cluster, 0, peer.Lookup))
    replies = wait_for(engines[0], [key], 5.0)
    cluster.run_for(1.0)
    assert [reply.codes[0] for reply in replies] == [Code.UNKNOWN]
    assert len(said(cluster, 0, peer.Lookup)) - asked <= 4


@pytest.mark.parametrize("step", range(20))
def test_arrivals_during_a_lookup_end_no_wait(step: int) -> None:
    """Another engine of the node stores a part of the prompt between the lookup and its answers, and the rest later."""
    cluster, engines, _ = scene()
    keys = [*placed(cluster, 1, 2, 6), *placed(cluster, 2, 3, 6)]
    first, second = engines[:2]
    tell(cluster, first.processes[0], engine.MarkInFlight(join_keys(keys), 5.0))
    cluster.run_for(0.05)
    first.store(keys[:-1], 0, Storing(fill_s=0.01))
    cluster.run_for(step * 0.001)
    replies = wait_for(second, keys, 5.0)
    cluster.run_for(0.2)
    assert replies == []
    store(cluster, first, keys[-1:], len(keys) - 1)
    cluster.run_for(0.2)
    assert [reply.hits for reply in replies] == [len(keys)]
