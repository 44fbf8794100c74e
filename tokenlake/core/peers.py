"""Other nodes: who answers, calls with a deadline, and what each of us tells the other after a break.

Give-up and liveness are two things. A call gives up after its own deadline; the peer that missed it is
*overdue* and skipped by all further calls until it says anything at all, so that a frozen node costs each
engine at most one deadline. A ping that stays unanswered for `suspect_s` makes it SUSPECT, which is what the
log and the metrics speak of.

After a connection came up, or a suspect peer spoke again, frames may have been lost: both sides advertise
their primary copies anew.

Pings cost a node the same however many others there are: a few peers have their turn in each gossip interval, and are
pinged unless they told their load since the last one. Who is in doubt (overdue or SUSPECT) is pinged every time. So in
a large cluster a frozen node is found by whoever calls it first, and by the others in their turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from tokenlake.core.context import LOAD_HALF_LIFE_S, Context
from tokenlake.core.instructions import Note, Say
from tokenlake.core.timers import Timer
from tokenlake.hot import Rate
from tokenlake.identity import Incarnation, NodeId
from tokenlake.keys import KEY_BYTES
from tokenlake.metrics import Metric
from tokenlake.placement import UNKNOWN_VACANCY, Vacancy
from tokenlake.wire import peer as wire
from tokenlake.wire.checks import REPLY_TO

__all__ = ["OnReply", "Peer", "Peers"]

CALLS = Metric("tokenlake_peer_calls_total", "Requests sent to other nodes")
TIMEOUTS = Metric("tokenlake_peer_timeouts_total", "Requests to other nodes that missed their deadline")
SUSPECTED = Metric("tokenlake_suspected_peers_total", "Times a peer became SUSPECT")

Reply = wire.LookupReply | wire.ReadyReply | wire.OfferReply | wire.Replicated | wire.Pong | wire.ToldWhy
OnReply = Callable[[Reply | None], None]
R = TypeVar("R")

DEFAULT_RATE = 500e6
"""Bytes per second assumed of a peer nobody fetched from yet; a sixth of what loopback TCP gives, so that the
first deadline is not missed on a slower network."""
MEASURED_BYTES = 1 << 20
"""A smaller fetch tells the delay of the network, not its rate."""
MOST_SLOWER = 4
"""By one fetch that missed its deadline."""
SWEPT = 1024
"""Entries of the directory looked at at a time when a peer came back as another."""
LOAD_HOLDS_S = 1.0
"""What a peer said of its load counts in full for so long, or until it must have said it again;
then it fades."""
RATE_WEIGHT = 0.2
"""Of the newest fetch in the running mean."""
PINGED = 8
"""Peers that have their turn in one gossip interval."""


class Peer:
    """What this node knows of another."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.up = False
        self.incarnation = Incarnation(0)
        self.born = 0.0
        """When this node first heard of that incarnation."""
        self.overdue = False
        self.suspect = False
        self.heard_at = 0.0
        self.told_at = -math.inf
        """When it last told its load."""
        self.vacancy = UNKNOWN_VACANCY
        self.load = Rate(LOAD_HALF_LIFE_S)
        """As it last said."""
        self.asked = Rate(LOAD_HALF_LIFE_S)
        """Bytes that this node is about to read there, or did."""
        self.rate = DEFAULT_RATE
        """Bytes per second of fetches from there, running mean."""
        self.calls: dict[int, tuple[OnReply, Timer, wire.PeerMessage]] = {}
        """With what it was asked."""

    @property
    def reachable(self) -> bool:
        """Worth telling: what is not told will be, once it is back."""
        return self.up and not self.suspect

    @property
    def usable(self) -> bool:
        """Worth asking now."""
        return self.reachable and not self.overdue


