"""The local socket: engines' processes come, are identified, and speak to the rules."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenlake.config import format_size
from tokenlake.core import events
from tokenlake.core.instructions import Answer, Welcomed
from tokenlake.errors import LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.identity import Incarnation, NodeId
from tokenlake.keys import KEY_BYTES, probe
from tokenlake.layout import Layout
from tokenlake.store.region import RegionShape
from tokenlake.wire import agree, engine, pack_frame
from tokenlake.wire.frames import decode
from tokenlake_server.arena import Arena
from tokenlake_server.driver import Driver
from tokenlake_server.frames import FrameConnection
from tokenlake_server.local_socket import listen
from tokenlake_server.processes import PeerProcess
from tokenlake_server.tenants import Tenants

__all__ = ["EngineListener", "EngineSettings"]

log = logging.getLogger(__name__)

PROCESSES_PER_SESSION = 16
"""Bound on connections, over all sessions: ranks of one engine plus its scheduler, with room to restart."""
HELLO_S = 10.0
"""A connection that has not said `Hello` by then is closed."""
MAX_KEYS = 1 << 16
"""Of one request."""
MAX_IN_FLIGHT = 1024
"""Requests of one connection that are not answered yet."""
ACCEPT_PAUSE_S = 0.5
"""After an accept that failed for want of descriptors: the listening socket stays readable meanwhile."""


ConnectQuery = Callable[[str, bytes], socket.socket]


class EngineSettings(msgspec.Struct, frozen=True):
    """What a listener must know of its node."""

    node: NodeId
    incarnation: Incarnation
    path: Path
    max_frame: int
    max_sessions: int
    region_bytes: int
    lease_s: float


class _Connection:
    """One process, from accept until it is dead."""

    def __init__(self, number: int, process: PeerProcess) -> None:
        self.number = number
        self.origin = number
        """The first of the connections that this one goes on from, each from the one before: what the process calls it
        by, which may never have heard of those in between (test_what_a_welcome_that_got_lost_had_taken_over)."""
        self.process = process
        self.frames: FrameConnection | None = None
        self.hello: engine.Hello | None = None
        self.layout: Layout | None = None
        self.tenant = ""
        self.secret = b""
        self.version = 0
        self.session = 0
        self.joined = False
        self.maps = False
        """The process was given a descriptor of the arena, now or over the connection that this one goes on from."""
        self.deadline: asyncio.TimerHandle | None = None
        self.in_flight = 0
        """Requests that the rules have not answered yet."""


class EngineListener:
    """Owns the socket's path and all connections to it."""

    def __init__(
        self,
        settings: EngineSettings,
        tenants: Tenants,
        arena: Arena,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        connect_query: ConnectQuery,
    ) -> None:
        """`connect_query(tenant, layout)`: a connection to the query engine, which is then the caller's; raises
        `TokenLakeError`."""
        self._connect_query = connect_query
        self._settings = settings
        self._tenants = tenants
        self._arena = arena
        self._driver = driver
        self._loop = loop
        self._connections: dict[int, _Connection] = {}
        self._last = 0
        self._requests: dict[type, Callable[[_Connection, engine.EngineRequest], None]] = {
            engine.Hello: self._hello,
            engine.OpenRegion: self._open_region,
            engine.OpenQuery: self._open_query,
            engine.Explain: self._explain,
            engine.Bye: self._bye,
        }
        self._sock = listen(settings.path)
        loop.add_reader(self._sock, self._accept)
        driver.carry_out(Answer, self._answer)
        driver.carry_out(Welcomed, self._welcomed)

    # -- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a local connection could not be accepted: %s", error)
            self._loop.remove_reader(self._sock)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        self._last += 1
        connection = _Connection(self._last, PeerProcess(sock))
        frames = FrameConnection(
            self._loop,
            sock,
            self._settings.max_frame,
            lambda body: self._frame(connection, body),
            lambda reason: self._closed(connection, reason),
            lambda error: self._refuse(connection, 0, error),
        )
        connection.frames = frames
        limit = self._settings.max_sessions * PROCESSES_PER_SESSION
        self._connections[connection.number] = connection
        if len(self._connections) > limit:
            self._refuse(connection, 0, LimitReached(f"{limit} processes are connected; no more are accepted"))
            return
        connection.deadline = self._loop.call_later(HELLO_S, lambda: frames.close("it never said Hello"))

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _frame(self, connection: _Connection, body: bytes) -> None:
        try:
            message = decode(engine.request_decoder, body)
            if not connection.joined and not isinstance(message, engine.Hello | engine.Explain):
                raise ProtocolRefused(f"the first frame must be Hello, not {type(message).__name__}")
        except ProtocolRefused as error:
            self._refuse(connection, 0, error)
            return
        own = self._requests.get(type(message))
        if own is not None:
            try:
                own(connection, message)
            except OSError as error:
                # There is no descriptor left. Unanswered, its engine would take this daemon for frozen.
                reason = f"the daemon cannot serve a {type(message).__name__} now: {error.strerror}"
                self._send(connection, engine.Failed(getattr(message, "id", 0), LimitReached.__name__, reason))
            return
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, engine.Match | engine.Prepare | engine.Fetch):
            kind = type(message).__name__
            log.debug("request %r: a %s of connection %d", message.request, kind, connection.number)
        number = getattr(message, "id", None)
        if number is not None:
            reason = _beyond(connection, message)
            if reason:
                self._send(connection, engine.Failed(number, LimitReached.__name__, reason))
                return
            connection.in_flight += 1
        elif reason := _too_many_keys(message):
            # It is not answered: whoever sends more than our clients do is no client of this protocol.
            self._refuse(connection, 0, LimitReached(reason))
            return
        self._driver.handle(events.Requested(connection.number, message))

    def refuse(self, number: int, error: Exception) -> None:
        """Tell a process why, and close its connection."""
        connection = self._connections.get(number)
        if connection is not None:
            self._refuse(connection, 0, error)

    def _refuse(self, connection: _Connection, request: int, error: Exception) -> None:
        kind = type(error).__name__ if isinstance(error, TokenLakeError) else ProtocolRefused.__name__
        self._send(connection, engine.Failed(request, kind, str(error)))
        if connection.frames is not None:
            connection.frames.close(f"refused: {error}")

    def _send(self, connection: _Connection, message: engine.EngineReply) -> None:
        if connection.frames is not None:
            connection.frames.send(pack_frame(message))

    def _closed(self, connection: _Connection, reason: str) -> None:
        log.info("connection %d of process %d: %s", connection.number, connection.process.pid, reason)
        connection.frames = None
        if connection.deadline is not None:
            connection.deadline.cancel()
        # A process that maps the arena and lives may still touch it: what it holds waits for its death.
        if not connection.maps:
            self._gone(connection)

    def _gone(self, connection: _Connection) -> None:
        """It is dead, or said that it holds nothing."""
        joined = connection.joined
        if self._forget(connection) and joined:
            self._driver.handle(events.ProcessGone(connection.number))

    def _forget(self, connection: _Connection) -> bool:
        """Give up what the connection takes here; False when that was done before."""
        if self._connections.pop(connection.number, None) is None:
            return False
        connection.joined = False
        if connection.process.pidfd is not None:
            self._loop.remove_reader(connection.process.pidfd)
        connection.process.close()
        if connection.frames is not None:
            connection.frames.close("the process is gone")
        return True

    # -- requests that concern the process, not the segments

    def _hello(self, connection: _Connection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Hello)
        if connection.hello is not None:
            self._refuse(connection, message.id, ProtocolRefused("Hello was said twice"))
            return
        if message.incarnation not in (0, self._settings.incarnation):
            # Numbers of an earlier daemon: here they may name somebody else's.
            message = msgspec.structs.replace(message, session=0, resume=0)
        try:
            self._identify(connection, message)
        except TokenLakeError as error:
            self._refuse(connection, message.id, error)
            return
        layout = connection.layout
        assert layout is not None
        resumed = self._resumed(connection)
        self._driver.handle(
            events.Joined(
                connection.number,
                message.id,
                connection.tenant,
                layout.segment_bytes,
                layout.shards,
                # What a query engine reads is counted where it was asked for.
                0 if self._tenants.is_query_engine(message.token) else layout.segment_tokens,
                message.session,
                resumed.number if resumed else 0,
            )
        )

    def _resumed(self, connection: _Connection) -> _Connection | None:
        """The connection that the same process had before, and says it goes on from."""
        hello = connection.hello
        if hello is None or not hello.resume:
            return None
        wanted = (hello.resume, hello.session, connection.process.pid)
        others = (c for c in self._connections.values() if c.joined and c is not connection)
        return next((c for c in others if (c.origin, c.session, c.process.pid) == wanted), None)

    def _identify(self, connection: _Connection, message: engine.Hello) -> None:
        connection.version = agree(message.oldest_version, message.newest_version)
        tenant = self._tenants.identify(connection.process.uid, message.token)
        layout = Layout.decode(message.layout)
        if message.probe != probe(engine.PROBE_SECRET, layout.fingerprint()):
            raise ProtocolRefused(
                "the probe hash is another one: client and daemon hash the same prefix to different keys; "
                "install the same version of tokenlake on both sides"
            )
        if not RegionShape(self._settings.region_bytes, layout.segment_bytes).slots:
            raise LimitReached(
                f"one segment of this layout takes {layout.segment_bytes} bytes, more than a region of "
                f"{format_size(self._settings.region_bytes)}; raise the daemon's 'region_size'"
            )
        self._check_session(message.session, tenant.name, layout)
        connection.hello, connection.layout = message, layout
        connection.tenant, connection.secret = tenant.name, tenant.secret

    def _check_session(self, session: int, tenant: str, layout: Layout) -> None:
        """Raise `LayoutRefused` for a process that joins a session of its tenant with another layout."""
        others = (c.layout for c in self._connections.values() if c.session == session and c.tenant == tenant)
        former = next((other for other in others if other is not None), layout) if session else layout
        for field in layout.__struct_fields__:
            mine, theirs = getattr(layout, field), getattr(former, field)
            if mine != theirs:
                raise LayoutRefused(
                    f"layout field '{field}' is {mine!r}; session {session} has another layout, with {theirs!r}"
                )

    def _welcomed(self, instruction: Welcomed) -> None:
        connection = self._connections.get(instruction.connection)
        if connection is None or connection.layout is None:
            return
        connection.joined = True
        connection.session = instruction.session
        if connection.process.pidfd is not None:
            self._loop.add_reader(connection.process.pidfd, self._gone, connection)
        former = self._resumed(connection)
        if former is not None:
            # The rules handed its holdings to the new connection.
            connection.maps, connection.origin = former.maps, former.origin
            self._forget(former)
        if connection.deadline is not None:
            connection.deadline.cancel()
        self._send(
            connection,
            engine.Welcome(
                id=instruction.request,
                version=connection.version,
                node=self._settings.node,
                incarnation=self._settings.incarnation,
                session=instruction.session,
                connection=connection.origin,
                tenant=connection.tenant,
                secret=connection.secret,
                probe=probe(connection.secret, connection.layout.fingerprint()),
                heartbeat_s=self._settings.lease_s / 3,
                max_frame=self._settings.max_frame,
            ),
        )

    def _open_region(self, connection: _Connection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.OpenRegion)
        pool = self._driver.core.store.region_owner(message.region)
        if pool is None or pool.tenant != connection.tenant:
            # The same answer whether it is another tenant's or nobody's.
            reason = f"region {message.region} is not one of this tenant"
            self._send(connection, engine.Failed(message.id, "CredentialRefused", reason))
            return
        region = self._arena.region(message.region)
        descriptor = region.reopen(write=message.write)
        connection.maps = True
        try:
            reply = engine.Region(message.id, message.region, region.nbytes, pool.slot_bytes)
            if connection.frames is not None:
                connection.frames.send(pack_frame(reply), [descriptor])
        finally:
            os.close(descriptor)

    def _open_query(self, connection: _Connection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.OpenQuery)
        assert connection.layout is not None
        try:
            sock = self._connect_query(connection.tenant, connection.layout.encode())
        except TokenLakeError as error:
            self._send(connection, engine.Failed(message.id, type(error).__name__, str(error)))
            return
        with sock:
            if connection.frames is not None:
                connection.frames.send(pack_frame(engine.QueryOpened(message.id)), [sock.fileno()])

    def _explain(self, connection: _Connection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Explain)
        reason = _beyond(connection, message)
        if reason:
            self._send(connection, engine.Failed(message.id, LimitReached.__name__, reason))
            return
        tenant = connection.tenant
        if not connection.joined:
            try:
                tenant = self._tenants.identify(connection.process.uid, message.token).name
            except TokenLakeError as error:
                self._refuse(connection, message.id, error)
                return
        connection.in_flight += 1
        # Events are recorded, and a token is nobody's business there.
        self._driver.handle(
            events.ExplainRequested(connection.number, tenant, msgspec.structs.replace(message, token=None))
        )

    def _bye(self, connection: _Connection, message: engine.EngineRequest) -> None:
        if connection.frames is not None:
            connection.frames.close("it said Bye")
        self._gone(connection)

    # -- instructions

    def _answer(self, instruction: Answer) -> None:
        connection = self._connections.get(instruction.connection)
        if connection is None or connection.frames is None:
            return
        connection.in_flight = max(0, connection.in_flight - 1)
        connection.frames.send(pack_frame(instruction.message))
        if isinstance(instruction.message, engine.Failed) and not connection.joined:
            connection.frames.close(f"refused: {instruction.message.reason}")

    @property
    def count(self) -> int:
        """Processes that may still look at the arena."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening, remove the path, close all connections."""
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._settings.path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            if connection.frames is not None:
                connection.frames.close("the daemon stops")
            self._forget(connection)


def _beyond(connection: _Connection, message: engine.EngineRequest) -> str:
    """The bound that a request that is to be answered is beyond; empty when it is within all."""
    if connection.in_flight >= MAX_IN_FLIGHT:
        return f"limit 'max_in_flight' of {MAX_IN_FLIGHT} unanswered requests is reached"
    return _too_many_keys(message)


def _too_many_keys(message: engine.EngineRequest) -> str:
    """As `_beyond`, of what it names alone."""
    keys = 0
    if isinstance(message, engine.Match | engine.Prepare | engine.Hint | engine.Claim):
        keys = len(message.keys) // KEY_BYTES
    elif isinstance(message, engine.Commit):
        keys = len(message.indices)
    if keys > MAX_KEYS:
        return f"{keys} segments in one request; limit 'max_keys' is {MAX_KEYS}"
    return ""
