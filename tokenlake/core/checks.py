"""Is an event one that the rules can take? Asked before anything is changed.

::

    event --> its numbers and names mean something here (`Checks`)
          --> its message adds up by itself (`tokenlake.wire.checks`)
          --> its message fits what this node asked for, and the ring (`Checks`)
          --> a handler, which cannot fail on its input

Types and bounds of single fields are the decoders' business (`tokenlake.wire.fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tokenlake.core import events
from tokenlake.core.context import Context
from tokenlake.core.fetch import Transfers
from tokenlake.core.learned import Learned
from tokenlake.core.peers import Peers
from tokenlake.core.regions import Regions
from tokenlake.core.replication import MAX_COUNTED
from tokenlake.core.serve import Serving
from tokenlake.core.sessions import Sessions
from tokenlake.hot import COUNTERS
from tokenlake.identity import ConnectionId, NodeId
from tokenlake.keys import KEY_BYTES
from tokenlake.layout import MAX_SEGMENT_BYTES, MAX_SHARDS
from tokenlake.wire import engine, peer
from tokenlake.wire.checks import check_peer_message, check_request

__all__ = ["Checks"]


class Checks:
    """Of one node. Reads the parts of its rules, and changes none."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        peers: Peers,
        transfers: Transfers,
        serving: Serving,
        regions: Regions,
        learned: Learned,
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._peers = peers
        self._transfers = transfers
        self._serving = serving
        self._regions = regions
        self._learned = learned
        self._members = frozenset(context.ring.members)
        self._events: dict[type, Callable[[Any], None]] = {
            events.Joined: self._joined,
            events.Requested: self._requested,
            events.ProcessGone: _nothing,
            events.PeerUp: lambda e: self._peer(e.node),
            events.PeerDown: lambda e: self._peer(e.node),
            events.PeerSent: self._said,
            events.FetchDone: lambda e: self._transfers.check_done(e.fetch, e.codes, e.checksums),
            events.PullRequested: self._pull_asked,
            events.SendDone: _nothing,
            events.SlotChecked: _nothing,
            events.RegionReady: lambda e: self._regions.check_ready(e.region),
            events.StatisticsLoaded: lambda e: self._learned.check(e.data),
            events.ExplainRequested: self._asked,
            events.Tick: _nothing,
        }
        self._fits: dict[type, Callable[[NodeId, Any], None]] = {
            peer.LookupReply: self._lookup_reply,
            peer.ReadyReply: self._ready_reply,
            peer.OfferReply: lambda node, m: self._reply(node, m, len(m.codes)),
            peer.ReplicateReply: lambda node, m: self._reply(node, m, len(m.codes)),
            peer.ExplainMissingReply: lambda node, m: self._reply(node, m, len(m.rules)),
            peer.Pong: lambda node, m: self._reply(node, m, 0),
            peer.Redundant: lambda node, m: self._names(m, m.nodes),
            peer.Evicted: lambda node, m: self._names(m, (m.node,)),
            peer.Replicate: lambda node, m: self._names(m, (m.source, m.owner)),
            peer.ReadCounts: self._reads,
            peer.HotSet: self._hot_set,
        }

    def check(self, event: events.Event, now: float) -> None:
        """Raises `ValueError` with the reason when the rules cannot take the event; nothing was changed then."""
        if not self._context.now <= now < math.inf:
            raise ValueError(f"an event at {now} s after one at {self._context.now} s")
        check = self._events.get(type(event))
        if check is None:
            raise ValueError(f"{type(event).__name__} is no event of the rules")
        check(event)

    # -- engines

    def _joined(self, event: events.Joined) -> None:
        connection = ConnectionId(event.connection)
        if any(connection in session.processes for session in self._sessions):
            raise ValueError(f"connection {event.connection} has joined already")
        for name, value, least, most in (
            ("slot_bytes", event.slot_bytes, 1, MAX_SEGMENT_BYTES),
            ("shards", event.shards, 1, MAX_SHARDS),
            ("segment_tokens", event.segment_tokens, 0, 1 << 32),
        ):
            if not least <= value <= most:
                raise ValueError(f"connection {event.connection} joins with {name!r} of {value}; {least} to {most}")

    def _requested(self, event: events.Requested) -> None:
        message = event.message
        check_request(message)
        if type(message) is engine.Commit:
            process = self._sessions.process(ConnectionId(event.connection))
            if process is not None and message.shards >> process.session.shards:
                raise ValueError(
                    f"a Commit of shards {message.shards:#b}, where segments have {process.session.shards} shards"
                )

    def _asked(self, event: events.ExplainRequested) -> None:
        if type(event.message) is not engine.Explain:
            raise ValueError(f"{type(event.message).__name__} asks about no request")

    # -- peers

    def _peer(self, node: str) -> None:
        if self._peers.get(NodeId(node)) is None:
            raise ValueError(f"{node!r} is no other member of the cluster")

    def _said(self, event: events.PeerSent) -> None:
        self._peer(event.node)
        message = event.message
        check_peer_message(message)
        fits = self._fits.get(type(message))
        if fits is not None:
            fits(NodeId(event.node), message)

    def _names(self, message: Any, nodes: Iterable[str]) -> None:
        if not self._members.issuperset(nodes):
            stranger = next(node for node in nodes if node not in self._members)
            raise ValueError(f"a {type(message).__name__} names {stranger!r}, which is no member of the cluster")

    def _reply(self, node: NodeId, message: Any, count: int) -> None:
        """Where a call waits for it, it answers that call, key by key."""
        self._peers.check_reply(node, message, count)

    def _lookup_reply(self, node: NodeId, message: peer.LookupReply) -> None:
        self._reply(node, message, len(message.codes))
        self._names(message, message.nodes)
        if message.redirect:
            self._names(message, (message.redirect,))

    def _ready_reply(self, node: NodeId, message: peer.ReadyReply) -> None:
        self._reply(node, message, len(message.codes))
        self._names(message, message.first_writers)
        self._names(message, [previous_owner for previous_owner in message.previous_owners if previous_owner])

    def _reads(self, node: NodeId, message: peer.ReadCounts) -> None:
        if len(message.depths) > COUNTERS:
            raise ValueError(f"reads of {len(message.depths)} segments; at most {COUNTERS}")

    def _hot_set(self, node: NodeId, message: peer.HotSet) -> None:
        members = len(self._members)
        if len(message.entries) > MAX_COUNTED:
            raise ValueError(f"a hot set of {len(message.entries)} segments; at most {MAX_COUNTED}")
        if any(len(entry.nodes) > members for entry in message.entries):
            raise ValueError(f"a hot set names more nodes than the ring's {members}")
        if any(index >= members for entry in message.entries for index in entry.nodes):
            raise ValueError(f"a hot set names a node beyond the ring's {members}")

    def _pull_asked(self, event: events.PullRequested) -> None:
        self._peer(event.node)
        if len(event.keys) % KEY_BYTES:
            raise ValueError(f"keys of a Pull take {len(event.keys)} bytes, which is no multiple of {KEY_BYTES}")
        self._serving.check_pull(event.stream)


def _nothing(event: Any) -> None:
    """It can be taken whatever its fields are; one about something that is gone changes nothing."""
