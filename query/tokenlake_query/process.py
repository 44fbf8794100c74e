"""The query engine's process: starts its threads, reads the daemon's messages, and makes a server or a client for each
connection that the daemon passes on."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake.wire import supervision
from tokenlake_query.compute_thread import ComputeThread
from tokenlake_query.counters import Counters
from tokenlake_query.daemon_channel import DaemonChannel
from tokenlake_query.engine_server import EngineServer
from tokenlake_query.peer_client import PeerClients
from tokenlake_query.peer_server import PeerServer
from tokenlake_query.rounds import Threads
from tokenlake_query.segments import Pools
from tokenlake_query.timer_thread import TimerThread
from tokenlake_query.views import ViewOpener

__all__ = ["QueryEngineProcess"]

log = logging.getLogger(__name__)

OPENING_THREADS = 8
"""Number of threads in each of the two pools of threads that open views: for engines, and for other query engines.
Opening a view blocks a thread while it waits for the daemon or other nodes."""
FETCHING_THREADS = 8
"""Number of threads that fetch the segments of views whose node's query engine stopped answering."""
MAX_CONNECTIONS = 1024
"""Maximum number of connections from engines and other query engines, together, that are open at a time."""
REPORT_S = 1.0


class QueryEngineProcess:
    """The query engine's process: its threads, connections and counters. `run` serves until the channel to the daemon
    ends, and then exits the process."""

    def __init__(self, channel: DaemonChannel) -> None:
        self._channel = channel
        self._counters = Counters()
        self._peers = PeerClients(channel.dial, self._counters)
        # Views for other query engines are opened by threads of their own. If they queued behind views of engines,
        # which wait for other nodes, two query engines could wait for each other.
        self._opening = ThreadPoolExecutor(OPENING_THREADS, "open")
        self._opening_for_peers = ThreadPoolExecutor(OPENING_THREADS, "open-peer")
        self._threads = Threads(ComputeThread(), TimerThread(), ThreadPoolExecutor(FETCHING_THREADS, "fetch"))
        self._names = itertools.count(1)

    def run(self) -> None:
        """Does not return."""
        start, _ = self._channel.read()
        if not isinstance(start, supervision.Start):
            raise SystemExit(f"the daemon's first message is {type(start).__name__}; expected Start")
        self._pools = Pools(Path(start.socket), start.credential)
        self._threads.compute.start()
        self._threads.timer.start()
        self._report()
        while True:
            message, sock = self._channel.read()
            if isinstance(message, supervision.DialFailed):
                self._peers.unreached(message.node, message.reason)
            elif sock is not None and isinstance(message, supervision.DialSucceeded):
                self._peers.connected(message.node, sock)
            elif sock is not None:
                self._accept(message, sock)

    def _accept(self, message: supervision.ToQueryEngine, sock: socket.socket) -> None:
        """Serve a connection that the daemon accepted from an engine or from another query engine."""
        if self._counters["connections"] >= MAX_CONNECTIONS:
            log.error("refused a connection: %d are open", MAX_CONNECTIONS)
            sock.close()
        elif isinstance(message, supervision.EngineConnected):
            try:
                layout = Layout.decode(message.layout)
            except TokenLakeError as error:
                log.error("refused an engine's connection: %s", error)
                sock.close()
                return
            opener = ViewOpener(message.tenant, layout, self._pools, self._peers)
            name = f"engine {next(self._names)}"
            self._counters.add(connections=1)
            EngineServer(sock, name, opener, self._opening, self._threads, self._counters)
        elif isinstance(message, supervision.PeerConnected):
            self._counters.add(connections=1)
            compute = self._threads.compute
            PeerServer(sock, message.node, self._pools, compute, self._opening_for_peers, self._counters)

    def _report(self) -> None:
        self._channel.send(self._counters.report())
        self._threads.timer.at(time.monotonic() + REPORT_S, self._report)
