"""Checks of requests of engines and of messages of other nodes before the rules change anything.

::

    message --> consistent by itself (`tokenlake.wire.checks`) --> fits the calls of this node, its session (here)
            --> the handler, which cannot fail on its input

The decoders check the types and bounds of single fields (`tokenlake.wire.fields`). A message may name a node that is no
member, because its sender may have a newer ring, or an older one. Such a name is treated as that of a node that is
down. What the driver itself tells is not checked: handlers assert it.
"""

from __future__ import annotations

from tokenlake.core import events
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.serve import Serving
from tokenlake.core.context import Context
from tokenlake.core.engines.sessions import Sessions
from tokenlake.identity import ConnectionId, NodeId
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import engine, peer
from tokenlake.wire.checks import check_peer_message, check_request


class Checks:
    """Checks events against the state of one node's rules, which it never changes."""

    def __init__(self, context: Context, sessions: Sessions, peers: Peers, serving: Serving) -> None:
        self._context = context
        self._sessions = sessions
        self._peers = peers
        self._serving = serving

    def check(self, event: events.Event) -> None:
        """Raises `ValueError` with the reason for an event that no correct engine or peer causes."""
        match event:
            case events.Requested():
                self._requested(event)
            case events.PeerUp() | events.PeerDown() | events.PeerSent() | events.PullRequested():
                if self._peers.get(NodeId(event.node)) is None:
                    raise ValueError(f"{event.node!r} is not another member of the cluster")
                if isinstance(event, events.PeerSent):
                    self._peer_sent(event)
                elif isinstance(event, events.PullRequested):
                    self._pull_requested(event)

    def _requested(self, event: events.Requested) -> None:
        message = event.message
        check_request(message)
        if type(message) is engine.Regrant:
            numbers = (*(lease for lease, *_ in message.leases), *(write for write, _ in message.writes))
            for number in filter(self._context.is_own_id, numbers):
                raise ValueError(f"a Regrant of {number}, a number of this daemon's and not of the one before")
        if type(message) is engine.Commit:
            process = self._sessions.process(ConnectionId(event.connection))
            if process is not None and message.shards >> process.session.shards:
                raise ValueError(
                    f"a Commit of shards {message.shards:#b}, where segments have {process.session.shards} shards"
                )

    def _peer_sent(self, event: events.PeerSent) -> None:
        message = event.message
        check_peer_message(message)
        match message:
            case peer.Pong():
                self._peers.check_reply(NodeId(event.node), message, 0)
            case peer.LookupReply() | peer.OfferReply():
                self._peers.check_reply(NodeId(event.node), message, len(message.codes))
            case peer.ExplainMissingReply():
                self._peers.check_reply(NodeId(event.node), message, len(message.rules))

    def _pull_requested(self, event: events.PullRequested) -> None:
        if len(event.keys) % KEY_BYTES:
            raise ValueError(f"keys of a Pull take {len(event.keys)} bytes, which is not a multiple of {KEY_BYTES}")
        if len(event.keys) > peer.MAX_PULLED * KEY_BYTES:
            raise ValueError(f"a Pull of {len(event.keys) // KEY_BYTES} segments; the limit is {peer.MAX_PULLED}")
        self._serving.check_pull(event.stream)
