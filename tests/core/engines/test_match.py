"""Matches: the prefix that is found, here, at other nodes and after a probing round, what a session may lease, and the
segments of independent keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.scenes import (
    ROOMY,
    answer,
    ask,
    calm,
    fetch,
    match,
    match_independent,
    placed,
    prepare,
    release,
    said,
    store,
    stored,
    tell,
    within,
)
from tests.sim.arena import content
from tests.sim.cluster import Cluster
from tests.sim.prompts import prompt
from tokenlake.core import events, instructions
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import SLOT_BYTES, join_keys, unpack_slots

LENGTH = 24
MANY_NODES = 8
WIDE: dict[str, Any] = {"regions": 32, **ROOMY}
"""Rules under which other nodes may lease a prompt of `LENGTH` segments at one node."""
QUARTER: dict[str, Any] = {**ROOMY, "session_lease_share": 0.25}
"""A session leases a quarter of the slots."""


def test_a_local_segment_is_found_without_a_lookup() -> None:
    cluster, _, keys = stored(2)
    writer = cluster.engines[0]
    reply = match(cluster, writer, keys)
    assert reply.hits == 2
    assert list(reply.codes) == [Code.LOCAL] * 2
    assert reply.checksums == b"".join(b"".join(content("red", key)) for key in keys)
    places = unpack_slots(reply.slots)
    assert [cluster.node(0).arena.read(place, 0) for place in places] == [content("red", key)[0] for key in keys]
    assert not said(cluster, 0, peer.Lookup)


def test_a_match_ends_at_the_first_gap() -> None:
    """Segments behind the gap are neither counted as hits nor leased."""
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, [keys[0]])
    store(cluster, writer, [keys[2]])
    for engine_ in (writer, reader):
        reply = match(cluster, engine_, keys)
        assert reply.hits == 1
        assert list(reply.codes[1:2]) == [Code.MISSING]
        assert len(reply.slots) == SLOT_BYTES
        release(cluster, engine_, reply.lease, 1)
    assert all(cluster.core(node).idle() for node in range(3))


def test_a_directory_node_names_the_owner() -> None:
    """The owner is no candidate of the keys. A directory node is asked for the first key; the owner that it names is
    asked for the neighbours, too."""
    cluster = calm(5, **WIDE)
    writer, reader = cluster.join(0), cluster.join(4)
    keys = [*placed(cluster, 1, 2, 1), *placed(cluster, 2, 3, 1), *placed(cluster, 3, 1, 6)]
    store(cluster, writer, keys)
    reply = match(cluster, reader, keys)
    assert list(reply.codes) == [Code.REMOTE] * 8
    assert list(fetch(cluster, reader, reply.lease, 8).codes) == [Code.LOCAL] * 8
    asked = lookups(cluster, 4)
    assert [sum(node == name for node, _ in asked) for name in ("n1", "n2")] == [1, 1]
    assert {node for node, _ in asked} == {"n0", "n1", "n2", "n3"}
    # Probes are the keys at places 0, 1, 3 and 7.
    assert next(found for node, found in asked if node == "n3") == keys[3] + keys[7]
    assert ("n0", join_keys(keys)) in asked


def lookups(cluster: Cluster, node: int) -> list[tuple[str, bytes]]:
    """The lookups that a node sent: to which node, for which keys."""
    sent = said(cluster, node, instructions.SendToPeer)
    return [(each.node, each.message.keys) for each in sent if isinstance(each.message, peer.Lookup)]


def test_a_frozen_directory_node_hides_nothing_known() -> None:
    """A frozen directory node hides nothing whose owner is known from neighbours."""
    cluster = calm(5, **WIDE)
    writer, reader = cluster.join(0), cluster.join(4)
    keys = [*placed(cluster, 1, 2, 2), *placed(cluster, 3, 1, 6)]
    store(cluster, writer, keys)
    cluster.node(3).freeze()
    with within(cluster, 1.25 * cluster.core(4).config.match_deadline_s):
        assert match(cluster, reader, keys).codes == bytes([Code.REMOTE]) * 8
    # It costs one deadline: it is not asked again.
    with within(cluster, cluster.core(4).config.match_deadline_s / 2):
        assert match(cluster, reader, keys).codes == bytes([Code.REMOTE]) * 8
    # No neighbour leads to the owner where all keys hash to the frozen node.
    assert match(cluster, reader, keys[2:]).codes[0] == Code.UNKNOWN


@pytest.mark.parametrize(("count", "asked_s"), [(1, 0.0), (64, 0.0), (1024, 0.0), (1024, 1.0), (1024, 0.01)])
def test_the_deadline_follows_the_length_of_the_prompt(count: int, asked_s: float) -> None:
    """A prompt of 1,000,000 tokens has 4,096 segments, whose lookups alone take 15 ms."""
    cluster = calm(3, **WIDE)
    keys = [*placed(cluster, 1, 2, 1), *prompt("q", count - 1)]
    reader = cluster.join(0)
    cluster.node(1).freeze()
    cluster.node(2).freeze()
    limit_s = match_deadline_s(cluster.core(0).config.match_deadline_s, count)
    limit_s = min(limit_s, asked_s or limit_s)
    began = cluster.clock.now
    answer(cluster, reader.processes[0], engine.Match, join_keys(keys), asked_s)
    assert limit_s <= cluster.clock.now - began < limit_s + 0.005


def test_the_own_directory_does_not_wait_for_the_deadline() -> None:
    """Another directory node is frozen: the own directory names the owner of the first key, and it is asked at once."""
    cluster = calm(4, **WIDE)
    writer, reader = cluster.join(2), cluster.join(0)
    keys = [*placed(cluster, 0, 1, 1), *placed(cluster, 3, 1, 3)]
    store(cluster, writer, keys)
    cluster.node(3).freeze()
    replies = ask(reader.processes[0], engine.Match, join_keys(keys), 0.0)
    cluster.run_for(cluster.core(0).config.match_deadline_s / 2)
    assert not replies
    assert cluster.core(2).census()["leases to peers"] == 1
    cluster.run_for(cluster.core(0).config.match_deadline_s)
    assert replies[0].codes == bytes([Code.REMOTE]) * 4


def test_a_stale_directory_entry_is_removed() -> None:
    """The directory names a node without a copy: another node, or the one that asks."""
    for asking in (1, 2):
        cluster = calm(4)
        key = placed(cluster, 0, 3)[0]
        cluster.node(0).deliver(events.PeerSent(f"n{asking}", peer.Owned("red", key)))
        assert cluster.core(0).census()["directory"] == 1
        reader = cluster.join(1)
        assert match(cluster, reader, [key]).codes == bytes([Code.MISSING])
        cluster.run_for(0.01)
        assert not cluster.core(0).census()["directory"]


def test_only_the_directory_node_answers_missing() -> None:
    """The directory node is frozen, and the answer of the other candidate does not suffice."""
    cluster = calm()
    reader = cluster.join(2)
    key = placed(cluster, 0, 1)[0]
    assert match(cluster, reader, [key]).codes == bytes([Code.MISSING])
    cluster.node(0).freeze()
    assert match(cluster, reader, [key]).codes == bytes([Code.UNKNOWN])


# -- limits of a session


def test_a_session_leases_at_most_its_share() -> None:
    cluster, reader, keys = stored(6, reader=0, **QUARTER)
    writer = cluster.engines[0]
    reply = match(cluster, reader, keys)
    assert reply.hits == 3
    assert reply.codes[3] == Code.SESSION_LIMIT
    assert match(cluster, reader, keys).codes[0] == Code.SESSION_LIMIT
    release(cluster, reader, reply.lease, 3, 1)
    assert match(cluster, reader, keys).hits == 2
    assert match(cluster, writer, keys).hits == 3


def test_a_single_process_reads_a_long_prompt_in_windows() -> None:
    """In windows, a process reads a prompt that is longer than its share: remote segments do not count until they are
    fetched."""
    cluster = calm(5, **QUARTER)
    reader, keys = cluster.join(4), [*placed(cluster, 0, 1, 5), *placed(cluster, 2, 3, 4)]
    store(cluster, cluster.join(0), keys[:5])
    store(cluster, cluster.join(2), keys[5:], 5)
    reply = match(cluster, reader, keys)
    assert reply.codes == bytes([Code.REMOTE] * 9)
    process, slots = reader.processes[0], 8
    # A fetch may also use half of the 9 slots beyond the session's share, rounded up.
    assert fetch(cluster, reader, reply.lease, 9).codes == bytes([Code.LOCAL] * slots + [Code.SESSION_LIMIT])
    assert cluster.core(4).census()["slots for what comes"] == 0
    assert answer(cluster, process, engine.Fetch, reply.lease, slots, 9, 0.0).codes == bytes([Code.SESSION_LIMIT])
    tell(cluster, process, engine.Release(((reply.lease, 0, slots),)))
    assert answer(cluster, process, engine.Fetch, reply.lease, slots, 9, 0.0).codes == bytes([Code.LOCAL])
    tell(cluster, process, engine.Release(((reply.lease, slots, 9),)))
    cluster.check()
    assert cluster.core(4).idle()


def test_local_items_leave_room_for_fetches() -> None:
    """The local items of a lease do not use up the session's share, so that the remote ones can be fetched."""
    cluster = calm(**QUARTER)
    here, there = cluster.join(0), cluster.join(1)
    keys = [*placed(cluster, 0, 1, 3), *placed(cluster, 1, 2, 2)]
    store(cluster, here, keys[:3])
    store(cluster, there, keys[3:], 3)
    reply = match(cluster, here, keys)
    assert reply.codes == bytes([Code.LOCAL] * 3 + [Code.REMOTE] * 2)
    assert fetch(cluster, here, reply.lease, 5).codes == bytes([Code.LOCAL] * 5)
    cluster.check()


