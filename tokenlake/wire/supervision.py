"""Messages between a daemon and the query engine that it started, over the socket pair the child inherits.

The daemon makes and authenticates every connection that the query engine serves or uses, and passes the socket's
descriptor. The end of the channel means that the other side is dead.
"""

from __future__ import annotations

import msgspec

from tokenlake.wire.fields import RecordKeys


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Start(_Message, frozen=True, tag=6):
    """First frame, from the daemon: its local socket, its node, and a credential for this query engine only. A
    `tokenlake_client.Pool` of tenant T uses `{credential}:{T}`."""

    socket: str
    node: str
    credential: str
    tenants: int
    """The number of tenants, which share the query engine's limits equally."""


class EngineConnected(_Message, frozen=True, tag=1):
    """From the daemon: an engine of `tenant` asks for a connection to this query engine, which is to serve it. Segments
    of the engine have the layout `layout` (`Layout.encode()`). The daemon sends the connection's socket descriptor
    with the frame."""

    tenant: str
    layout: bytes


class PeerConnected(_Message, frozen=True, tag=2):
    """From the daemon: the query engine of `node` has opened a connection to this query engine, which is to serve it.
    The daemon has verified that the other side is node `node` of the pool. It sends the connection's socket descriptor
    with the frame."""

    node: str
    keys: RecordKeys | None = None
    """The keys of its records; None: the connection is plain."""


class DialSucceeded(_Message, frozen=True, tag=3):
    """From the daemon, an answer to `Dial`: it has opened a connection to the query engine of `node`, for the queries
    of `tenant`. The daemon sends the connection's socket descriptor with the frame."""

    node: str
    tenant: str
    keys: RecordKeys | None = None
    """The keys of its records; None: the connection is plain."""


class DialFailed(_Message, frozen=True, tag=4):
    """From the daemon, an answer to `Dial`: the daemon opened no connection to the query engine of `node`. `reason` is
    the text of the error."""

    node: str
    tenant: str
    reason: str


class Dial(_Message, frozen=True, tag=5):
    """From the query engine: the daemon is to open a connection to the query engine of `node`, for the queries of
    `tenant`, and answers with `DialSucceeded` or `DialFailed`."""

    node: str
    tenant: str


class EngineEnded(_Message, frozen=True, tag=8):
    """From the query engine: a connection of an engine of `tenant` has ended. Sent once for each `EngineConnected`."""

    tenant: str


class Report(_Message, frozen=True, tag=7):
    """Counters and gauges of the query engine, which sends them once when it begins to serve, and every second. The
    daemon kills and replaces a query engine that sends none any more."""

    connections: int
    """Open connections from engines and from other query engines."""
    views: int
    """Open views, of engines of this node and of other nodes."""
    answers: int
    """Number of queries of engines that were answered, one per forward pass and layer."""
    lost_parts: int
    """Number of views whose part of an answered query was LOST: attention over their segments was not computed."""
    results: int
    """Number of answers to query engines of other nodes."""
    result_bytes: int
    """Bytes of partial attention in those answers."""
    result_ns: int
    """Nanoseconds in which attention for other query engines was computed."""
    late_results: int
    """Results of other query engines that arrived after their deadline."""


ToQueryEngine = Start | EngineConnected | PeerConnected | DialSucceeded | DialFailed
ToDaemon = Dial | EngineEnded | Report

query_engine_decoder: msgspec.msgpack.Decoder[ToQueryEngine] = msgspec.msgpack.Decoder(ToQueryEngine)
daemon_decoder: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
