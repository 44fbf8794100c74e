"""The local socket: engines' processes connect, are identified, and exchange requests and answers with the rules."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenlake.content import content_limit
from tokenlake.core import events
from tokenlake.core.instructions import Answer, Welcomed
from tokenlake.errors import CredentialRefused, LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.identity import Incarnation, NodeId
from tokenlake.keys import probe
from tokenlake.layout import MAX_SHARDS
from tokenlake.opaque_layout import AnyLayout, understood
from tokenlake.wire import engine
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import split_keys
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.connected_process import LOCK_S
from tokenlake_server.engines.connection import EngineConnection, keys_over_limit
from tokenlake_server.engines.contents import Contents
from tokenlake_server.engines.kept_bytes import KeptBytes
from tokenlake_server.engines.layouts import EngineLayouts
from tokenlake_server.engines.local_socket import listen
from tokenlake_server.engines.refused import EngineRefused, Reason, RefusedEngine, RefusedEngines, refused_for
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.engines.without_memory import WithoutMemory
from tokenlake_server.kept.memory import Kept
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.frame_connection import SLICE_S
from tokenlake_server.loop.loop_share import LoopShare
from tokenlake_server.start.standing_orders import StandingOrders

log = logging.getLogger(__name__)

PROCESSES_PER_SESSION = 16
"""Connections per session: at most `max_sessions` times this number may join. An engine has one for its scheduler and
one for each rank; the others are for those that a restarted engine has not closed yet."""
LEAST_PROCESSES = 2 * (MAX_SHARDS + 1)
"""Connections that may join in any case: those of the engine with the most ranks, and of its restart."""
MAX_UNPROVEN = 64
"""Limit of the connections of one user that have not sent their `Hello`; further ones close the oldest of them."""
ACCEPT_PAUSE_S = 0.5
"""Seconds until the next accept after one that failed, mostly because no descriptor was left. The listening socket
stays readable then: without the pause the loop would spin."""
KEPT_VERSION = 2
"""The protocol version from which on a process may continue at the next daemon what it began at the one before."""
RETIRED = "an operator said that the weights with this digest have changed in place: restart the engine"

ConnectQuery = Callable[[str, bytes], socket.socket]


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings and the identity of the node that the listener on the local socket needs."""

    node: NodeId
    incarnation: Incarnation
    path: Path
    max_sessions: int
    memory: int
    lease_s: float


