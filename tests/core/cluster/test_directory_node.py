"""A directory node's answers to other nodes, its completeness after a start, and its advertising to them.

One node without a driver: each test delivers messages of peers and looks at the messages that it sends.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.scenes import copies, kinds, match, store, stored
from tests.sim.prompts import prompt
from tokenlake.core import CoreConfig, NodeCore, events, instructions
from tokenlake.core.cluster import directory_node
from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import join_keys

MEMBERS = RingRecord.of(dict.fromkeys(("n0", "n1", "n2"), 1 << 16))
SYNC_GRACE_S = 5.0
SLOT = 512
"""Bytes of a segment."""
RING = (MEMBERS.epoch, MEMBERS.digest())


class Node:
    """The rules of n0; n1 and n2 are connected with incarnation 1, and have advertised unless `empty`."""

    def __init__(self, record: RingRecord = MEMBERS, *, empty: bool = False) -> None:
        self.core = NodeCore(CoreConfig("n0", 1, record, 1, 1 << 13, sync_grace_s=SYNC_GRACE_S))
        self.core.start(0.0)
        self.now = 0.0
        self.drained: list[instructions.Drained] = []
        """The accounts of drains that the rules have given."""
        for name in list(record.members)[1:]:
            self.handle(events.PeerUp(name, 1))
            if not empty:
                self.say(name, peer.AdvertisingDone())

    def handle(self, event: events.Event) -> list[tuple[str, Any]]:
        """Deliver one event. The messages to peers that it led to."""
        out = self.core.handle(event, self.now)
        self.drained += [each for each in out if isinstance(each, instructions.Drained)]
        return [(each.node, each.message) for each in out if isinstance(each, instructions.SendToPeer)]

    def say(self, sender: str, message: peer.PeerMessage) -> list[Any]:
        """Deliver one message. The replies to its sender."""
        return [reply for node, reply in self.handle(events.PeerSent(sender, message)) if node == sender]

    def lookup(self, sender: str, key: SegmentKey) -> tuple[Code, tuple[str, ...]]:
        """The answer to a lookup of one key: its code, and the node that an ELSEWHERE names."""
        (reply,) = self.say(sender, peer.Lookup(1, "red", key))
        return Code(reply.codes[0]), reply.nodes

    def own(self, key: SegmentKey, depth: int = 0) -> Segment:
        """n0 owns the segment; no node is told."""
        segment = self.core.store.reserve(TenantId("red"), SLOT, key, Kind.PRIMARY, depth, self.now)
        assert isinstance(segment, Segment)
        self.core.store.publish(segment, bytes(16), self.now)
        self.core.store.unpin(segment)
        return segment

    def run_until(self, until: float) -> list[tuple[str, Any]]:
        """Deliver ticks. The messages to peers."""
        sent: list[tuple[str, Any]] = []
        while (wake := self.core.next_wake()) is not None and wake <= until:
            self.now = max(self.now, wake)
            sent += self.handle(events.Tick())
        self.now = until
        return sent


def owned(sent: list[tuple[str, Any]], node: str) -> list[bytes]:
    """The keys that `node` was told n0 owns, by message."""
    return [message.keys for to, message in sent if to == node and isinstance(message, peer.Owned)]


def keys_of(node: Node, first: str, second: str, count: int = 1) -> list[SegmentKey]:
    """Keys with these candidates, the directory node first."""
    keys = prompt("directory", 64)
    pairs = zip(keys, node.core.ring.candidates(join_keys(keys)), strict=True)
    return [key for key, pair in pairs if pair == (first, second)][:count]


def test_an_eviction_tells_the_age_of_each_segment() -> None:
    node = Node()
    keys = keys_of(node, "n1", "n2", 2)
    for key in keys:
        node.own(key)
        node.run_until(node.now + 10.0)
    node.say("n1", peer.AdvertisingDone())
    sent = node.handle(events.EvictRequested(1, "red", join_keys(keys), SLOT))
    ages = {message.keys: message.last_access_age_s for _, message in sent if isinstance(message, peer.Evicted)}
    assert ages == {keys[0]: 20.0, keys[1]: 10.0}


@pytest.mark.parametrize("late", [False, True], ids=["all have advertised", "the grace period has passed"])
def test_unknown_until_all_peers_have_advertised(late: bool) -> None:
    node = Node(empty=True)
    (key,) = keys_of(node, "n0", "n1")
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())
    node.say("n1", peer.AdvertisingDone())
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())
    if late:
        node.now = SYNC_GRACE_S
    else:
        node.say("n2", peer.AdvertisingDone())
    assert node.lookup("n1", key) == (Code.MISSING, ())


def test_only_the_redundant_keys_are_answered() -> None:
    node = Node()
    keys = keys_of(node, "n0", "n1", 3)
    node.say("n1", peer.Owned("red", keys[1]))
    assert node.say("n2", peer.Owned("red", join_keys(keys))) == [peer.Redundant("red", keys[1], ("n1",))]
    assert [node.lookup("n2", key)[1] for key in keys] == [("n2",), ("n1",), ("n2",)]


def test_entries_of_an_earlier_incarnation_do_not_count() -> None:
    node = Node()
    key, other = keys_of(node, "n0", "n1", 2)
    node.say("n1", peer.Owned("red", key))
    node.say("n2", peer.Owned("red", other))
    node.handle(events.PeerDown("n1", 1))
    node.handle(events.PeerUp("n1", 2))
    node.say("n1", peer.AdvertisingDone())
    assert node.lookup("n2", key) == (Code.MISSING, ())
    assert node.lookup("n1", other) == (Code.ELSEWHERE, ("n2",))
    assert node.core.census()["directory"] == 1


def test_the_report_of_a_reader_is_a_question_to_the_owner() -> None:
    """The entry stays until the owner confirms that it has no copy."""
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n1", peer.Owned("red", key))
    report = peer.Unfound("red", key, "n1")
    assert node.handle(events.PeerSent("n2", report)) == [("n1", report)]
    assert node.lookup("n2", key) == (Code.ELSEWHERE, ("n1",))
    assert node.handle(events.PeerSent("n2", peer.Unfound("red", key, "n2"))) == [], "not the owner of the entry"
    assert node.handle(events.PeerSent("n2", peer.Unfound("red", key, "stranger"))) == []
    here, gone = keys_of(node, "n1", "n0", 2)
    node.own(here)
    assert node.say("n1", peer.Unfound("red", join_keys((here, gone)), "n0")) == [peer.Evicted("red", gone)]


def test_only_a_candidate_names_another_owner() -> None:
    """Only a candidate of a key says that another node owns it."""
    node = Node()
    (key,) = keys_of(node, "n1", "n2")
    (other,) = keys_of(node, "n1", "n0")
    mine, theirs = node.own(key), node.own(other)
    node.say("n2", peer.Redundant("red", join_keys((key, other)), ("n1", "n1")))
    assert (mine.kind, theirs.kind) == (Kind.CACHED, Kind.PRIMARY)
    assert node.core.counters.by_labels(directory_node.REFUSED_REPORTS) == {("n2",): 1}


# -- advertising


def test_advertising_continues_while_the_peer_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that missed one deadline gets no requests, but all advertising: no later message would repeat it."""
    monkeypatch.setattr(directory_node, "WALKED_SLOTS", 1)
    node = Node()
    keys = keys_of(node, "n1", "n0", 8)
    for depth, key in enumerate(keys[:6]):
        node.own(key, depth)
    node.handle(events.Joined(1, 1, "red", 512, 2, 16, 0, 0))
    sent = node.handle(events.PeerUp("n1", 2))
    sent += node.handle(events.Requested(1, engine.Match(2, keys[6], 0.0)))
    sent += node.run_until(match_deadline_s(node.core.config.match_deadline_s, 1))
    assert not node.handle(events.Requested(1, engine.Match(3, keys[7], 0.0))), "n1 is overdue"
    assert node.core.census()["walks"] == 1
    while node.core.census()["walks"] and node.now < 0.2:
        sent += node.run_until(node.now + 0.005)
    told = [message for peer_, message in sent if peer_ == "n1" and not isinstance(message, peer.Lookup)]
    assert told == [*(peer.Owned("red", key) for key in keys[:6]), peer.AdvertisingDone(RING)]


