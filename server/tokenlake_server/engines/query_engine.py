"""The daemon's side of the query engine: starts the child process, restarts it, and hands it its connections.

The process runs `tokenlake_query`. The daemon authenticates both ends of each of its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import resource
import socket
import subprocess
import sys
from collections import Counter

from tokenlake.errors import LimitReached, TokenLakeError, Unreachable
from tokenlake.layout import MAX_LAYOUT_BYTES
from tokenlake.wire import pack_frame, peer, supervision
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake_server.bulk.blocking_sockets import NewKeys, introduce, no_keys
from tokenlake_server.loop.frame_connection import FrameConnection
from tokenlake_server.loop.started_threads import started_threads
from tokenlake_server.peers.addresses import PeerAddresses, set_tcp_options
from tokenlake_server.peers.handshake import PeerIdentity
from tokenlake_server.start.start_errors import ModuleMissing

log = logging.getLogger(__name__)

DIAL_THREADS = 8
"""Number of threads that connect to query engines of other nodes. A frozen node blocks one of them for about
`DIAL_S`."""
DIAL_S = 1.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
"""Limit in seconds of the pause before an ended query engine is started again. The pause doubles, from `FIRST_PAUSE_S`
on, each time that a process ended within this time."""
MAX_ENGINES = 768
"""Limit of the connections of engines that the query engine serves, each with a thread. Every tenant has an equal share
of it."""
ENGINE_DESCRIPTORS = 16
"""Descriptors for each connection of an engine, of those that a process may have: the socket, up to eight that were
received and not taken, and as many again for connections to daemons and other nodes."""
SILENT_S = 15.0
"""Seconds without a report after which a query engine is killed and replaced. It sends one a second. A process that an
operator stops is replaced too."""
START_S = 300.0
"""Seconds until the first report of a process, which imports torch meanwhile."""
STOP_S = 5.0
"""Seconds after which a query engine whose channel is closed is killed when it has not ended."""


class QueryEngine:
    """Runs the query engine as a child process, which this object owns. Used on the control loop only."""

    def __init__(
        self,
        start: supervision.Start,
        identity: PeerIdentity,
        addresses: PeerAddresses,
        loop: asyncio.AbstractEventLoop,
        new_keys: NewKeys = no_keys,
        *,
        log_objects: bool = False,
    ) -> None:
        """Makes the daemon's side of the query engine, and starts no process. `new_keys` makes the keys of connections.
        `log_objects`: the log of the process has JSON objects. Raises `ModuleMissing` if the package or torch is not
        installed."""
        for module in ("tokenlake_query", "torch"):
            if importlib.util.find_spec(module) is None:
                raise ModuleMissing("query_engine", True, module, "query")
        self._start = start
        self._identity = identity
        self._addresses = addresses
        self._loop = loop
        self._new_keys = new_keys
        self._of_log = ["--log-objects-of", start.node] if log_objects else []
        self._threads = started_threads(DIAL_THREADS, "dial-query")
        self._channel: FrameConnection | None = None
        self._closing = False
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._share = max(1, min(MAX_ENGINES, descriptors // ENGINE_DESCRIPTORS) // start.tenants)
        """Limit of the connections of one tenant's engines."""
        self._engines: Counter[str] = Counter()
        """The connections of engines that this process of the query engine serves, by tenant."""
        self.starts = 0
        """The number of query engine processes that this daemon has started."""
        self.report: supervision.Report | None = None
        """The newest report of the query engine to the daemon; None while no process serves."""
        self._task = loop.create_task(self._keep_running())

    @property
    def ready(self) -> bool:
        """True while a query engine process serves."""
        return self.report is not None

    def connect_engine(self, tenant: str, layout: bytes) -> socket.socket:
        """A connection to the query engine, for an engine; the caller closes it. Raises `Unreachable` while no query
        engine serves, and `LimitReached` when the tenant has its share of connections."""
        refusal = Unreachable(f"the query engine of node '{self._start.node}' is not ready")
        if not self.ready:
            raise refusal
        if self._engines[tenant] >= self._share:
            raise LimitReached(
                f"the query engine serves {self._share} connections of this tenant; no more are accepted"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._hand_over(supervision.EngineConnected(tenant, layout), theirs)
        if self._channel is None:
            # The channel to the query engine broke while the connection was sent over it.
            ours.close()
            raise refusal
        self._engines[tenant] += 1
        return ours

    def adopt(self, sock: socket.socket, hello: peer.PeerHello, keys: RecordKeys | None) -> None:
        """Hand over a connection that another node's query engine opened. Takes `sock` over. `keys`: of its records;
        None if it is plain."""
        with sock:
            sock.setblocking(True)
            self._hand_over(supervision.PeerConnected(hello.node, keys), sock)

    def _hand_over(self, message: supervision.ToQueryEngine, sock: socket.socket | None) -> None:
        if self._channel is not None:
            self._channel.send(pack_frame(message), [sock.fileno()] if sock else [])

    # -- the process

    async def _keep_running(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing:
            began = self._loop.time()
            try:
                await self._run()
            except Exception as error:
                # After any failure another start is tried; without one the node would have no query engine until it
                # restarts.
                log.error("the query engine could not be started: %s", error)
            lasted = self._loop.time() - began
            pause = FIRST_PAUSE_S if lasted > LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
            if not self._closing:
                await asyncio.sleep(pause)

    async def _run(self) -> None:
        """Start one query engine process and wait until it has ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "tokenlake_query", "--channel", str(theirs.fileno()), *self._of_log]
        try:
            with theirs:
                # The process is started in a thread, because a fork takes milliseconds, during which the loop must
                # serve.
                starting = asyncio.ensure_future(
                    asyncio.to_thread(subprocess.Popen, command, pass_fds=[theirs.fileno()])
                )
                try:
                    process = await asyncio.shield(starting)
                except asyncio.CancelledError:
                    # The daemon stops while the process starts: wait for the start and end the process, which must not
                    # outlive the daemon.
                    ours.close()
                    await asyncio.to_thread(_kill, await starting)
                    raise
        except BaseException:
            ours.close()
            raise
        self.starts += 1
        ended: asyncio.Future[None] = self._loop.create_future()

        def closed(reason: str) -> None:
            self._channel = self.report = None
            self._engines.clear()
            if not ended.done():
                ended.set_result(None)

        self._channel = FrameConnection(
            self._loop,
            ours,
            peer.MAX_FRAME,
            self._received,
            closed,
            max_unsent=2 * MAX_ENGINES * MAX_LAYOUT_BYTES,
        )
        self._channel.send(pack_frame(self._start))
        ended_itself = False
        try:
            ended_itself = await self._watch(ended)
        finally:
            if self._channel is not None:
                self._channel.close("the daemon stops")
            # A process that must end is killed: while it imports torch it does not read that its channel has ended.
            status = await asyncio.to_thread(_end if ended_itself else _kill, process)
        if not self._closing:
            log.error("the query engine ended with status %d; starting another", status)

    async def _watch(self, ended: asyncio.Future[None]) -> bool:
        """Wait until the channel has ended (returns True), or the process has sent no report for too long (False).

        The time is counted in seconds that the loop has waited, so that reports which arrived while this daemon stood
        still are read first."""
        silent, newest = 0, self.report
        while True:
            done, _ = await asyncio.wait([ended], timeout=1.0)
            if done:
                return True
            silent = silent + 1 if self.report is newest else 0
            newest = self.report
            if silent > (START_S if newest is None else SILENT_S):
                log.error("the query engine has sent no report for %d s and is killed", silent)
                return False

    def _received(self, body: bytes) -> None:
        message = decode(supervision.daemon_decoder, body)
        if isinstance(message, supervision.Report):
            self.report = message
        elif isinstance(message, supervision.EngineEnded):
            self._engines[message.tenant] -= 1
        elif message.node in self._addresses:
            self._threads.submit(self._dial, message.node, message.tenant)
        else:
            reason = f"node '{message.node}' is not among the peers of this node"
            self._hand_over(supervision.DialFailed(message.node, message.tenant, reason), None)

    def _dial(self, node: str, tenant: str) -> None:
        """Open a connection to another node's query engine, for the queries of `tenant`, in a thread."""
        sock: socket.socket | None = None
        try:
            endpoint = self._addresses.last(node)
            sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
            sock.settimeout(DIAL_S)
            set_tcp_options(sock)
            try:
                sock.connect(endpoint.address)
            except OSError:
                self._addresses.failed(node, endpoint)
                raise
            keys = introduce(sock, self._identity, node, "query", self._new_keys)
            sock.settimeout(None)
        except (OSError, TokenLakeError) as error:
            if sock is not None:
                sock.close()
            self._answer(supervision.DialFailed(node, tenant, str(error)), None)
        else:
            self._answer(supervision.DialSucceeded(node, tenant, keys), sock)

    def _answer(self, message: supervision.ToQueryEngine, sock: socket.socket | None) -> None:
        """Send the outcome of a dial to the query engine, from a thread."""

        def send() -> None:
            with sock or contextlib.nullcontext():
                self._hand_over(message, sock)

        # A closed loop raises RuntimeError: the daemon may stop before the thread that dialled has returned.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(send)

    async def close(self) -> None:
        """End the query engine process and wait until it has ended."""
        self._closing = True
        if self._channel is not None:
            self._channel.close("the daemon stops")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a query engine process whose channel has ended, kill it after `STOP_S` seconds, and return its exit
    status."""
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()