def test_processes_that_fetch_the_same_items_share_slots() -> None:
    cluster = calm(**QUARTER)
    writer, reader = cluster.join(0), cluster.join(2, processes=2)
    keys = placed(cluster, 0, 1, 6)
    cluster.run_for(0.01)
    store(cluster, writer, keys)
    reply = match(cluster, reader, keys)
    # The process that matched holds every item until the other one has read it, so all items count at once.
    assert reply.codes[:4] == bytes([Code.REMOTE] * 3 + [Code.SESSION_LIMIT])
    first, second = reader.processes
    answer(cluster, second, engine.Attach, reply.lease)
    fetched = [ask(process, engine.Fetch, reply.lease, 0, 3, 0.0) for process in (first, second) for _ in range(2)]
    cluster.run_for(0.05)
    assert [answers[0].codes for answers in fetched] == [bytes([Code.LOCAL] * 3)] * 4
    assert cluster.core(2).census()["slots for what comes"] == 0
    cluster.check()


# -- probing


@pytest.mark.parametrize("here", [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 23, LENGTH])
def test_probing_finds_the_whole_prefix(here: int) -> None:
    """Segment `here` is missing and later ones are stored, also at places that are probed."""
    cluster = calm(MANY_NODES, **WIDE)
    keys = prompt("p", LENGTH)
    writer, reader = cluster.join(0), cluster.join(1)
    for start in range(0, here, 4):
        store(cluster, writer, keys[start : min(start + 4, here)])
    if here + 1 < LENGTH:
        store(cluster, writer, keys[here + 1 :][:6])
    cluster.run_for(1.0)
    found = match(cluster, reader, keys)
    assert found.hits == here
    assert all(code in (Code.LOCAL, Code.REMOTE) for code in found.codes[:here])
    assert here == LENGTH or found.codes[here] == Code.MISSING


