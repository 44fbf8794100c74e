"""The other nodes: calls with deadlines, liveness, load and speed.

Call deadlines and peer liveness are separate. A call that misses its deadline is a miss for its caller and makes the
peer overdue: no call but a ping goes to the peer until it sends something, so a silent peer costs the matches that wait
for it one deadline, and later matches nothing. A call that arrived late, or was cut short, says nothing of the peer. A
peer that sends nothing for `suspect_s` after a ping is SUSPECT, and is sent nothing but pings.

::

    up -- missed deadline --> overdue -- ping without answer for `suspect_s` --> SUSPECT
     ^                           |                                                 |
     +------- any frame ---------+------------------ any frame --------------------+

The bulk path, over which segments come, has a health of its own (`bulk_path`).

In every gossip interval this node pings the peers that are overdue or SUSPECT, and up to `PINGED` others in rotation.
A peer that reported its load within one round needs no ping: pings, their replies and the replies to lookups and offers
all carry the load. So each peer reports, and is checked, once per round, without a message to every peer in every
interval. A peer in use that stops is noticed by the next call to it, any other peer within a round.

Peers come and go with the ring record (`ring_change`). The state of a member that left is dropped; a part of
the rules that still names it is answered as for a peer that is down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from tokenlake.core.cluster.bulk_path import PATIENT_TRIPS, BulkPath
from tokenlake.core.context import LOAD_HALF_LIFE_S, Context, Part
from tokenlake.core.instructions import Note, SendToPeer
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.location import NOWHERE, Location
from tokenlake.memory.vacancy import UNKNOWN_VACANCY, Vacancy
from tokenlake.metrics import Metric
from tokenlake.rate import Rate
from tokenlake.timers import Timer
from tokenlake.wire import peer as wire
from tokenlake.wire.checks import REPLY_TO
from tokenlake.wire.fields import NO_RING, RingVersion
from tokenlake.wire.liveness import Liveness

CALLS = Metric("tokenlake_peer_calls_total", "Requests sent to other nodes")
TIMEOUTS = Metric("tokenlake_peer_timeouts_total", "Requests to other nodes that missed their deadline")
SUSPECTED = Metric("tokenlake_suspected_peers_total", "Times a peer became SUSPECT")
UNANSWERED = Metric(
    "tokenlake_unanswered_fetches_total", "Transfers to which another node sent no bytes in time, or that it refused"
)

Reply = wire.LookupReply | wire.OfferReply | wire.Pong | wire.ExplainMissingReply
OnReply = Callable[[Reply | None], None]

LOAD_HOLDS_S = 1.0
"""Minimum seconds for which a reported load counts in full. The load of a peer counts in full until the peer must have
reported again, and decays afterwards."""
PINGED = 8
"""Number of peers that are pinged in rotation per gossip interval."""


class Call(NamedTuple):
    """A call to a peer that waits for an answer."""

    on_reply: OnReply
    timer: Timer
    """The timer of the deadline."""
    request: wire.PeerMessage
    began: float
    """Time in seconds at which it was sent; NaN for a call that the peer need not answer at once."""


class Peer:
    """State of one other node, as this node knows it."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.up = False
        self.incarnation = Incarnation(0)
        self.liveness = Liveness()
        self.suspect = False
        self.location = NOWHERE
        """The location of the peer, as it told when it connected last."""
        self.draining = False
        """True while the peer hands its primary copies over before it leaves: nothing is handed over to it."""
        self.ring: RingVersion = NO_RING
        """The ring that the peer named last."""
        self.path = BulkPath()
        self.slowest_s = 0.0
        """The longest of the recent round trips of calls, in seconds; it decays with `LOAD_HALF_LIFE_S`."""
        self.slowest_at = -math.inf
        """Time in seconds of that round trip."""
        self.reported_at = -math.inf
        """Time in seconds of the newest message in which the peer reported its vacancy and load."""
        self.vacancy = UNKNOWN_VACANCY
        self.load = Rate(LOAD_HALF_LIFE_S)
        """Bytes per second that the peer reports to send to engines of other nodes."""
        self.announced = Rate(LOAD_HALF_LIFE_S)
        """Rate of the bytes that readers fetch from the peer because this node redirected them there."""
        self.calls: dict[int, Call] = {}
        """Calls to the peer that wait for an answer, by call id."""

    @property
    def reachable(self) -> bool:
        """True if one-way messages can be sent to the peer; otherwise it learns their content when it is back."""
        return self.up and not self.suspect

    @property
    def usable(self) -> bool:
        """True if calls can be sent to the peer now: it is connected, not SUSPECT and not overdue."""
        return self.reachable and not self.liveness.overdue

    @property
    def delivers(self) -> bool:
        """True if segments can be fetched from the peer now: it is usable, and its bulk path is alive."""
        return self.usable and self.path.alive


