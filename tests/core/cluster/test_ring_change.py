"""A change of the ring at one node: records that it follows, its answers meanwhile, rings of others."""

from __future__ import annotations

import pytest

from tests.core.cluster.test_directory_node import MEMBERS, SLOT, Node, keys_of, owned
from tests.sim.prompts import prompt
from tokenlake.core import context, events, instructions
from tokenlake.core.cluster import directory_node, drain
from tokenlake.core.cluster.drain import LEFT_BEHIND
from tokenlake.core.cluster.handover import HANDED_OVER, MAX_OFFERS, MAX_TAKEN
from tokenlake.core.cluster.owner import DUPLICATES
from tokenlake.core.cluster.ring_change import READ_S
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import NO_HINTS
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.memory import Kind
from tokenlake.wire import Code, peer
from tokenlake.wire.slots import join_keys, split_keys

EMPTY = (1.0, 0.0, 0.0)
"""The vacancy of an empty node."""


def follow(node: Node, record: RingRecord) -> None:
    node.handle(events.RingChanged(record))
    node.core.check_integrity()


def version(record: RingRecord) -> tuple[int, int]:
    return record.epoch, record.digest()


def noted(node: Node, event: events.Event) -> list[str]:
    """The log lines of an event."""
    return [each.text for each in node.core.handle(event, node.now) if isinstance(each, instructions.Note)]


def gained(node: Node, record: RingRecord) -> tuple[SegmentKey, SegmentKey]:
    """A key of which n0 becomes the directory node, and one of which it is the directory node before and after."""
    keys, before, after = prompt("gained", 400), node.core.ring, Ring(record)
    firsts = zip(keys, before.candidates(join_keys(keys)), after.candidates(join_keys(keys)), strict=True)
    pairs = [(key, old[0] == "n0") for key, old, new in firsts if new[0] == "n0"]
    return next(key for key, had in pairs if not had), next(key for key, had in pairs if had)


def answer(node: Node, sender: str, key: SegmentKey) -> tuple[Code, tuple[str, ...]]:
    """The answer to a lookup of a peer that this node may have taken for SUSPECT before, and advertises to now."""
    replies = node.say(sender, peer.Lookup(1, "red", key))
    (reply,) = [each for each in replies if isinstance(each, peer.LookupReply)]
    return Code(reply.codes[0]), reply.nodes


def alive(node: Node, seconds: float, takes: str = "") -> list[tuple[str, peer.PeerMessage]]:
    """Time passes; the peers have room, answer pings and refuse offers, except the peer that takes them. The messages
    to them."""
    until, all_sent = node.now + seconds, []
    while node.now < until:
        sent = node.run_until(min(until, node.now + 0.05))
        all_sent += sent
        for name, message in sent:
            if isinstance(message, peer.Ping):
                node.say(name, peer.Pong(message.call, EMPTY, 0.0, version(node.core.record)))
            if isinstance(message, peer.Offer):
                code = Code.COMMITTED if name == takes else Code.WRITE_BUDGET
                node.say(name, peer.OfferReply(message.call, bytes([code]) * len(message.depths), EMPTY, 0.0))
    return all_sent


def test_only_a_newer_record_is_followed() -> None:
    node = Node()
    first = node.core.record
    second = first.with_member("n3", 1 << 16)
    follow(node, second)
    assert (node.core.record, node.core.ring.members) == (second, ("n0", "n1", "n2", "n3"))
    for old in (first, second, RingRecord.of({"n0": 1})):
        follow(node, old)
        assert node.core.record == second
    other = first.without("n2")
    assert other.epoch == second.epoch
    assert "its members differ" in noted(node, events.RingChanged(other))[0]
    assert node.core.record == second


def test_gained_keys_are_unknown_at_first() -> None:
    """Gained keys are unknown until the peers have advertised on the new ring."""
    node = Node()
    record = node.core.record.without("n2")
    new, kept = gained(node, record)
    assert node.lookup("n1", kept) == (Code.MISSING, ())
    follow(node, record)
    assert node.lookup("n1", new) == (Code.UNKNOWN, ())
    assert node.lookup("n1", kept) == (Code.MISSING, ())
    node.say("n1", peer.AdvertisingDone(version(RingRecord.of({"n0": 1}))))
    assert node.lookup("n1", new) == (Code.UNKNOWN, ()), "that was an older ring"
    node.say("n1", peer.Owned("red", new))
    assert node.lookup("n1", new) == (Code.ELSEWHERE, ("n1",))
    node.say("n1", peer.Evicted("red", new))
    node.say("n1", peer.AdvertisingDone(version(record)))
    assert node.lookup("n1", new) == (Code.MISSING, ())


def test_a_marker_of_a_removed_node_does_not_come_back() -> None:
    node = Node()
    record = node.core.record.without("n2")
    _, key = gained(node, record)
    node.say("n2", peer.MarkInFlight("red", key, 30.0))
    assert node.lookup("n1", key) == (Code.PENDING, ())
    follow(node, record)
    for _ in range(2):
        alive(node, 12.0)
        assert answer(node, "n1", key) == (Code.MISSING, ())