def test_an_unknown_prompt_costs_few_lookups() -> None:
    cluster = calm(MANY_NODES)
    reader = cluster.join(1)
    assert match(cluster, reader, prompt("unknown", 64)).hits == 0
    # The probes are the keys 0, 1, 3, 7, 15, 31 and 63 of 64.
    assert len(said(cluster, 1, peer.Lookup)) <= 7


def test_two_rounds_have_one_deadline() -> None:
    """One frozen node is asked in the first round, another one only in the second."""
    cluster = calm(6, **WIDE)
    writer, reader = cluster.join(0), cluster.join(5)
    keys = [*placed(cluster, 1, 2, 1), *placed(cluster, 2, 1, 1), *placed(cluster, 3, 1, 1), *placed(cluster, 2, 3, 1)]
    store(cluster, writer, keys[:2])
    store(cluster, cluster.join(4), keys[2:], 2)
    for node in (2, 3):
        cluster.node(node).freeze()
    with within(cluster, 1.25 * cluster.core(5).config.match_deadline_s):
        found = match(cluster, reader, keys)
    assert {node for node, _ in lookups(cluster, 5)} >= {"n2", "n3"}
    assert found.hits == 2
    assert found.codes[2] == Code.UNKNOWN


# -- independent keys


def leased(keys: list[SegmentKey], reply: engine.Matched) -> list[SegmentKey]:
    """The keys that a match of independent keys leases."""
    return [key for key, code in zip(keys, reply.codes, strict=True) if code in (Code.LOCAL, Code.REMOTE)]


def checksums_of(keys: list[SegmentKey]) -> bytes:
    return b"".join(b"".join(content("red", key)) for key in keys)