class Peers(Part):
    """The other members of the cluster: sends them messages and calls, and notices when one stops."""

    def __init__(
        self,
        context: Context,
        on_lost: Callable[[Peer], None],
        on_suspect: Callable[[Peer], None],
        on_restored: Callable[[Peer], None],
        on_ring: Callable[[Peer], None],
    ) -> None:
        """`on_lost` is called when the connection to a peer broke, `on_suspect` when a peer became SUSPECT,
        `on_restored` when it is back and may have missed messages, `on_ring` when a peer named another ring than that
        of this node."""
        self._context = context
        self._on_lost = on_lost
        self._on_suspect = on_suspect
        self._on_restored = on_restored
        self._on_ring = on_ring
        self._peers: dict[NodeId, Peer] = {}
        """By name, in the order of the names."""
        self._rotation: deque[Peer] = deque()
        self._round_s = 0.0
        """Seconds in which every peer is pinged once, or has reported its load by itself."""
        self._load_holds_s = LOAD_HOLDS_S
        self.follow()

    def follow(self) -> list[Peer]:
        """Make the peers those of the ring record. Returns those that left, whose calls the caller ends with `end`."""
        members, here = self._context.record.members, self._context.node
        names = sorted(NodeId(name) for name in members if name != here) if here in members else []
        staying = set(names)
        left = [peer for name, peer in self._peers.items() if name not in staying]
        come = [name for name in names if name not in self._peers]
        self._peers = {name: self._peers.get(name) or Peer(name) for name in names}
        for name, peer in self._peers.items():
            peer.draining = members[name].draining
        rotation = [peer for peer in self._rotation if peer.node in staying]
        self._rotation = deque([*rotation, *(self._peers[name] for name in come)])
        self._round_s = self._context.config.gossip_s * math.ceil(len(names) / PINGED)
        self._load_holds_s = max(LOAD_HOLDS_S, 2 * self._round_s)
        return left

    def _peer(self, node: NodeId) -> Peer:
        """The state of a peer; that of a peer that is down if `node` is not a member any more."""
        return self._peers.get(node) or Peer(node)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, node: NodeId) -> Peer | None:
        """Returns the state of another member of the cluster; None for this node and for a name that is no member."""
        return self._peers.get(node)

    def connected(self, node: NodeId) -> bool:
        """Returns True if `node` has a control connection with this node."""
        peer = self._peers.get(node)
        return peer is not None and peer.up

    def usable(self, node: NodeId) -> bool:
        """Returns True if `node` is another member of the cluster that can be called now."""
        peer = self._peers.get(node)
        return peer is not None and peer.usable

    def delivers(self, node: NodeId) -> bool:
        """Returns True if `node` is another member of the cluster from which segments can be fetched now."""
        peer = self._peers.get(node)
        return peer is not None and peer.delivers

    def reachable(self, node: NodeId) -> bool:
        """Returns True if `node` is another member of the cluster that can be sent one-way messages."""
        peer = self._peers.get(node)
        return peer is not None and peer.reachable

    def directory_nodes(self, keys: bytes) -> list[NodeId]:
        """Returns, for each of the concatenated `keys`, the node that keeps its directory entry now: the first
        candidate of the key, or the second while the first cannot be reached."""
        return self.keepers(self._context.ring.candidates(keys))

    def keepers(self, candidates: Iterable[tuple[NodeId, NodeId]]) -> list[NodeId]:
        """Returns `directory_nodes` of keys with these candidates (`Ring.candidates`)."""
        away = [peer.node for peer in self._peers.values() if not peer.reachable]
        return [other if first in away else first for first, other in candidates]

    def by_directory_node(self, keys: Sequence[SegmentKey]) -> Mapping[NodeId, list[SegmentKey]]:
        """Returns the keys grouped by the node that keeps their directory entries now; their order is kept."""
        grouped: dict[NodeId, list[SegmentKey]] = {}
        for key, node in zip(keys, self.directory_nodes(b"".join(keys)) if keys else (), strict=True):
            grouped.setdefault(node, []).append(key)
        return grouped

    def start(self) -> None:
        """Begin to ping other nodes in every gossip interval."""
        self._context.after(self._context.config.gossip_s, self._ping)

    # -- connections

    def came_up(self, node: NodeId, incarnation: Incarnation, location: Location = NOWHERE) -> None:
        """A control connection to the incarnation `incarnation` of `node` was made; it replaces an earlier one.
        `location`: that of the node."""
        peer = self._peers[node]
        peer.location = location
        self.went_down(node, peer.incarnation)
        peer.up, peer.suspect = True, False
        peer.liveness.heard(self._context.now)
        if peer.incarnation != incarnation:
            peer.incarnation = incarnation
            peer.path.renew()
        self._on_restored(peer)

    def went_down(self, node: NodeId, incarnation: Incarnation) -> None:
        """The control connection to `node` broke: its calls that wait for an answer fail now. A report about an earlier
        incarnation changes nothing."""
        peer = self._peers[node]
        if not peer.up or peer.incarnation != incarnation:
            return
        self._context.emit(Note(f"peer {node} is down"))
        self.end(peer)
        self._on_lost(peer)

    def end(self, peer: Peer) -> None:
        """End the calls to a peer whose connection broke, or that left the ring record."""
        peer.up = False
        calls, peer.calls = peer.calls, {}
        for call in calls.values():
            call.timer.cancel()
            call.on_reply(None)

    def heard(self, node: NodeId) -> None:
        """Another node sent a message, so it is alive: neither overdue nor SUSPECT any more."""
        peer = self._peers[node]
        peer.liveness.heard(self._context.now)
        if peer.suspect:
            peer.suspect = False
            self._context.emit(Note(f"peer {node} answers again"))
            self._on_restored(peer)

    # -- frames

    def tell(self, node: NodeId, message: wire.PeerMessage) -> None:
        """Send a one-way message. It is dropped while the peer is down or SUSPECT: when the peer is back, this node
        tells it again which segments it owns, and other state ends by deadlines. An overdue peer gets the message,
        because it would not be repeated."""
        if self.reachable(node):
            self._context.emit(SendToPeer(node, message))

    def call(
        self,
        node: NodeId,
        make: Callable[[int], wire.PeerMessage],
        deadline_s: float,
        on_reply: OnReply,
        *,
        proves_life: bool = True,
    ) -> None:
        """Send the request `make(call id)`. `on_reply` is called exactly once, possibly before this returns: with the
        reply, or with None after `deadline_s` seconds or when the peer cannot be called. `proves_life`: a missed
        deadline makes the peer overdue."""
        peer = self._peers.get(node)
        if peer is None or not peer.usable:
            on_reply(None)
            return
        self._send(peer, make, deadline_s, on_reply, proves_life)

    def look_up(
        self,
        node: NodeId,
        tenant: TenantId,
        keys: Sequence[SegmentKey],
        deadline_s: float,
        on_reply: Callable[[wire.LookupReply | None], None],
        **fields: Any,
    ) -> None:
        """Look up `keys` at `node`, as a `call`; the reply answers for each of them. `fields`: further ones of
        `Lookup`."""

        def replied(reply: Reply | None) -> None:
            on_reply(reply if isinstance(reply, wire.LookupReply) else None)

        ring = self._context.ring_version
        make = partial(wire.Lookup, tenant=tenant, keys=b"".join(keys), ring=ring, **fields)
        self.call(node, make, deadline_s, replied)

    def _send(
        self,
        peer: Peer,
        make: Callable[[int], wire.PeerMessage],
        deadline_s: float,
        on_reply: OnReply,
        proves_life: bool,
    ) -> None:
        call = self._context.next_id()

        def expire() -> None:
            peer.calls.pop(call)
            self._context.counters.add(TIMEOUTS)
            self._took(peer, began)
            # A call with a shorter deadline than usual does not show that the peer is slow.
            if proves_life and deadline_s >= 0.9 * self._context.config.match_deadline_s:
                peer.liveness.deadline_missed()
            request = getattr(message, "request", "")
            if request:
                sent = f"{type(message).__name__} to {peer.node}"
                text = f"request {request!r}: no answer to a {sent} in {deadline_s:.3f} s"
                self._context.emit(Note(text, "missed deadline"))
            on_reply(None)

        message = make(call)
        began = self._context.now if proves_life else math.nan
        peer.calls[call] = Call(on_reply, self._context.after(deadline_s, expire), message, began)
        self._context.counters.add(CALLS)
        self._context.emit(SendToPeer(peer.node, message))

    def check_reply(self, node: NodeId, message: Reply, count: int) -> None:
        """Raises `ValueError` if this reply does not answer the type of request that its call sent, or if that request
        did not have `count` keys. Changes nothing."""
        waiting = self._peers[node].calls.get(message.call)
        if waiting is None:
            return
        request = waiting.request
        if REPLY_TO[type(request)] is not type(message):
            raise ValueError(f"a {type(message).__name__} answers a {type(request).__name__}")
        keys = getattr(request, "keys", b"")
        if count * KEY_BYTES != len(keys):
            raise ValueError(f"a {type(message).__name__} of {count} keys answers for {len(keys) // KEY_BYTES}")

    def replied(self, node: NodeId, message: Reply) -> None:
        """Pass a reply to the callback of its call. If a `LookupReply` came after the deadline, the lease in it is
        released."""
        peer = self._peers[node]
        if not isinstance(message, wire.ExplainMissingReply):
            self._reported(peer, message)
        if isinstance(message, wire.LookupReply | wire.Pong):
            self.names_ring(node, message.ring)
        waiting = peer.calls.pop(message.call, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._took(peer, waiting.began)
            waiting.on_reply(message)
        elif isinstance(message, wire.LookupReply) and message.lease:
            self.tell(node, wire.ReleaseLease((message.lease,)))

    # -- liveness and load

    def _ping(self) -> None:
        config = self._context.config
        pinged = self._next_pinged()
        if pinged:
            vacancy, load, ring = self._context.vacancy(), self._context.load(), self._context.ring_version
        for peer in pinged:
            self._send(
                peer,
                lambda call: wire.Ping(call, vacancy, load, ring),
                config.suspect_s,
                partial(self._ponged, peer, self._context.now),
                proves_life=True,
            )
        self._context.after(self._context.config.gossip_s, self._ping)

    def _next_pinged(self) -> list[Peer]:
        doubted = [peer for peer in self._peers.values() if peer.up and (peer.liveness.overdue or peer.suspect)]
        next_ones = list(islice(self._rotation, PINGED))
        self._rotation.rotate(-len(next_ones))
        since = self._context.now - self._round_s
        return doubted + [peer for peer in next_ones if peer.usable and peer.reported_at < since]

    def _ponged(self, peer: Peer, pinged_at: float, reply: Reply | None) -> None:
        if reply is None and peer.up and not peer.suspect and peer.liveness.heard_at <= pinged_at:
            peer.suspect = True
            self._context.counters.add(SUSPECTED)
            self._context.emit(Note(f"peer {peer.node} is SUSPECT: no answer for {self._context.config.suspect_s} s"))
            self._on_suspect(peer)

    def pinged(self, node: NodeId, message: wire.Ping) -> None:
        """Answer a ping of `node`, and record the vacancy and load that it reports."""
        self._reported(self._peers[node], message)
        self.names_ring(node, message.ring)
        vacancy, load, ring = self._context.vacancy(), self._context.load(), self._context.ring_version
        self._context.emit(SendToPeer(node, wire.Pong(message.call, vacancy, load, ring)))

    def _reported(self, peer: Peer, message: wire.Ping | wire.Pong | wire.LookupReply | wire.OfferReply) -> None:
        peer.reported_at = self._context.now
        peer.vacancy = Vacancy(*message.vacancy)
        peer.load.set(message.load, self._context.now + self._load_holds_s)

    def load(self, node: NodeId) -> float:
        """Returns the load of a peer in bytes per second: the load that it reported plus that of the readers that this
        node redirected there lately. The sum may count a read twice."""
        peer, now = self._peers[node], self._context.now
        return peer.load.at(now) + peer.announced.at(now)

    def will_read(self, node: NodeId, nbytes: int) -> None:
        """Count as load of `node` the `nbytes` that a reader will fetch there because this node redirects it. No report
        of `node` includes them yet."""
        self._peers[node].announced.add(nbytes, self._context.now)

    @property
    def notices_s(self) -> float:
        """Seconds after which every node has noticed that another node stopped."""
        return 2 * self._round_s + self._context.config.suspect_s

    def names_ring(self, node: NodeId, ring: RingVersion) -> None:
        """Handle the ring that a message of `node` names as that of `node`."""
        peer = self._peers[node]
        peer.ring = ring
        if ring != self._context.ring_version:
            self._on_ring(peer)

    # -- the bulk path

    def path(self, node: NodeId) -> BulkPath:
        """The path over which segments come from `node`."""
        return self._peer(node).path

    def path_answered(self, node: NodeId) -> None:
        """Bytes came from `node` to a transfer: segments can be fetched from it."""
        if self.path(node).answered(self._context.now):
            self._context.emit(Note(f"peer {node} delivers segments again"))

    def path_silent(self, node: NodeId, began: float, waited_s: float) -> int:
        """No bytes came from `node` to a transfer; see `BulkPath.silent`. A node under load, or behind a slow network,
        is slow to answer calls as well, and gets as much more time."""
        self._context.counters.add(UNANSWERED)
        patience_s = min(PATIENT_TRIPS * self._slowest_s(self._peer(node)), self._context.config.suspect_s)
        deaths = self.path(node).silent(began, waited_s, patience_s)
        if deaths:
            text = f"peer {node} delivers nothing: no bytes came to a fetch, and it is asked for none"
            self._context.emit(Note(text))
        return deaths

    def missed_deadline(self, node: NodeId, nbytes: int, began: float) -> None:
        """A transfer of `nbytes` from `node` that began at `began` was given up: the node becomes overdue if it has
        sent nothing since, and the path counts as slower."""
        self._peer(node).liveness.deadline_missed(began)
        self.path(node).missed(nbytes, self._context.now - began)

    def _slowest_s(self, peer: Peer) -> float:
        if not peer.slowest_s:
            return 0.0
        half_lives = (self._context.now - peer.slowest_at) / LOAD_HALF_LIFE_S
        return peer.slowest_s * math.exp2(-half_lives)

    def _took(self, peer: Peer, began: float) -> None:
        """Record the round trip of a call that was sent at the time `began` and ends now; NaN is ignored."""
        seconds = self._context.now - began
        if seconds > self._slowest_s(peer):
            peer.slowest_s, peer.slowest_at = seconds, self._context.now

    def census(self) -> dict[str, int]:
        return {"calls": sum(len(peer.calls) for peer in self._peers.values())}

    def check_integrity(self) -> None:
        assert list(self._peers) == sorted(self._peers)
        assert sorted(peer.node for peer in self._rotation) == list(self._peers)
        for peer in self._peers.values():
            assert peer.up or not peer.calls, f"calls wait at {peer.node}, which is down"
