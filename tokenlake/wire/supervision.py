"""Messages between a daemon and the query engine that it started, over the socket pair the child inherits.

The daemon makes every connection that the query engine serves or uses: it knows who is at the other end, the query
engine is handed the socket. The channel's end is the other side's death.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "DialSucceeded",
    "Dial",
    "EngineConnected",
    "PeerConnected",
    "Report",
    "Start",
    "ToDaemon",
    "ToQueryEngine",
    "DialFailed",
    "daemon_decoder",
    "query_engine_decoder",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Start(_Message, frozen=True, tag=6):
    """First frame: the daemon's local socket, its node, and a credential that is the query engine's alone. For a
    `tokenlake_client.Pool` of tenant T it is `{credential}:{T}`."""

    socket: str
    node: str
    credential: str


class EngineConnected(_Message, frozen=True, tag=1):
    """An engine's connection, its descriptor beside the frame: of this tenant, with segments of this layout
    (`Layout.encode()`)."""

    tenant: str
    layout: bytes


class PeerConnected(_Message, frozen=True, tag=2):
    """A connection that the query engine of `node`, a proven member, dialled; its descriptor beside the frame."""

    node: str


class DialSucceeded(_Message, frozen=True, tag=3):
    """Answers `Dial`: a connection to the query engine of `node`, its descriptor beside the frame."""

    node: str


class DialFailed(_Message, frozen=True, tag=4):
    """Answers `Dial`: there is none now."""

    node: str
    reason: str


class Dial(_Message, frozen=True, tag=5):
    """From the query engine: connect me with that of `node`."""

    node: str


class Report(_Message, frozen=True, tag=7):
    """From the query engine, once it serves, and every second."""

    connections: int
    """Of engines and of other query engines that ask here."""
    views: int
    """Open here, for engines of this node and for other nodes."""
    answers: int
    """Queries of engines that were answered, one per step and layer."""
    lost_parts: int
    """Parts of these that were LOST."""
    results: int
    """Answers to other query engines."""
    late_results: int
    """From other query engines, when nobody waited any more."""


ToQueryEngine = Start | EngineConnected | PeerConnected | DialSucceeded | DialFailed
ToDaemon = Dial | Report

query_engine_decoder: msgspec.msgpack.Decoder[ToQueryEngine] = msgspec.msgpack.Decoder(ToQueryEngine)
daemon_decoder: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