class Peers:
    """The other members of the cluster."""

    def __init__(
        self,
        context: Context,
        on_lost: Callable[[Peer], None],
        on_suspect: Callable[[Peer], None],
        on_restored: Callable[[Peer], None],
    ) -> None:
        """`on_lost`: the peer's connection broke. `on_suspect`: it became SUSPECT. `on_restored`: it is back, and may
        have missed frames."""
        self._context = context
        self._on_lost = on_lost
        self._on_suspect = on_suspect
        self._on_restored = on_restored
        names = [name for name in context.ring.members if name != context.node]
        self._peers = {name: Peer(name) for name in names}
        self._turns = deque(self._peers.values())
        self._round_s = context.config.gossip_s * math.ceil(len(names) / PINGED)
        """In which each has its turn once."""
        self._load_holds_s = max(LOAD_HOLDS_S, 2 * self._round_s)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, node: NodeId) -> Peer | None:
        """The peer, None for this node and for strangers."""
        return self._peers.get(node)

    def connected(self, node: NodeId) -> bool:
        """Has `node` a control connection with this one?"""
        peer = self._peers.get(node)
        return peer is not None and peer.up

    def usable(self, node: NodeId) -> bool:
        """Is `node` another member and worth asking now?"""
        peer = self._peers.get(node)
        return peer is not None and peer.usable

    def reachable(self, node: NodeId) -> bool:
        """Is `node` another member that hears what it is told?"""
        peer = self._peers.get(node)
        return peer is not None and peer.reachable

    def settled(self, node: NodeId) -> bool:
        """Is `node` another member, worth asking now, and did it not join a moment ago?"""
        peer = self._peers.get(node)
        return peer is not None and peer.usable and self._context.now >= peer.born + self._context.config.sync_grace_s

    def start(self) -> None:
        """Begin to ping."""
        self._context.after(self._context.config.gossip_s, self._ping)

    # -- connections

    def came_up(self, node: NodeId, incarnation: Incarnation) -> None:
        """A control connection stands; it takes the place of an earlier one."""
        peer = self._peers[node]
        self.went_down(node, peer.incarnation)
        peer.up, peer.overdue, peer.suspect = True, False, False
        if peer.incarnation != incarnation:
            peer.incarnation, peer.born = incarnation, self._context.now
            self._context.directory.forget(node, incarnation)
            self._context.in_slices(lambda: self._context.directory.sweep(SWEPT))
        self._on_restored(peer)

    def went_down(self, node: NodeId, incarnation: Incarnation) -> None:
        """It broke; calls under way fail now. A report about an earlier life changes nothing."""
        peer = self._peers[node]
        if not peer.up or peer.incarnation != incarnation:
            return
        peer.up = False
        calls, peer.calls = peer.calls, {}
        self._context.emit(Note(f"peer {node} is down"))
        for on_reply, timer, _ in calls.values():
            timer.cancel()
            on_reply(None)
        self._on_lost(peer)

    def heard(self, node: NodeId) -> None:
        """It said something: it is alive."""
        peer = self._peers[node]
        peer.overdue = False
        peer.heard_at = self._context.now
        if peer.suspect:
            peer.suspect = False
            self._context.emit(Note(f"peer {node} answers again"))
            self._on_restored(peer)

    # -- frames

    def tell(self, node: NodeId, message: wire.PeerMessage) -> None:
        """One-way; dropped while the peer is down or SUSPECT (it will be told everything when it is back). One
        that is merely overdue is told: nobody would repeat it."""
        if self.reachable(node):
            self._context.emit(Say(node, message))

    def call(
        self,
        node: NodeId,
        make: Callable[[int], wire.PeerMessage],
        deadline_s: float,
        on_reply: OnReply,
        *,
        proves_life: bool = True,
    ) -> None:
        """Send `make(call id)`; `on_reply` gets the reply, or None at the deadline or when the peer is not
        usable. Called back exactly once, possibly before this returns. `proves_life`: a missed deadline makes
        the peer overdue."""
        peer = self._peers.get(node)
        if peer is None or not peer.usable:
            on_reply(None)
            return
        self._send(peer, make, deadline_s, on_reply, proves_life)

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
            # Only a call that had the usual time says something of the peer, not one that came late or was cut short.
            in_full = deadline_s >= 0.9 * self._context.config.match_deadline_s
            peer.overdue = peer.overdue or (proves_life and in_full)
            request = getattr(message, "request", "")
            if request:
                asked = f"{type(message).__name__} to {peer.node}"
                self._context.emit(Note(f"request {request!r}: no answer to a {asked} in {deadline_s:.3f} s"))
            on_reply(None)

        message = make(call)
        peer.calls[call] = (on_reply, self._context.after(deadline_s, expire), message)
        self._context.counters.add(CALLS)
        self._context.emit(Say(peer.node, message))

    def check_reply(self, node: NodeId, message: Reply, count: int) -> None:
        """Raises `ValueError` where a call waits for this reply, and asked something else, or of other than `count`
        keys. Changes nothing."""
        waiting = self._peers[node].calls.get(message.call)
        if waiting is None:
            return
        asked = waiting[2]
        if REPLY_TO[type(asked)] is not type(message):
            raise ValueError(f"a {type(message).__name__} answers a {type(asked).__name__}")
        keys = getattr(asked, "keys", b"")
        if count * KEY_BYTES != len(keys):
            raise ValueError(f"a {type(message).__name__} of {count} keys answers for {len(keys) // KEY_BYTES}")

    def replied(self, node: NodeId, message: Reply) -> None:
        """Hand a reply to its caller. A late `LookupReply` leased what nobody waits for: give it back."""
        peer = self._peers[node]
        if not isinstance(message, wire.ReadyReply | wire.Replicated | wire.ToldWhy):
            self._told(peer, message)
        waiting = peer.calls.pop(message.call, None)
        if waiting is not None:
            on_reply, timer, _ = waiting
            timer.cancel()
            on_reply(message)
        elif isinstance(message, wire.LookupReply) and message.lease:
            self.tell(node, wire.ReleaseLease((message.lease,)))

    # -- liveness and load

    def _ping(self) -> None:
        config = self._context.config
        pinged = self._next_pinged()
        if pinged:
            vacancy, load, hot = self._context.vacancy(), self._context.load(), self._context.hot_version
        for peer in pinged:
            self._send(
                peer,
                lambda call: wire.Ping(call, vacancy, load, hot),
                config.suspect_s,
                lambda reply, peer=peer: self._ponged(peer, reply),  # type: ignore[misc]
                proves_life=True,
            )
        self._context.after(self._context.config.gossip_s, self._ping)

    def _next_pinged(self) -> list[Peer]:
        doubted = [peer for peer in self._peers.values() if peer.up and (peer.overdue or peer.suspect)]
        turns = list(islice(self._turns, PINGED))
        self._turns.rotate(-len(turns))
        since = self._context.now - self._round_s
        return doubted + [peer for peer in turns if peer.usable and peer.told_at < since]

    def _ponged(self, peer: Peer, reply: Reply | None) -> None:
        if reply is None and peer.up and not peer.suspect:
            peer.suspect = True
            self._context.counters.add(SUSPECTED)
            self._context.emit(Note(f"peer {peer.node} is SUSPECT: no answer for {self._context.config.suspect_s} s"))
            self._on_suspect(peer)

    def pinged(self, node: NodeId, message: wire.Ping) -> None:
        """Answer, and learn how full it is."""
        self._told(self._peers[node], message)
        vacancy, load, hot = self._context.vacancy(), self._context.load(), self._context.hot_version
        self._context.emit(Say(node, wire.Pong(message.call, vacancy, load, hot)))

    def _told(self, peer: Peer, message: wire.Ping | wire.Pong | wire.LookupReply | wire.OfferReply) -> None:
        peer.told_at = self._context.now
        peer.vacancy = Vacancy(*message.vacancy)
        peer.load.set(message.load, self._context.now + self._load_holds_s)

    def vacancy(self, node: NodeId) -> Vacancy:
        """How welcome a segment is there, as last heard; this node's own is exact."""
        peer = self._peers.get(node)
        return self._context.vacancy() if peer is None else peer.vacancy

    def loads(self) -> dict[NodeId, float]:
        """Bytes per second read from the arena of each node that can be reached: as last heard; this node's own is
        exact."""
        now = self._context.now
        loads = {peer.node: peer.load.at(now) for peer in self._peers.values() if peer.reachable}
        return {**loads, self._context.node: self._context.load()}

    def load(self, node: NodeId) -> float:
        """Of another node, and what this one asked of it lately, which may be counted twice."""
        peer, now = self._peers[node], self._context.now
        return peer.load.at(now) + peer.asked.at(now)

    def will_read(self, node: NodeId, nbytes: int) -> None:
        """So much is about to be read there, which no report says yet."""
        self._peers[node].asked.add(nbytes, self._context.now)

    @property
    def notices_s(self) -> float:
        """After which every node noticed that another stands still."""
        return 2 * self._round_s + self._context.config.suspect_s

    def silent_since(self, node: NodeId, began: float) -> None:
        """A transfer that began then missed its deadline. If the peer said nothing all the while, it is overdue."""
        peer = self._peers[node]
        peer.overdue = peer.overdue or peer.heard_at < began

    # -- speed

    def predict_s(self, node: NodeId, nbytes: int) -> float:
        """Expected time to fetch `nbytes` from `node`."""
        return nbytes / self._peers[node].rate

    def measured(self, node: NodeId, nbytes: int, seconds: float) -> None:
        """A fetch of `nbytes` took `seconds`."""
        if nbytes < MEASURED_BYTES:
            return
        peer = self._peers[node]
        rate = nbytes / max(seconds, 1e-6)
        peer.rate += RATE_WEIGHT * (rate - peer.rate)

    def missed(self, node: NodeId, nbytes: int, seconds: float) -> None:
        """A fetch of `nbytes` was not done after `seconds`. The next one is given longer: where the network became
        slower than it was none would ever end in time. Not much longer, since the peer may only have stood still."""
        if nbytes >= MEASURED_BYTES:
            peer = self._peers[node]
            peer.rate = max(peer.rate / MOST_SLOWER, min(peer.rate, nbytes / max(seconds, 1e-6)))

    def census(self) -> dict[str, int]:
        """Entries of each map; one call to each peer that is up may be a ping."""
        return {"calls": sum(len(peer.calls) for peer in self._peers.values())}

    def check_integrity(self) -> None:
        """AssertionError when a call waits at a peer that is down."""
        for peer in self._peers.values():
            assert peer.up or not peer.calls, f"calls wait at {peer.node}, which is down"