def test_a_node_that_joins_after_it_served_alone() -> None:
    """A node that served alone knows nothing of the cluster that it joins."""
    node = Node(MEMBERS.without("n1").without("n2"), empty=True)
    record = RingRecord(9, MEMBERS.unit, MEMBERS.members)
    key = next(key for key in prompt("joined", 64) if Ring(record).candidates(key)[0][0] == "n0")
    follow(node, record)
    for name in ("n1", "n2"):
        node.handle(events.PeerUp(name, 1))
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())
    for name in ("n1", "n2"):
        node.say(name, peer.AdvertisingDone(version(record)))
    assert node.lookup("n1", key) == (Code.MISSING, ())


def test_one_walk_tells_the_new_directory_nodes_and_nothing_else() -> None:
    node = Node()
    keys = prompt("walk", 200)
    before = node.core.ring
    for key in keys[:8]:
        node.own(key)
    record = node.core.record.without("n2")
    moved = [key for key, has in zip(keys[:8], Ring(record).moved(before, join_keys(keys[:8])), strict=True) if has]
    follow(node, record)
    sent = node.run_until(1.0)
    told = [message for to, message in sent if to == "n1" and isinstance(message, peer.Owned | peer.AdvertisingDone)]
    to_n1 = [key for key in moved if Ring(record).candidates(key)[0][0] == "n1"]
    (owned,) = told[:-1]
    assert isinstance(owned, peer.Owned)
    assert sorted(split_keys(owned.keys)) == sorted(to_n1)
    assert told[-1] == peer.AdvertisingDone(version(record))
    assert not [message for to, message in sent if to == "n2"]


def test_a_change_keeps_the_walk_for_a_node_that_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The change moves none of its keys, so the walk of the change does not tell them."""
    monkeypatch.setattr(directory_node, "WALKED_SLOTS", 1)
    node = Node()
    record = node.core.record.without("n2")
    keys = [key for key in keys_of(node, "n1", "n2", 8) if Ring(record).candidates(key)[0][0] == "n1"]
    for key in keys:
        node.own(key)
    node.handle(events.PeerDown("n1", 1))
    node.run_until(0.2)
    sent = node.handle(events.PeerUp("n1", 2))
    sent += node.run_until(node.now + 0.003)
    assert 0 < len(owned(sent, "n1")) < len(keys)
    follow(node, record)
    sent += node.run_until(node.now + 1.0)
    assert set(owned(sent, "n1")) == set(keys)
    assert ("n1", peer.AdvertisingDone(version(record))) in sent


def test_the_previous_ring_counts_until_all_segments_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the walk over them takes longer than `previous_ring_s`, and the ring changes again during it."""
    monkeypatch.setattr(context, "PAUSE_S", 12.0)
    node = Node()
    without = node.core.record.without("n2")
    pairs = ((key, node.core.ring.candidates(key)[0], Ring(without).candidates(key)[0]) for key in prompt("slow", 100))
    key = next(key for key, before, after in pairs if (before[0], after[0]) == ("n2", "n1"))
    node.own(key)
    sent: list[tuple[str, peer.PeerMessage]] = []
    for record in (without, without.with_member("n3", 1 << 9)):
        follow(node, record)
        sent += alive(node, node.core.config.previous_ring_s + 1.0)
    sent += alive(node, 10.0)
    assert ("n1", peer.Owned("red", key)) in sent
    assert node.core.ring.candidates(key)[0][0] == "n1"


def test_a_reader_with_a_newer_ring_is_answered_unknown() -> None:
    """This node may be the directory node of the key on that ring."""
    node = Node()
    (key,) = keys_of(node, "n1", "n2")
    (reply,) = node.say("n1", peer.Lookup(1, "red", key, ring=(7, 1)))
    assert reply.codes == bytes([Code.UNKNOWN])
    assert reply.ring == version(node.core.record)


def test_a_newer_ring_is_read_at_most_once_a_second() -> None:
    node = Node()

    def read() -> list[instructions.Instruction]:
        out = node.core.handle(events.PeerSent("n1", peer.Ping(1, EMPTY, 0.0, (7, 1))), node.now)
        return [each for each in out if isinstance(each, instructions.ReadRing)]

    assert read() == [instructions.ReadRing()]
    assert read() == []
    node.now += READ_S
    assert read() == [instructions.ReadRing()]
    assert node.core.ring_states()["n1"] == "newer"
    node.say("n1", peer.Ping(1, EMPTY, 0.0, version(node.core.record)))
    assert node.core.ring_states() == {"n1": "same", "n2": "unknown"}


def test_static_lists_that_differ_are_a_state() -> None:
    node = Node()
    node.say("n1", peer.Ping(1, EMPTY, 0.0, (0, 4711)))
    assert node.core.ring_states()["n1"] == "differs"


