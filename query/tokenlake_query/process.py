"""The whole process: what the daemon's messages start."""

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
from tokenlake_query.answering import Answerer
from tokenlake_query.asking import Peers
from tokenlake_query.channel import DaemonChannel
from tokenlake_query.engine_side import EngineSide
from tokenlake_query.opening import Opener
from tokenlake_query.segments import Pools
from tokenlake_query.steps import Tools
from tokenlake_query.tally import Tally
from tokenlake_query.timer import Timer
from tokenlake_query.work import Worker

__all__ = ["QueryEngineProcess"]

log = logging.getLogger(__name__)

OPENING_THREADS = 8
"""Views that are opened at a time; each waits for the daemon or for other nodes."""
FETCHING_THREADS = 8
"""Shares of views that are brought here at a time."""
MAX_CONNECTIONS = 1024
"""Of engines and of other query engines."""
REPORT_S = 1.0


class QueryEngineProcess:
    """`run` serves until the channel ends, which ends the process."""

    def __init__(self, channel: DaemonChannel) -> None:
        self._channel = channel
        self._tally = Tally()
        self._peers = Peers(channel.dial, self._tally)
        # Two pools: an answerer's view must not wait for those that wait for other nodes.
        self._opening = ThreadPoolExecutor(OPENING_THREADS, "open")
        self._serving = ThreadPoolExecutor(OPENING_THREADS, "serve")
        self._tools = Tools(Worker(), Timer(), ThreadPoolExecutor(FETCHING_THREADS, "fetch"))
        self._names = itertools.count(1)

    def run(self) -> None:
        """Does not return."""
        start, _ = self._channel.read()
        if not isinstance(start, supervision.Start):
            raise SystemExit(f"the daemon began with {type(start).__name__}; expected Start")
        self._pools = Pools(Path(start.socket), start.credential)
        self._tools.worker.start()
        self._tools.timer.start()
        self._report()
        while True:
            message, sock = self._channel.read()
            if isinstance(message, supervision.DialFailed):
                self._peers.unreached(message.node, message.reason)
            elif sock is not None and isinstance(message, supervision.DialSucceeded):
                self._peers.connected(message.node, sock)
            elif sock is not None:
                self._came(message, sock)

    def _came(self, message: supervision.ToQueryEngine, sock: socket.socket) -> None:
        if self._tally["connections"] >= MAX_CONNECTIONS:
            log.error("refused a connection: %d are open", MAX_CONNECTIONS)
            sock.close()
        elif isinstance(message, supervision.EngineConnected):
            try:
                layout = Layout.decode(message.layout)
            except TokenLakeError as error:
                log.error("an engine's connection that cannot be served: %s", error)
                sock.close()
                return
            opener = Opener(message.tenant, layout, self._pools, self._peers)
            name = f"engine {next(self._names)}"
            self._tally.add(connections=1)
            EngineSide(sock, name, opener, self._opening, self._tools, self._tally)
        elif isinstance(message, supervision.PeerConnected):
            self._tally.add(connections=1)
            Answerer(sock, message.node, self._pools, self._tools.worker, self._serving, self._tally)

    def _report(self) -> None:
        self._channel.tell(self._tally.report())
        self._tools.timer.at(time.monotonic() + REPORT_S, self._report)
