"""A directory node's answers to other nodes, its completeness after a start, and its advertising to them.

One node without a driver: each test delivers messages of peers and looks at the messages that it sends.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.scenes import calm, match, placed, store
from tests.sim.prompts import prompt
from tokenlake.core import CoreConfig, NodeCore, directory_node, events, instructions
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import Kind, Segment
from tokenlake.store.removals import CORRUPT_RULE
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

MEMBERS = dict.fromkeys(("n0", "n1", "n2"), 1 << 16)
SYNC_GRACE_S = 5.0


class Node:
    """The rules of n0; n1 and n2 are connected with incarnation 1, and have advertised unless `empty`."""

    def __init__(self, *, empty: bool = False) -> None:
        self.core = NodeCore(CoreConfig("n0", 1, MEMBERS, 1, 1 << 13, sync_grace_s=SYNC_GRACE_S))
        self.core.start(0.0)
        self.now = 0.0
        for name in ("n1", "n2"):
            self.handle(events.PeerUp(name, 1))
            if not empty:
                self.say(name, peer.AdvertisingDone())

    def handle(self, event: events.Event) -> list[tuple[str, Any]]:
        """Deliver one event. The messages to peers that it led to."""
        out = self.core.handle(event, self.now)
        return [(each.node, each.message) for each in out if isinstance(each, instructions.SendToPeer)]

    def say(self, sender: str, message: peer.PeerMessage) -> list[Any]:
        """Deliver one message. The replies to its sender."""
        return [reply for node, reply in self.handle(events.PeerSent(sender, message)) if node == sender]

    def lookup(self, sender: str, key: SegmentKey) -> tuple[Code, tuple[str, ...]]:
        """The answer to a lookup of one key: its code, and the node that an ELSEWHERE names."""
        (reply,) = self.say(sender, peer.Lookup(1, "red", key))
        return Code(reply.codes[0]), reply.nodes

    def ready(self, sender: str, key: SegmentKey) -> peer.ReadyReply:
        """The answer to a commit."""
        (reply,) = self.say(sender, peer.Ready(1, "red", key))
        assert isinstance(reply, peer.ReadyReply)
        return reply


def keys_of(node: Node, first: str, second: str, count: int = 1) -> list[SegmentKey]:
    """Keys with these candidates, the directory node first."""
    keys = prompt("directory", 64)
    pairs = zip(keys, node.core.ring.candidates(join_keys(keys)), strict=True)
    return [key for key, pair in pairs if pair == (first, second)][:count]


def test_unknown_until_all_peers_have_advertised() -> None:
    node = Node(empty=True)
    (key,) = keys_of(node, "n0", "n1")
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())
    node.say("n1", peer.AdvertisingDone())
    assert node.lookup("n1", key) == (Code.UNKNOWN, ())
    node.say("n2", peer.AdvertisingDone())
    assert node.lookup("n1", key) == (Code.MISSING, ())


def test_missing_once_the_grace_period_has_passed() -> None:
    node = Node(empty=True)
    (key,) = keys_of(node, "n0", "n1")
    node.now = SYNC_GRACE_S
    assert node.lookup("n1", key) == (Code.MISSING, ())


def test_an_in_flight_marker_ends_with_a_withdrawal_or_its_time() -> None:
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n1", peer.MarkInFlight("red", key, 2.0))
    assert node.lookup("n2", key) == (Code.PENDING, ())
    node.say("n2", peer.ClearInFlight("red", key))
    assert node.lookup("n2", key) == (Code.PENDING, ())
    node.say("n1", peer.ClearInFlight("red", key))
    assert node.lookup("n2", key) == (Code.MISSING, ())
    node.say("n1", peer.MarkInFlight("red", key, 2.0))
    node.now = 2.0
    assert node.lookup("n2", key) == (Code.MISSING, ())


def test_the_first_commit_and_the_first_owner_win() -> None:
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    assert node.ready("n1", key).codes == bytes([Code.COMMITTED])
    second = node.ready("n2", key)
    assert (second.codes, second.first_writers) == (bytes([Code.EXISTS]), ("n1",))
    assert node.lookup("n2", key) == (Code.ELSEWHERE, ("n1",))
    assert node.say("n2", peer.PrimaryCopies("red", key)) == []
    assert node.say("n1", peer.PrimaryCopies("red", key)) == [peer.Redundant("red", key, ("n2",))]
    assert node.lookup("n1", key) == (Code.ELSEWHERE, ("n2",))


def test_the_statement_of_a_node_that_is_down_is_replaced() -> None:
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n1", peer.PrimaryCopies("red", key))
    node.handle(events.PeerDown("n1", 1))
    assert node.lookup("n2", key) == (Code.UNKNOWN, ())
    assert node.say("n2", peer.PrimaryCopies("red", key)) == []
    assert node.lookup("n2", key) == (Code.ELSEWHERE, ("n2",))


def test_entries_of_an_earlier_incarnation_do_not_count() -> None:
    node = Node()
    key, other = keys_of(node, "n0", "n1", 2)
    node.say("n1", peer.PrimaryCopies("red", key))
    node.say("n2", peer.PrimaryCopies("red", other))
    node.handle(events.PeerDown("n1", 1))
    node.handle(events.PeerUp("n1", 2))
    node.say("n1", peer.AdvertisingDone())
    assert node.lookup("n2", key) == (Code.MISSING, ())
    assert node.lookup("n1", other) == (Code.ELSEWHERE, ("n2",))
    assert node.core.census()["directory"] == 1


def test_a_connection_of_the_same_incarnation_keeps_its_entries() -> None:
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n1", peer.PrimaryCopies("red", key))
    node.handle(events.PeerDown("n1", 1))
    node.handle(events.PeerUp("n1", 1))
    assert node.lookup("n2", key) == (Code.ELSEWHERE, ("n1",))


@pytest.mark.parametrize(("rule", "previous_owners"), [("lru", ("n1",)), (CORRUPT_RULE, ())])
def test_a_commit_learns_the_previous_owner(rule: str, previous_owners: tuple[str, ...]) -> None:
    """The previous owner is a candidate that evicted the segment, unless it dropped the copy for wrong bytes."""
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n1", peer.PrimaryCopies("red", key))
    node.say("n1", peer.Evicted("red", key, "n1", rule))
    assert node.lookup("n2", key) == (Code.MISSING, ())
    assert node.ready("n2", key).previous_owners == previous_owners


def test_a_node_that_is_no_candidate_is_no_previous_owner() -> None:
    node = Node()
    (key,) = keys_of(node, "n0", "n1")
    node.say("n2", peer.PrimaryCopies("red", key))
    node.say("n2", peer.Evicted("red", key, "n2", "lru"))
    assert node.ready("n1", key).previous_owners == ()


def test_advertising_continues_while_the_peer_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that missed one deadline gets no requests, but all advertising: no later message would repeat it."""
    monkeypatch.setattr(directory_node, "ADVERTISED_SLOTS", 1)
    node = Node()
    keys = keys_of(node, "n1", "n0", 8)
    for depth, key in enumerate(keys[:6]):
        segment = node.core.store.reserve(TenantId("red"), 512, key, Kind.PRIMARY, depth, node.now)
        assert isinstance(segment, Segment)
        node.core.store.publish(segment, bytes(16), node.now)
        node.core.store.unpin(segment)
    node.handle(events.Joined(1, 1, "red", 512, 2, 16, 0, 0))
    sent = node.handle(events.PeerUp("n1", 2))
    sent += node.handle(events.Requested(1, engine.Match(2, keys[6], 0.0)))
    node.now = node.core.config.match_deadline_s
    sent += node.handle(events.Tick())
    assert not node.handle(events.Requested(1, engine.Match(3, keys[7], 0.0))), "n1 is overdue"
    assert node.core.census()["advertisings"] == 1
    while node.core.census()["advertisings"] and node.now < 0.2:
        node.now += 0.005
        sent += node.handle(events.Tick())
    told = [message for peer_, message in sent if peer_ == "n1" and not isinstance(message, peer.Lookup)]
    assert told == [*(peer.PrimaryCopies("red", key) for key in keys[:6]), peer.AdvertisingDone()]


def test_primary_copies_are_advertised_to_their_directory_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner advertises in slices to a directory node that restarted, and only the keys of that directory node."""
    monkeypatch.setattr(directory_node, "ADVERTISED_SLOTS", 1)
    cluster = calm(dirty_share=1.0)
    keys = placed(cluster, 1, 0, 2) + placed(cluster, 2, 0, 2)
    store(cluster, cluster.join(0), keys)
    owned = {key for (_, key), nodes in cluster.keepers().items() if nodes == ["n0"]}
    cluster.node(1).crash()
    cluster.node(1).start()
    before = len(cluster.node(0).emitted)
    cluster.run_for(0.5)
    sent = [
        each.message
        for out in list(cluster.node(0).emitted)[before:]
        for each in out
        if isinstance(each, instructions.SendToPeer) and each.node == "n1"
    ]
    held = {message.keys for message in sent if isinstance(message, peer.PrimaryCopies)}
    assert held == {key for key in keys[:2] if key in owned}
    assert sum(isinstance(message, peer.AdvertisingDone) for message in sent) == 1
    reader = cluster.join(2)
    assert all(match(cluster, reader, [key]).hits == 1 for key in owned)