# -- stand-ins


def test_the_stand_in_answers() -> None:
    """The stand-in answers for a directory node that cannot be reached."""
    node = Node()
    (key,) = keys_of(node, "n1", "n0")
    assert node.lookup("n2", key) == (Code.MISSING, ())
    node.handle(events.PeerDown("n1", 1))
    assert node.say("n2", peer.Owned("red", key)) == []
    assert node.lookup("n2", key) == (Code.ELSEWHERE, ("n2",))
    node.handle(events.PeerUp("n1", 2))
    assert node.lookup("n1", key) == (Code.ELSEWHERE, ("n2",))
    # A node that is told of a key of which it is no candidate names the owner: the sender may have a newer ring.
    (foreign,) = keys_of(node, "n1", "n2")
    assert node.lookup("n2", foreign) == (Code.MISSING, ())
    node.say("n1", peer.Owned("red", foreign))
    assert node.lookup("n2", foreign) == (Code.ELSEWHERE, ("n1",))


@pytest.mark.parametrize("fault", ["down", "suspect"])
def test_owners_tell_the_stand_ins_in_slices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the segments that hash to the node that was lost, each once."""
    monkeypatch.setattr(directory_node, "WALKED_SLOTS", 1)
    node = Node()
    keys, others = keys_of(node, "n1", "n2", 4), keys_of(node, "n2", "n1", 2)
    for key in (*keys[:2], *others, *keys[2:]):
        node.own(key)
    if fault == "down":
        sent = node.handle(events.PeerDown("n1", 1))
    else:
        # Pings of n1 stay without an answer.
        sent = []
        while not node.core.census()["walks"] and node.now < 5.0:
            for to, message in node.run_until(node.now + 0.002):
                sent.append((to, message))
                if isinstance(message, peer.Ping) and to == "n2":
                    node.say("n2", peer.Pong(message.call, (0.0, 0.0, 0.0), 0.0))
    assert node.core.census()["walks"] == 1
    assert len(owned(sent, "n2")) < 4
    sent += node.run_until(node.now + 0.2)
    assert owned(sent, "n2") == list(keys)
    assert owned(sent, "n1") == []
    assert node.core.census()["walks"] == 0


def test_an_earlier_outage_takes_no_ownership_away() -> None:
    """The stand-in has an entry from an earlier outage whose owner evicted the segment since: another node owns it."""
    cluster, second, (key,) = stored(pair=(1, 2), nodes=4, reader=3)
    first = cluster.engines[0]
    cluster.link("n0", "n1").cut(0.2)
    cluster.link("n1", "n2").cut(0.2)
    cluster.link("n1", "n3").cut(0.2)
    cluster.run_for(1.0)
    cluster.core(0).store.drop(copies(cluster, key)[0], cluster.clock.now)
    cluster.node(0).deliver(events.Tick())
    cluster.run_for(0.1)
    store(cluster, second, [key])
    assert kinds(cluster, key) == {3: Kind.PRIMARY}
    cluster.node(1).crash()
    cluster.run_for(0.5)
    assert kinds(cluster, key) == {3: Kind.PRIMARY}
    assert match(cluster, first, [key]).codes == bytes([Code.REMOTE])