def test_a_node_that_is_no_member_any_more_serves_alone() -> None:
    node = Node()
    follow(node, node.core.record.without("n0"))
    assert node.core.ring.members == ("n0",)
    assert not list(node.core._peers)
    with pytest.raises(ValueError, match="not another member"):
        node.handle(events.PeerUp("n1", 1))
    follow(node, node.core.record.with_member("n0", 1 << 16))
    node.handle(events.PeerUp("n1", 1))
    (key,) = keys_of(node, "n0", "n1")
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())


@pytest.mark.parametrize("reason", ["drains", "takes enough"])
def test_offers_are_refused(reason: str) -> None:
    """By a node that drains, and by one that takes many already: all full nodes offer to a node that just joined."""
    node = Node()
    key = prompt("offered", 1)[0]
    refused = bytes([Code.LOST if reason == "drains" else Code.WRITE_BUDGET])
    if reason == "drains":
        follow(node, node.core.record.draining("n0"))
    for call in range(MAX_TAKEN if reason == "takes enough" else 0):
        node.say("n1", peer.Offer(call, "red", prompt(f"offer {call}", 1)[0], (0,), 512, 2, NO_HINTS))
        if node.core.census()["offers being taken"] < call + 1:
            node.core._handover._taking = MAX_TAKEN
            break
    (reply,) = node.say("n2", peer.Offer(1000, "red", key, (0,), 512, 2, NO_HINTS))
    assert (reply.call, reply.codes) == (1000, refused)


def test_a_drain_counts_the_offers_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "OFFER_SEGMENTS", 1)
    node = Node()
    node.say("n1", peer.Ping(1, EMPTY, 0.0, version(node.core.record)))
    segments = [node.own(key) for key in prompt("many", 14)]
    for segment in segments[:5]:
        node.core._handover.offer(NodeId("n1"), [segment], lambda: None)
    follow(node, node.core.record.draining("n0"))
    node.run_until(0.2)
    assert node.core.census()["offers"] == MAX_OFFERS
    alive(node, 30.0, "n1")
    assert node.drained == [instructions.Drained((("n1", 14, 14 * SLOT),))]


def test_segments_that_all_nodes_refuse_are_counted_as_left() -> None:
    node = Node()
    for key in prompt("left", 3):
        node.own(key)
    follow(node, node.core.record.draining("n0"))
    sent = alive(node, node.core.config.drain_s + 1.0)
    assert any(isinstance(message, peer.Offer) for _, message in sent)
    assert node.core.counters[LEFT_BEHIND] == 3
    assert node.drained == [instructions.Drained((), 3, 3 * SLOT)]


def test_owned_copies_that_were_not_admitted_count_as_left() -> None:
    node = Node()
    (key,) = prompt("left", 1)
    node.own(key)
    (segment,) = node.core.store.segments()
    node.core.store.become(segment, Kind.CACHED, node.now)
    follow(node, node.core.record.draining("n0"))
    alive(node, 1.0)
    assert node.drained == [instructions.Drained((), 1, SLOT)]


@pytest.mark.parametrize("takes", ["n1", "n2"])
def test_a_node_that_refuses_keeps_no_segment_from_another(takes: str) -> None:
    node = Node()
    for key in prompt("left", 3):
        node.own(key)
    follow(node, node.core.record.draining("n0"))
    alive(node, 10.0, takes)
    assert node.core.counters[HANDED_OVER] == 3
    assert node.drained == [instructions.Drained(((takes, 3, 3 * SLOT),))]


def test_a_segment_taken_after_the_deadline_counts_as_moved() -> None:
    """Its reply came too late; the new owner says that it has the segment."""
    node = Node()
    key = prompt("late", 1)[0]
    node.own(key)
    follow(node, node.core.record.draining("n0"))
    node.run_until(0.5)
    node.say("n2", peer.Redundant("red", key, ("n2",), handed_over=True))
    alive(node, 5.0)
    assert node.drained == [instructions.Drained((("n2", 1, SLOT),))]
    assert (node.core.counters[HANDED_OVER], node.core.counters[DUPLICATES]) == (1, 0)


def test_a_drain_ends_at_once_where_all_others_drain() -> None:
    node = Node()
    node.own(prompt("left", 1)[0])
    follow(node, node.core.record.draining("n0"))
    follow(node, node.core.record.draining("n1").without("n2"))
    out: list[instructions.Instruction] = []
    while (wake := node.core.next_wake()) is not None and wake < 3.0:
        out += node.core.handle(events.Tick(), wake)
    assert out.count(instructions.Drained((), 1, SLOT)) == 1
    assert node.core.counters[LEFT_BEHIND] == 1


def test_a_change_makes_no_circle_on_the_loop() -> None:
    """Where a thread has made it before."""
    node = Node()
    record = node.core.record.with_member("n3", 1 << 16)
    made = Ring(record)
    follow(node, record)
    assert node.core.ring._circle is made._circle