class EngineListener:
    """Listens on the local socket for engines' processes. Owns the socket's path and all connections to it."""

    def __init__(
        self,
        settings: EngineSettings,
        tenants: Tenants,
        arena: Arena,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        connect_query: ConnectQuery,
        contents: Contents,
        orders: StandingOrders,
        kept: Kept | None = None,
    ) -> None:
        """`connect_query(tenant, layout)` returns a connection to the query engine, which the caller closes; raises
        `TokenLakeError`. `contents` takes the contents of the segments that engines write; `orders` has the weights
        that were retired. `kept`: what keeps the memory for the next daemon."""
        self._connect_query = connect_query
        self._settings = settings
        self._tenants = tenants
        self._arena = arena
        self._driver = driver
        self._loop = loop
        self._connections: dict[int, EngineConnection] = {}
        self._unproven: dict[int, dict[int, EngineConnection]] = {}
        """The connections whose `Hello` has not been accepted, by user and number; those of a user are in the order in
        which they were accepted."""
        self._processes: Counter[str] = Counter()
        """Number of connections of each tenant whose `Hello` was accepted."""
        self._sessions: Counter[int] = Counter()
        """Number of processes of each engine (session), without those of the query engine."""
        self._kept = KeptBytes(tenants.count)
        self._last = 0
        self._closing = False
        self._shares: dict[str, LoopShare] = {}
        self.on_other_answer: Callable[[Answer], None] = lambda answer: None
        """Function that takes the answers for the control plane, whose connections have negative numbers."""
        self.on_traced: Callable[[int, engine.Traced], None] = lambda connection, message: None
        """Called with the number of a connection whose next match belongs to a trace, and its message."""
        self._contents = contents
        self._refused = RefusedEngines(loop, driver.core.counters)
        self._without_memory = WithoutMemory(loop, driver.core.store, self._refused)
        self.layouts = EngineLayouts()
        """The layouts of the engines that have connected, those of the query engine among them."""
        self._orders = orders
        self._keeper = kept
        self._lives: dict[int, tuple[int, int]] = {}
        """By session of the daemon before that goes on here: the incarnation and the number under which its processes
        know it."""
        self._requests: dict[type, Callable[[EngineConnection, engine.EngineRequest], None]] = {
            engine.Hello: self._hello,
            engine.OpenRegion: self._open_region,
            engine.OpenQuery: self._open_query,
            engine.Explain: self._explain,
            engine.Unpublished: self._unpublished,
            engine.Traced: self._traced,
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
        share = self._share("")
        connection = EngineConnection(self._last, sock, self._loop, share, self._received, self._socket_closed)
        self._connections[connection.number] = connection
        unproven = self._unproven.setdefault(self._tenants.user(connection.process.uid), {})
        unproven[connection.number] = connection
        if len(unproven) > MAX_UNPROVEN:
            oldest = next(iter(unproven.values()))
            oldest.refuse(0, LimitReached(f"{MAX_UNPROVEN} newer connections of this user have not sent a Hello"))

    def _share(self, tenant: str) -> LoopShare:
        """The time of the loop that the connections of a tenant share; "": those that have not sent a `Hello`."""
        return self._shares.setdefault(tenant, LoopShare(self._loop, SLICE_S))

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _socket_closed(self, connection: EngineConnection, reason: str) -> None:
        number, pid = connection.number, connection.process.pid
        log.info("connection %d of process %d: %s", number, pid, reason, extra={"kind": "connection"})
        # A living process that maps the arena may still access its slots, so its leases and writes end when the process
        # ends (its pidfd), not with the socket.
        if not connection.maps:
            self._gone(connection)

    def _gone(self, connection: EngineConnection) -> None:
        """Release the connection, and tell the rules to end its leases and writes. To be called when the process is
        dead, has said Bye, or maps no part of the arena."""
        joined = connection.joined
        if self._forget(connection) and joined:
            self._driver.handle(events.ProcessGone(connection.number))

    def _forget(self, connection: EngineConnection) -> bool:
        """Release the resources of the connection; returns False when they were released before."""
        if self._connections.pop(connection.number, None) is None:
            return False
        if not self._no_longer_unproven(connection):
            self._count(connection, -1)
        if connection.joined and not connection.query_engine:
            self._sessions[connection.session] -= 1
            self._sessions += Counter()  # without zeros
        connection.joined = False
        if connection.session not in self._sessions:
            self._lives.pop(connection.session, None)
        if connection.process.pidfd is not None:
            self._loop.remove_reader(connection.process.pidfd)
        if self._keeper is not None and connection.process.lock is not None and not self._closing:
            self._keeper.lock_closing(connection.origin, connection.tenant)
        connection.process.close()
        connection.close("the process is gone")
        connection.close_account()
        return True

    def _no_longer_unproven(self, connection: EngineConnection) -> bool:
        """Returns True if the `Hello` of the connection had not been accepted before."""
        user = self._tenants.user(connection.process.uid)
        unproven = self._unproven.get(user, {})
        was_unproven = unproven.pop(connection.number, None) is not None
        if not unproven:
            self._unproven.pop(user, None)
        return was_unproven

    def refuse(self, number: int, error: Exception) -> None:
        """Reply with the error on connection `number` of an engine's process, and close it."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.refuse(0, error)

    def region_closed(self, region: int) -> None:
        """Tell the processes that may map a region that it is given to another tenant."""
        for connection in self._connections.values():
            if region in connection.opened:
                connection.opened.discard(region)
                connection.send(engine.RegionClosed(0, region))

    @property
    def engines(self) -> int:
        """The number of engines (sessions) of which a process is connected, or may still access the arena."""
        return len(self._sessions)

    @property
    def processes(self) -> int:
        """The number of these processes: connections that have joined a session."""
        return self._sessions.total()

    def without_pool(self) -> list[RefusedEngine]:
        """The processes of engines that run and go without the pool: those that were refused, and those that are
        connected and whose segments have no memory."""
        return [*self._refused.all(), *self._without_memory.all(self._connections.values())]

    def close(self) -> None:
        """Stop listening on the local socket, remove its path, close all connections. The files that processes have
        locked stay with what keeps the memory."""
        self._closing = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._settings.path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            connection.close("the daemon stops")
            self._forget(connection)
        self._refused.close()

    # -- requests

    def _received(self, connection: EngineConnection, body: bytes) -> None:
        """Handle a request."""
        try:
            message = decode(engine.request_decoder, body)
            if not connection.joined and not isinstance(message, engine.Hello | engine.Explain | engine.Bye):
                raise ProtocolRefused(f"the first frame must be Hello, not {type(message).__name__}")
            if connection.joined and not connection.check_lock():
                raise ProtocolRefused("the process does not hold the lock that shows the daemon whether it is alive")
        except ProtocolRefused as error:
            if connection.joined:
                connection.refuse(0, error)
            else:
                self._refuse(connection, 0, EngineRefused(Reason.VERSION, error))
            return
        own = self._requests.get(type(message))
        if own is None:
            self._pass_on(connection, message)
            return
        try:
            own(connection, message)
        except OSError as error:
            # The daemon has no descriptor left. It replies, because the engine would take a silent daemon for frozen.
            reason = f"the daemon cannot serve a {type(message).__name__} now: {error.strerror}"
            connection.fail(getattr(message, "id", 0), LimitReached, reason)
            if isinstance(message, engine.Hello):
                self._refused.refused(connection.process, connection.tenant, Reason.LIMIT, reason)

    def _refuse(self, connection: EngineConnection, request: int, refused: EngineRefused) -> None:
        """Refuse a process that has not joined a session, and close its connection."""
        # First, because the pidfd of the process is closed with the connection.
        self._refused.refused(connection.process, connection.tenant, refused.reason, str(refused))
        connection.refuse(request, refused.error)

    def _pass_on(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        """Hand a request to the rules, unless it exceeds a limit."""
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, engine.Match | engine.Prepare | engine.Fetch):
            kind = type(message).__name__
            log.debug("request %r: a %s of connection %d", message.request, kind, connection.number)
        number = getattr(message, "id", None)
        if number is None:
            # A request without an id has no reply that could carry an error, so the connection is closed if the request
            # exceeds the limit of keys. The project's own clients never do that.
            if reason := keys_over_limit(message):
                connection.refuse(0, LimitReached(reason))
                return
        elif reason := connection.admit(message):
            connection.fail(number, LimitReached, reason)
            return
        if isinstance(message, engine.Prepare) and message.contents:
            # The rules do not know the contents, so that the event log has no tokens.
            layout = connection.layout
            assert layout is not None
            limit = content_limit(layout.segment_bytes, layout.segment_tokens)
            self._contents.offer(connection.tenant, split_keys(message.keys), message.contents, limit)
            message = msgspec.structs.replace(message, contents=())
        self._driver.handle(events.Requested(connection.number, message))
        if isinstance(message, engine.Regrant) and message.last:
            connection.regranted = True

    def _hello(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Hello)
        if connection.hello is not None:
            connection.refuse(message.id, ProtocolRefused("Hello was sent twice on one connection; expected one"))
            return
        try:
            connection.identify(message, self._tenants, self._settings.memory)
            survivor = self._survivor(connection)
            if not survivor and message.incarnation not in (0, self._settings.incarnation):
                # The process names a session of an earlier daemon. In this daemon the number may belong to another
                # engine, so it is used only if the session goes on here.
                lives = message.incarnation, message.session
                session = next((number for number, known in self._lives.items() if known == lives), 0)
                message = connection.in_session(session)
            layout = connection.layout
            assert layout is not None
            with refused_for(Reason.LAYOUT):
                self._check_session(message.session, connection.tenant, layout)
            with refused_for(Reason.WEIGHTS):
                self._check_weights(connection.tenant, layout)
            with refused_for(Reason.LIMIT):
                self._check_processes(connection.tenant)
                connection.open_account(self._kept)
            connection.share = self._share(connection.tenant)
        except EngineRefused as refused:
            self._refuse(connection, message.id, refused)
            return
        self.layouts.remember(connection.tenant, layout)
        self._no_longer_unproven(connection)
        self._count(connection, 1)
        resumed = None if survivor else self._resumed(connection)
        if resumed is None and not survivor and (connection.process.pidfd is None or self._keeper is not None):
            connection.process.make_lock()
            if self._keeper is not None:
                assert connection.process.lock is not None
                self._keeper.lock_made(connection.origin, connection.tenant, connection.process.lock)
        self._driver.handle(
            events.Joined(
                connection.number,
                message.id,
                connection.tenant,
                layout.segment_bytes,
                layout.shards,
                # A query engine's match counts 0 tokens per segment: the tokens that it reads are counted as hits of
                # the engine that sent the query, at that engine's node.
                0 if self._tenants.is_query_engine(message.token) else layout.segment_tokens,
                *self._continued(connection, resumed, survivor),
            )
        )

    def _continued(
        self, connection: EngineConnection, resumed: EngineConnection | None, survivor: int
    ) -> tuple[int, int, int]:
        """`Joined.session`, `resume` and `survivor` of a process."""
        assert connection.hello is not None
        if resumed is not None and resumed.survivor and not resumed.regranted:
            return self._lives[resumed.session][1], 0, resumed.survivor
        return connection.hello.session, resumed.number if resumed else 0, survivor

    def _survivor(self, connection: EngineConnection) -> int:
        """The number at the daemon before of a process that continues what it began there; 0 for another one."""
        hello = connection.hello
        if self._keeper is None or hello is None or not hello.resume or connection.version < KEPT_VERSION:
            return 0
        return hello.resume if self._keeper.survives(hello.resume, connection.tenant) else 0

    def _count(self, connection: EngineConnection, more: int) -> None:
        """Count `more` processes like that of the connection, whose `Hello` was accepted."""
        assert connection.layout is not None
        self._processes[connection.tenant] += more
        if not connection.query_engine:
            self.layouts.count(connection.tenant, connection.layout, more)

    def retire(self, tenant: str, weights_digest: str) -> int:
        """The weights that this digest names have changed in place: end the connections of the tenant's engines with
        the digest, and refuse them from now on; after a restart too, once the orders are saved. Returns the number of
        engines."""
        self._orders.retire(tenant, weights_digest)
        ended = [
            each
            for each in self._connections.values()
            if each.tenant == tenant and each.layout is not None and each.layout.weights_digest == weights_digest
        ]
        for connection in ended:
            connection.refuse(0, LayoutRefused(RETIRED))
        return len({each.session for each in ended})

    def connected(self) -> dict[tuple[str, AnyLayout], Counter[int]]:
        """By tenant and layout, the number of processes of each engine (session). A query engine does not count."""
        found: dict[tuple[str, AnyLayout], Counter[int]] = {}
        for each in self._connections.values():
            if each.joined and each.layout is not None and not each.query_engine:
                found.setdefault((each.tenant, each.layout), Counter())[each.session] += 1
        return found

    def _check_weights(self, tenant: str, layout: AnyLayout) -> None:
        if self._orders.is_retired(tenant, layout.weights_digest):
            raise LayoutRefused(RETIRED)

    def _check_processes(self, tenant: str) -> None:
        """Raise `LimitReached` when no further process of the tenant may join."""
        limit = max(LEAST_PROCESSES, self._settings.max_sessions * PROCESSES_PER_SESSION)
        if self._processes.total() >= limit:
            raise LimitReached(f"{limit} processes are connected; no more are accepted")
        share = max(1, limit // self._tenants.count)
        if self._processes[tenant] >= share:
            raise LimitReached(
                f"{share} processes of tenant '{tenant}' are connected, its part of {limit}; no more are accepted"
            )

    def _resumed(self, connection: EngineConnection) -> EngineConnection | None:
        """The earlier connection of the same process that the `Hello` of `connection` resumes; None where there is
        none."""
        hello = connection.hello
        if hello is None or not hello.resume:
            return None
        resumed = (hello.resume, hello.session, connection.process.pid)
        others = (c for c in self._connections.values() if c.joined and c is not connection)
        return next((c for c in others if (c.origin, c.session, c.process.pid) == resumed), None)

    def _check_session(self, session: int, tenant: str, layout: AnyLayout) -> None:
        """Raise `LayoutRefused` for a process that joins a session of its tenant with another layout."""
        if not session:
            return
        layouts = (c.layout for c in self._connections.values() if c.session == session and c.tenant == tenant)
        other = next((each for each in layouts if each is not None), layout)
        for field in layout.__struct_fields__:
            # A layout of the other kind, opaque or not, lacks some of the fields.
            mine, theirs = getattr(layout, field), getattr(other, field, None)
            if mine != theirs:
                raise LayoutRefused(f"layout field '{field}' is {mine!r}; in session {session} it is {theirs!r}")

    def _open_region(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.OpenRegion)
        pool = self._driver.core.store.region_owner(message.region)
        if pool is None or pool.tenant != connection.tenant:
            # The reply does not tell whether the region belongs to another tenant or to none.
            connection.fail(message.id, CredentialRefused, f"region {message.region} is not one of this tenant")
            return
        region = self._arena.region(message.region)
        descriptor = region.reopen(write=message.write)
        connection.maps = True
        connection.opened.add(message.region)
        try:
            opened = engine.Region(message.id, message.region, region.nbytes, pool.slot_bytes, region.where)
            connection.send(opened, [descriptor])
        finally:
            os.close(descriptor)

    def _watch_lock(self, connection: EngineConnection) -> None:
        """Look at the lock of a process without a pidfd every `LOCK_S`, until the process has released it."""

        def look() -> None:
            if connection.number not in self._connections:
                return
            if connection.locked and not connection.process.holds_lock:
                log.info("connection %d: the process has ended, or has left and maps no region", connection.number)
                self._gone(connection)
                return
            self._loop.call_later(LOCK_S, look)

        look()

    def _open_query(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.OpenQuery)
        assert connection.layout is not None
        try:
            sock = self._connect_query(connection.tenant, understood(connection.layout).encode())
        except TokenLakeError as error:
            connection.fail(message.id, type(error), str(error))
            return
        with sock:
            connection.send(engine.QueryOpened(message.id), [sock.fileno()])

    def _explain(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Explain)
        tenant = connection.tenant
        if not connection.joined:
            try:
                tenant = self._tenants.identify(connection.process.uid, message.token).name
            except TokenLakeError as error:
                connection.refuse(message.id, error)
                return
        if reason := connection.admit(message):
            connection.fail(message.id, LimitReached, reason)
            return
        # The token is removed from the `Hello`, because the event may be written to the event log, which holds no
        # credentials.
        self._driver.handle(
            events.ExplainRequested(connection.number, tenant, msgspec.structs.replace(message, token=None))
        )

    def _unpublished(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Unpublished)
        self._contents.unpublished(connection.tenant, message.model)

    def _traced(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Traced)
        self.on_traced(connection.number, message)

    def _bye(self, connection: EngineConnection, message: engine.EngineRequest) -> None:
        assert isinstance(message, engine.Bye)
        if message.reason and self._tenants.user(connection.process.uid) != -1:
            self._refused.refused(connection.process, connection.tenant, Reason.DECLINED, message.reason)
        connection.close("the client sent Bye")
        self._gone(connection)

    # -- instructions

    def _welcomed(self, instruction: Welcomed) -> None:
        connection = self._connections.get(instruction.connection)
        if connection is None or connection.layout is None:
            return
        survivor, hello = self._survivor(connection), connection.hello
        resumed = None if survivor else self._resumed(connection)
        if survivor:
            assert hello is not None
            assert self._keeper is not None
            connection.continue_from(survivor, self._keeper.returned(survivor))
            self._lives[instruction.session] = hello.incarnation, hello.session
        if resumed is not None:
            connection.process.take_over(resumed.process)
        if connection.process.pidfd is not None:
            self._loop.add_reader(connection.process.pidfd, self._gone, connection)
        version = connection.welcome(instruction.session, resumed)
        self._refused.accepted(connection.process)
        if not connection.query_engine:
            self._sessions[instruction.session] += 1
        lock = connection.process.lock if resumed is None and not survivor else None
        if connection.process.pidfd is None:
            self._watch_lock(connection)
        if resumed is not None:
            # The rules handed the leases and writes of the resumed connection to the new one, so nothing of it is left.
            self._forget(resumed)
        own = self._settings.incarnation, instruction.session
        incarnation, session = self._lives.get(instruction.session, own)
        connection.send(
            engine.Welcome(
                id=instruction.request,
                version=version,
                node=self._settings.node,
                incarnation=incarnation,
                session=session,
                connection=connection.origin,
                tenant=connection.tenant,
                secret=connection.secret,
                probe=probe(connection.secret, connection.layout.fingerprint()),
                heartbeat_s=self._settings.lease_s / 3,
                max_frame=engine.MAX_FRAME,
                lock=lock is not None,
                published=self._contents.models(connection.tenant),
                kept=bool(connection.survivor) and not connection.regranted,
                keep_s=0.0 if self._keeper is None else self._keeper.engines_wait_s,
            ),
            [] if lock is None else [lock],
        )
        if survivor and self._keeper is not None:
            for region in self._keeper.dropped:
                connection.send(engine.RegionClosed(0, region))

    def _answer(self, instruction: Answer) -> None:
        connection = self._connections.get(instruction.connection)
        if connection is not None:
            self._look_at(connection, instruction.message)
            connection.answer(instruction.message)
        elif instruction.connection < 0:
            self.on_other_answer(instruction)

    def _look_at(self, connection: EngineConnection, message: engine.EngineReply) -> None:
        """Note the refusals among the rules' answers: a process may not join, or its segments get no memory."""
        if isinstance(message, engine.Failed) and not connection.joined and connection.hello is not None:
            reason = Reason.SESSION if connection.hello.session else Reason.LIMIT
            self._refused.refused(connection.process, connection.tenant, reason, message.reason)
        elif isinstance(message, engine.Prepared):
            self._without_memory.answered(connection, message.codes)