def test_independent_keys_are_leased_behind_gaps() -> None:
    """At the node that has them, in the order of the keys."""
    cluster = calm(3, **WIDE)
    writer = cluster.join(0)
    keys = placed(cluster, 0, 1, 6)
    held = [keys[1], keys[2], keys[5]]
    store(cluster, writer, held)
    reply = match_independent(cluster, writer, keys)
    assert reply.hits == 3
    assert leased(keys, reply) == held
    assert [reply.codes[at] for at in (0, 3, 4)] == [Code.MISSING] * 3
    assert reply.checksums == checksums_of(held)
    read = [cluster.node(0).arena.read(place, 0) for place in unpack_slots(reply.slots)]
    assert read == [content("red", key)[0] for key in held]
    # The lease is of exactly these segments.
    assert fetch(cluster, writer, reply.lease, 3).codes == bytes([Code.LOCAL] * 3)
    release(cluster, writer, reply.lease, 3)
    cluster.check()
    assert cluster.core(0).idle()


def test_independent_keys_are_found_at_many_nodes_in_two_rounds() -> None:
    """Each directory node is asked once for all its keys, then each owner once for those that it was named for."""
    cluster = calm(6, **WIDE)
    reader = cluster.join(5)
    keys = [key for at in range(4) for key in placed(cluster, at, (at + 1) % 4, 6, name=f"part {at}")]
    held = keys[1::2]
    for node in range(4):
        # The owner is not a candidate of the keys.
        store(cluster, cluster.join((node + 2) % 4), [key for key in keys[6 * node : 6 * node + 6] if key in held])
    reply = match_independent(cluster, reader, keys)
    assert leased(keys, reply) == held
    assert {code for key, code in zip(keys, reply.codes, strict=True) if key not in held} == {Code.MISSING}
    asked = lookups(cluster, 5)
    assert sorted(node for node, _ in asked) == sorted(["n0", "n1", "n2", "n3"] * 2)
    fetched = fetch(cluster, reader, reply.lease, len(held))
    assert fetched.codes == bytes([Code.LOCAL] * len(held))
    assert fetched.checksums == checksums_of(held)
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, len(held)),)))
    cluster.check()
    assert all(cluster.core(node).census()["leases to peers"] == 0 for node in range(4))


def test_independent_keys_at_a_frozen_directory_node_are_unknown() -> None:
    """The other keys are found within the deadline."""
    cluster = calm(5, **WIDE)
    writer, reader = cluster.join(0), cluster.join(4)
    lost, kept = placed(cluster, 3, 1, 3), placed(cluster, 1, 2, 3)
    keys = [key for pair in zip(lost, kept, strict=True) for key in pair]
    store(cluster, writer, keys)
    cluster.node(3).freeze()
    with within(cluster, 1.25 * cluster.core(4).config.match_deadline_s):
        reply = match_independent(cluster, reader, keys)
    assert leased(keys, reply) == kept
    assert bytes(reply.codes[::2]) == bytes([Code.UNKNOWN] * 3)


def test_independent_keys_beyond_the_share() -> None:
    """Independent keys beyond the share of a session are not leased."""
    cluster = calm(**QUARTER)
    writer, reader = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 7)
    store(cluster, writer, [key for key in keys if key != keys[1]])
    reply = match_independent(cluster, reader, keys)
    found, limit = Code.LOCAL, Code.SESSION_LIMIT
    assert list(reply.codes) == [found, Code.MISSING, found, found, limit, limit, limit]
    assert reply.hits == 3
    release(cluster, reader, reply.lease, 3)
    cluster.check()
    assert cluster.core(0).idle()


def test_a_match_of_independent_keys_does_not_wait() -> None:
    """Segments in flight are PENDING, and no in-flight marker is set for the caller."""
    cluster = calm()
    writer, reader = cluster.join(0), cluster.join(2)
    keys = placed(cluster, 1, 0, 3)
    prepare(cluster, writer, keys[1:2])
    cluster.run_for(0.01)
    with within(cluster, 1.0):
        reply = match_independent(cluster, reader, keys, wait_s=5.0)
        assert list(reply.codes) == [Code.MISSING, Code.PENDING, Code.MISSING]
    assert match(cluster, writer, keys).codes[0] == Code.MISSING


@pytest.mark.parametrize("node", [0, 2])
def test_a_key_that_is_asked_for_twice_is_leased_twice(node: int) -> None:
    """At the node that has the segment, and at another one."""
    cluster = calm(3, **WIDE)
    writer, reader = cluster.join(0), cluster.join(node)
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, keys[1:])
    asked = [keys[1], keys[0], keys[1], keys[2], keys[2]]
    reply = match_independent(cluster, reader, asked)
    assert leased(asked, reply) == [keys[1], keys[1], keys[2], keys[2]]
    assert fetch(cluster, reader, reply.lease, 4).checksums == checksums_of([keys[1], keys[1], keys[2], keys[2]])
    release(cluster, reader, reply.lease, 4)
    cluster.check()
    assert cluster.core(node).idle()
