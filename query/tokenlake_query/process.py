"""The query engine's process: starts its threads, reads the daemon's messages, and makes a server or a client for each
connection that the daemon passes on."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from functools import partial as bind
from pathlib import Path

from tokenlake.errors import LimitReached
from tokenlake.opaque_layout import decode_layout, understood
from tokenlake.wire import supervision
from tokenlake_query.compute_thread import ComputeThread
from tokenlake_query.counters import Counters
from tokenlake_query.daemon_channel import DaemonChannel
from tokenlake_query.engine_server import EngineServer
from tokenlake_query.pace import Pace
from tokenlake_query.peer_client import PeerClients
from tokenlake_query.peer_server import PeerServer
from tokenlake_query.rounds import Threads
from tokenlake_query.segments import Pools
from tokenlake_query.tenant_limits import TenantLimits
from tokenlake_query.tenant_threads import TenantThreads
from tokenlake_query.timer_thread import TimerThread
from tokenlake_query.views import ViewOpener

log = logging.getLogger(__name__)

OPENING_THREADS = 8
"""Number of threads in each of the two pools of threads that open views: for engines, and for other query engines.
Opening a view blocks a thread while it waits for the daemon or other nodes."""
FETCHING_THREADS = 8
"""Number of threads that fetch the segments of views whose node's query engine stopped answering."""
MAX_CONNECTIONS = 2048
"""Number of connections from engines and other query engines from which on further ones of query engines are refused.
The daemon bounds the connections of engines (`tokenlake_server.engines.query_engine`)."""
REPORT_S = 1.0
STUCK_S = 60.0
"""Seconds for which a slice of the computation may last. It should take milliseconds; the first one of a kernel for a
GPU includes the compilation."""


class QueryEngineProcess:
    """The query engine's process: its threads, connections and counters. `run` serves until the channel to the daemon
    ends, and then exits the process."""

    def __init__(self, channel: DaemonChannel) -> None:
        self._channel = channel
        self._counters = Counters()
        self._peers = PeerClients(channel.dial, self._counters)
        # Views for other query engines are opened by threads of their own. If they queued behind views of engines,
        # which wait for other nodes, two query engines could wait for each other.
        self._pace = Pace()
        self._opening = TenantThreads(OPENING_THREADS, "open", self._pace)
        self._opening_for_peers = TenantThreads(OPENING_THREADS, "open-peer", self._pace)
        self._fetching = TenantThreads(FETCHING_THREADS, "fetch", self._pace)
        self._compute, self._timer = ComputeThread(), TimerThread()
        self._names = itertools.count(1)

    def run(self) -> None:
        """Does not return."""
        start, _ = self._channel.read()
        if not isinstance(start, supervision.Start):
            raise SystemExit(f"the daemon's first message is {type(start).__name__}; expected Start")
        self._pools = Pools(Path(start.socket), start.credential)
        self._limits = TenantLimits(start.tenants)
        self._compute.start()
        self._timer.start()
        self._report()
        while True:
            message, sock = self._channel.read()
            try:
                self._handle(message, sock)
            except Exception as error:
                # Mostly no thread or descriptor is left. The connections that exist are still served.
                log.exception("the daemon's %s could not be handled", type(message).__name__)
                if sock is not None:
                    sock.close()
                if isinstance(message, supervision.DialSucceeded):
                    self._peers.unreached(message.node, message.tenant, str(error))
                elif isinstance(message, supervision.EngineConnected):
                    self._channel.send(supervision.EngineEnded(message.tenant))

    def _handle(self, message: supervision.ToQueryEngine, sock: socket.socket | None) -> None:
        """Handle a message of the daemon. `sock`: the connection that was sent with it, if there is one."""
        if isinstance(message, supervision.DialFailed):
            self._peers.unreached(message.node, message.tenant, message.reason)
        elif sock is None:
            raise OSError("a connection arrived without its descriptor")
        elif isinstance(message, supervision.DialSucceeded):
            self._peers.connected(message.node, message.tenant, sock, message.keys)
        elif isinstance(message, supervision.EngineConnected):
            self._serve_engine(message, sock)
        elif isinstance(message, supervision.PeerConnected):
            if self._counters["connections"] >= MAX_CONNECTIONS:
                raise LimitReached(f"{MAX_CONNECTIONS} connections are open")
            PeerServer(
                sock,
                message.node,
                self._pools,
                self._compute,
                self._opening_for_peers,
                self._limits,
                self._pace,
                self._counters,
                message.keys,
            )

    def _serve_engine(self, message: supervision.EngineConnected, sock: socket.socket) -> None:
        tenant = message.tenant
        opener = ViewOpener(tenant, understood(decode_layout(message.layout)), self._pools, self._peers)
        threads = Threads(tenant, self._compute, self._timer, self._fetching)
        ended = bind(self._channel.send, supervision.EngineEnded(tenant))
        name, limits = f"engine {next(self._names)}", self._limits
        EngineServer(sock, name, opener, self._opening, threads, limits, self._pace, self._counters, ended)

    def _report(self) -> None:
        """Report to the daemon, which kills a process that does not report: a process whose computing thread does not
        return from a slice counts as one."""
        if self._compute.slice_lasts() < STUCK_S:
            self._channel.send(self._counters.report())
        self._timer.at(time.monotonic() + REPORT_S, self._report)
