"""The port for other daemons: handshakes, and one control connection per pair of nodes.

The node whose name sorts first dials. A connection goes through these states::

    connected -> handshake (`tokenlake_server.peers.handshake`) -> control connection with a peer
                                                          -> handed over, for another purpose
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.core.instructions import Note, SendToPeer
from tokenlake.errors import (
    CredentialRefused,
    ProtocolRefused,
    RingRefused,
    TokenLakeError,
    Unreachable,
)
from tokenlake.location import NOWHERE, parse_location
from tokenlake.metrics import Metric
from tokenlake.wire import pack_frame, peer
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.frame_connection import FrameConnection
from tokenlake_server.loop.started_threads import started_threads
from tokenlake_server.peers.addresses import PeerAddresses, no_connection, set_tcp_options
from tokenlake_server.peers.certificates import Certificates, require_node, shown
from tokenlake_server.peers.connection_keys import Granted, KeptKeys, new_keys
from tokenlake_server.peers.handshake import NONCE_BYTES, Acceptor, Dialler, PeerIdentity, Pending
from tokenlake_server.peers.introductions import Introductions
from tokenlake_server.peers.listeners import Listeners
from tokenlake_server.peers.refusals import Refusals
from tokenlake_server.peers.states import PeerStates
from tokenlake_server.peers.tls import TlsSession, is_tls

log = logging.getLogger(__name__)

REDIAL_S, LONGEST_REDIAL_S = 0.1, 1.0
"""Seconds between the first two attempts to dial a peer, and the most seconds between two later ones. Each pause is
twice as long as the one before, longer or shorter by up to a half at random, so that not all nodes dial a peer at the
moment at which it comes back. A connection that lasted `LONGEST_REDIAL_S` ends the pauses."""
RELOAD_S = 2.0
"""Seconds between two looks at the files of the certificates."""
TLS_THREADS = 2
"""Number of threads that do the steps of TLS handshakes."""
TLS_REQUIRED = (
    "a plain connection, and this node accepts encrypted ones only, because it has a 'certificate'; set 'certificate', "
    "'key' and 'ca' on all nodes"
)
TLS_UNKNOWN = (
    "an encrypted connection (TLS), and this node accepts plain ones only; set 'certificate', 'key' and 'ca' on all "
    "nodes"
)
HANDSHAKE_S = 5.0
"""Seconds after which a connection between daemons is closed whose handshake is not complete."""
MAX_HANDSHAKES = 128
"""Limit of the accepted connections whose handshake is not complete. Beyond it the oldest connection of the source
address that has the most is closed: a peer completes its handshake long before as many others have connected."""
MAX_HANDSHAKES_OF_SOURCE = 64
"""The same limit for connections of one source address, so that no address keeps another one out."""
UNSENT_BYTES, LEAST_UNSENT_BYTES = 16 << 20, peer.MAX_FRAME
"""Limit of the bytes that wait to be sent to all other nodes together, which share it in equal parts; and the least
part of a node."""
UNKNOWN_MESSAGES = Metric(
    "tokenlake_unknown_messages_total", "Messages of other nodes, of types that only a newer version knows; dropped"
)


Adopt = Callable[[socket.socket, peer.PeerHello, RecordKeys | None], None]
"""Function that takes a socket over after its handshake: called with (socket, the dialler's hello, keys of its
records). Without keys the connection is plain."""


class PeerConnections:
    """The connections with other daemons. Used on the control loop only. Owns the listening socket, the handshakes and
    the control connections."""

    def __init__(
        self,
        identity: PeerIdentity,
        listen: Address,
        addresses: PeerAddresses,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        adopt: Mapping[peer.Purpose, Adopt],
        certificates: Certificates | None = None,
        bulk_listen: Sequence[Address] = (),
    ) -> None:
        """`adopt`: for each purpose of a connection but control, the function that takes such connections over.
        `certificates`: None where connections are plain. `bulk_listen`: further addresses to listen at."""
        self._certificates = certificates
        self._tls_threads = started_threads(TLS_THREADS, "tls") if certificates is not None else None
        self._reloading = loop.create_task(self._keep_reloading()) if certificates is not None else None
        self._keys = KeptKeys(identity.cluster)
        self._waiting: dict[bytes, tuple[FrameConnection, Pending]] = {}
        """Connections whose keys have not arrived yet, by the id of the connection."""
        self._identity = identity
        self._addresses = addresses
        self._driver = driver
        self._loop = loop
        self._adopters = adopt
        self._connections: dict[str, tuple[FrameConnection, int]] = {}
        self._handshakes: dict[FrameConnection, Pending] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, float] = {}
        """Seconds before the next attempt to dial a peer."""
        self._resolving: set[asyncio.Task[None]] = set()
        self.on_stranger: Callable[[str], None] = lambda node: None
        """Called with the name of a node that belongs to the cluster by its proof, and is no member that this node
        knows: the membership may have a newer record."""
        self.on_connected: Callable[[str], None] = lambda node: None
        """Called with the name of a node when there is a control connection with it."""
        self.on_lost: Callable[[str], None] = lambda node: None
        """Called with the name of a node when that connection has ended."""
        self.on_memory_agent: Callable[[str, peer.MemoryAgent], None] = lambda node, message: None
        """Called with the name of a node that has told how its memory can be read, and its message."""
        self.on_traced: Callable[[str, peer.Traced], None] = lambda node, message: None
        """Called with the name of a node whose next lookup belongs to a trace, and its message."""
        self._newer: set[str] = set()
        """Nodes that sent messages of a newer version over the present connection."""
        self._closing = False
        self.controls: dict[str, str] = {}
        """By node, the address of its control plane, which it sent when it connected; empty if it has none for
        others."""
        self.states = PeerStates(identity.node, addresses.names, loop)
        self.introductions = Introductions(
            identity.node, addresses.empty(), partial(self._attempt, purpose="join"), loop
        )
        self._refusals = Refusals(identity.node, addresses, self.introductions, self.states)
        self._listeners = Listeners(listen, bulk_listen, self._accept, loop)
        self.address = self._listeners.address
        driver.carry_out(SendToPeer, self._say)
        driver.carry_out(Note, lambda note: log.warning("%s", note.text, extra={"kind": note.kind}))
        for name in addresses.names:
            self._dial_soon(name)

    def set_peers(self, addresses: Mapping[str, Address | None]) -> None:
        """Follow a change of the other nodes, after the rules have: dial those that came, end the connections with
        those that left or were started elsewhere, and use the new addresses from the next attempt on. The bulk and
        query connections share the addresses. None: the address is not known, and the node may dial this one."""
        for name in self._addresses.change(addresses):
            self._pauses.pop(name, None)
            self._drop(name, "its daemon was started at another address")
        self.states.follow(addresses)
        for name in [name for name in self._connections if name not in self._addresses]:
            self._drop(name, "it is not a member any more")
        self.controls = {name: control for name, control in self.controls.items() if name in self._addresses}
        self._pauses = {name: pause_s for name, pause_s in self._pauses.items() if name in self._addresses}
        self._refusals.follow()
        for name in self._addresses.names:
            if name not in self._connections:
                self._dial_soon(name)

    # -- dialling

    def _dial_soon(self, name: str) -> None:
        if self._identity.node < name and not self._closing and name not in self._dialling:
            self._dialling[name] = self._loop.create_task(self._dial(name))

    async def _dial(self, name: str) -> None:
        """Dial the daemon of node `name` until there is a connection. The peer's `PeerWelcome` completes it."""
        try:
            while name in self._addresses and name not in self._connections and not self._closing:
                pause_s = self._pauses.get(name, 0.0)
                self._pauses[name] = min(LONGEST_REDIAL_S, max(REDIAL_S, 2 * pause_s))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                try:
                    await self._attempt(name, self._addresses)
                except OSError as error:
                    self.states.unreachable(name, f"{self._addresses.shown(name)}: {no_connection(error)}")
                except Exception:
                    # The dialling task survives every error and tries again; otherwise the peer would never be
                    # connected again.
                    log.exception("dialling %s failed", name)
        finally:
            self._dialling.pop(name, None)

    async def _attempt(
        self, name: str, addresses: PeerAddresses, *, purpose: Literal["control", "join"] = "control"
    ) -> None:
        """Connect to the daemon of node `name` once and wait until the handshake has succeeded or failed. Raises
        OSError when there is no connection."""
        endpoint = await addresses.resolve(name)
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.wait_for(self._loop.sock_connect(sock, endpoint.address), HANDSHAKE_S)
            if sock.getsockname() == sock.getpeername():
                # Where no peer listens, the kernel may choose its port for this socket, and TCP connects it to itself.
                raise ConnectionRefusedError
            ended: asyncio.Future[None] = self._loop.create_future()
            self._begin_handshake(sock, "", name, ended, purpose)
        except BaseException:
            sock.close()
            raise
        await ended

    # -- accepting

    def _accept(self, sock: socket.socket, source: str) -> None:
        self._make_room(source)
        self._begin_handshake(sock, source, None, None)

    def _make_room(self, source: str) -> None:
        """Close the oldest connection whose handshake is not complete, where there are too many for another one from
        the address `source`."""
        accepted = Counter(handshake.source for handshake in self._handshakes.values() if handshake.source)
        if accepted[source] >= MAX_HANDSHAKES_OF_SOURCE:
            crowded = source
        elif accepted.total() >= MAX_HANDSHAKES:
            crowded = max(accepted, key=accepted.__getitem__)
        else:
            return
        oldest = next(each for each, handshake in self._handshakes.items() if handshake.source == crowded)
        oldest.close("its handshake was not complete when too many others had connected")

    def _begin_handshake(
        self,
        sock: socket.socket,
        source: str,
        dialled: str | None,
        ended: asyncio.Future[None] | None,
        purpose: Literal["control", "join"] = "control",
    ) -> None:
        set_tcp_options(sock)

        def closed(reason: str) -> None:
            gone = self._handshakes.pop(connection, None)
            if gone is not None:
                gone.timer.cancel()
                self._waiting.pop(gone.opening, None)
            if ended is not None and not ended.done():
                ended.set_result(None)

        connection = FrameConnection(
            self._loop,
            sock,
            peer.HANDSHAKE_BYTES,
            lambda body: self._continue_handshake(connection, handshake, body),
            closed,
            lambda error: self._refuse_handshake(connection, handshake, error),
            max_unsent=max(LEAST_UNSENT_BYTES, UNSENT_BYTES // max(1, len(self._addresses))),
        )
        timer = self._loop.call_later(HANDSHAKE_S, lambda: connection.close(f"no handshake within {HANDSHAKE_S:.0f} s"))
        handshake = self._handshakes[connection] = Pending(timer, source, dialled, ended, None, purpose=purpose)
        connection.on_refused = lambda error: self._log_refusal(handshake, str(error))
        if dialled is None:
            connection.on_first = lambda data: self._choose_encryption(connection, handshake, data)
        elif self._certificates is not None:
            self._start_tls(connection, handshake)
        else:
            self._send_hello(connection, handshake, dialled)

    def _send_hello(self, connection: FrameConnection, handshake: Pending, dialled: str) -> None:
        handshake.side = Dialler(self._identity, dialled, secrets.token_bytes(NONCE_BYTES), handshake.purpose)
        connection.send(pack_frame(handshake.side.hello))

    # -- encryption

    def _choose_encryption(self, connection: FrameConnection, handshake: Pending, first: bytes) -> None:
        """Start TLS on an accepted connection whose first bytes ask for it. Other connections of a node with
        certificates may only name their keys (`OpenConnection`)."""
        if not is_tls(first):
            return
        if self._certificates is None:
            self._refuse_handshake(connection, handshake, ProtocolRefused(TLS_UNKNOWN))
        else:
            self._start_tls(connection, handshake)

    def _start_tls(self, connection: FrameConnection, handshake: Pending) -> None:
        assert self._certificates is not None
        assert self._tls_threads is not None
        session = TlsSession(self._certificates.current, server=handshake.dialled is None)

        def secured(error: TokenLakeError | None) -> None:
            if error is not None:
                self._log_refusal(handshake, str(error))
                return
            assert session.peer is not None
            now = datetime.datetime.now(datetime.UTC)
            try:
                handshake.certified = require_node(session.peer, self._identity.cluster, handshake.dialled, now)
            except TokenLakeError as refusal:
                self._refuse_handshake(connection, handshake, refusal)
                return
            if handshake.dialled is not None:
                self._send_hello(connection, handshake, handshake.dialled)

        connection.start_tls(session, self._tls_threads, secured)

    async def _keep_reloading(self) -> None:
        """Use the files of the certificates again when they change."""
        assert self._certificates is not None
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                await self._loop.run_in_executor(self._tls_threads, self._certificates.reload)
            except Exception:
                # The next look may find better files; without another look the certificates would expire.
                log.exception("the files of the certificates could not be looked at")

    def new_keys(self, node: str, purpose: peer.DataPurpose) -> tuple[bytes, RecordKeys] | None:
        """Keys for a connection that this node is about to open to `node`, and the id by which `OpenConnection` names
        it. The other node is sent them. None where connections are plain. May be called from any thread. Raises
        `Unreachable` without a control connection."""
        if self._certificates is None:
            return None
        if node not in self._connections:
            raise Unreachable(f"there is no control connection with node '{node}'")
        message, keys = new_keys(purpose)
        try:
            self._loop.call_soon_threadsafe(self._send, node, message)
        except RuntimeError as error:
            raise Unreachable("the daemon stops") from error
        return message.connection, keys

    def _open(self, connection: FrameConnection, handshake: Pending, granted: Granted) -> None:
        """Hand over a connection whose keys were found."""
        connection.send(pack_frame(peer.PeerWelcome()))
        self._hand_over(connection, granted.hello, granted.keys)

    def _log_refusal(self, handshake: Pending, reason: str) -> None:
        proven = handshake.dialled is not None or handshake.certified is not None
        connected = self._connections
        self._refusals.log(handshake.node, handshake.source, reason, proven=proven, connected=connected)

    def _hand_over(self, connection: FrameConnection, hello: peer.PeerHello, keys: RecordKeys | None) -> None:
        """Hand an accepted connection over to the owner of connections of that purpose."""
        handshake = self._handshakes.pop(connection, None)
        if handshake is None:
            # The reply could not be sent, and the failure closed the connection.
            return
        handshake.timer.cancel()
        sock, rest = connection.detach()
        if rest:
            # The dialler must wait for the welcome before it sends a request.
            sock.close()
        else:
            self._adopters[hello.purpose](sock, hello, keys)

    def _continue_handshake(self, connection: FrameConnection, handshake: Pending, body: bytes) -> None:
        """Handle one frame of a handshake with another daemon."""
        try:
            match decode(peer.handshake_decoder, body), handshake.side:
                case peer.PeerRefused() as refused, _:
                    reason = f"it refused this node: {refused.reason}"
                    if self._certificates is not None and refused.kind == CredentialRefused.__name__:
                        reason += f"; the clock of this node says {shown(datetime.datetime.now(datetime.UTC))}"
                    self._log_refusal(handshake, reason)
                    connection.close("refused by the other side")
                case peer.OpenConnection() as opening, None if self._names_its_key(handshake):
                    granted = self._keys.take(opening.connection, self._loop.time())
                    if granted is not None:
                        self._open(connection, handshake, granted)
                    else:
                        handshake.opening = opening.connection
                        self._waiting[opening.connection] = connection, handshake
                case peer.PeerHello(), None if self._certificates is not None and handshake.certified is None:
                    raise ProtocolRefused(TLS_REQUIRED)
                case peer.PeerHello() as hello, None:
                    self._check_certified(handshake, hello)
                    handshake.side = Acceptor(self._identity, hello, secrets.token_bytes(NONCE_BYTES), body)
                    connection.send(pack_frame(handshake.side.challenge))
                case peer.PeerChallenge() as challenge, Dialler(incarnation=None) as dialler:
                    connection.send(pack_frame(dialler.answer(challenge, body)))
                case peer.PeerProof() as proof, Acceptor() as acceptor:
                    acceptor.check(proof)
                    self._accepted(connection, acceptor.hello)
                case peer.PeerWelcome(), Dialler(incarnation=int(incarnation)) if handshake.purpose == "join":
                    assert handshake.dialled is not None
                    self.introductions.proven(handshake.dialled, incarnation)
                    connection.close("the handshake is complete")
                case peer.PeerWelcome(), Dialler(incarnation=int(incarnation)) as dialler:
                    assert handshake.dialled is not None
                    self._established(connection, handshake.dialled, incarnation, dialler)
                    if handshake.ended is not None and not handshake.ended.done():
                        handshake.ended.set_result(None)
                case message, _:
                    raise ProtocolRefused(f"unexpected {type(message).__name__} during the handshake")
        except TokenLakeError as error:
            self._refuse_handshake(connection, handshake, error)

    def _names_its_key(self, handshake: Pending) -> bool:
        """True while a connection may name its keys: once, and before anything else."""
        return self._certificates is not None and handshake.certified is None and not handshake.opening

    def _refuse_handshake(self, connection: FrameConnection, handshake: Pending, error: TokenLakeError) -> None:
        self._log_refusal(handshake, str(error))
        connection.send(pack_frame(peer.PeerRefused(type(error).__name__, str(error))))
        connection.close(str(error))

    def _accepted(self, connection: FrameConnection, hello: peer.PeerHello) -> None:
        """Complete the handshake of a connection whose dialling side has proven that it belongs to the cluster."""
        if hello.purpose == "join":
            connection.send(pack_frame(peer.PeerWelcome()))
            connection.close("the handshake is complete")
            return
        if hello.node not in self._addresses:
            self.on_stranger(hello.node)
            raise RingRefused(
                f"node '{hello.node}' is not a member yet: the members that '{self._identity.node}' knows are "
                f"{', '.join(sorted((self._identity.node, *self._addresses.names)))}"
            )
        current = self._connections.get(hello.node)
        if current is not None and current[1] > hello.incarnation:
            raise RingRefused(
                f"two daemons are called '{hello.node}', and the one that started later is connected; give every node "
                "a name of its own"
            )
        connection.send(pack_frame(peer.PeerWelcome()))
        if hello.purpose != "control":
            self._hand_over(connection, hello, None)
        elif connection in self._handshakes:
            self._resolve_soon(hello.node)
            self._established(connection, hello.node, hello.incarnation, hello)

    def _check_certified(self, handshake: Pending, hello: peer.PeerHello) -> None:
        """Check the hello of a dialler against its certificate, which is absent on a plain connection."""
        if handshake.certified is None:
            return
        if hello.node != handshake.certified:
            raise CredentialRefused(f"it calls itself '{hello.node}', and its certificate is for another node")
        if hello.purpose not in ("control", "join"):
            raise ProtocolRefused(f"a {hello.purpose} connection with TLS; expected `OpenConnection`")

    def _resolve_soon(self, node: str) -> None:
        """Resolve the address of a node that dialled this one, for the bulk and query connections to it."""

        async def resolve() -> None:
            with suppress(OSError):
                await self._addresses.resolve(node)

        task = self._loop.create_task(resolve())
        self._resolving.add(task)
        task.add_done_callback(self._resolving.discard)

    # -- established

    def _established(
        self, connection: FrameConnection, node: str, incarnation: int, told: Dialler | peer.PeerHello
    ) -> None:
        """Use a control connection whose handshake is complete. `told`: the facts that the other daemon sent of
        itself."""
        if node not in self._addresses:
            connection.close("it is not a member any more")
            return
        self._handshakes.pop(connection).timer.cancel()
        try:
            self._addresses.tell(node, told.bulk)
        except ValueError as error:
            log.warning("peer %s: %s", node, error)
        try:
            location = parse_location(told.location)
        except ValueError as error:
            log.warning("peer %s has the location %r; expected %s", node, told.location, error)
            location = NOWHERE
        self._drop(node, "replaced by a newer connection")
        self.controls[node] = told.control
        self._refusals.forget(node)
        self.states.connected(node)
        self._connections[node] = (connection, incarnation)
        connection.on_broken = None
        connection.max_frame = peer.MAX_FRAME
        connection.on_frame = lambda body: self._frame(connection, node, body)
        since = self._loop.time()
        connection.on_closed = lambda reason: self._lost(connection, node, incarnation, since, reason)
        log.info("peer %s (incarnation %d) is connected", node, incarnation)
        self._driver.handle(events.PeerUp(node, incarnation, location))
        self.on_connected(node)

    def _frame(self, connection: FrameConnection, node: str, body: bytes) -> None:
        try:
            message = decode(peer.control_decoder, body)
            if isinstance(message, peer.ConnectionKey):
                self._take_key(node, message)
                return
            if isinstance(message, peer.MemoryAgent):
                self.on_memory_agent(node, message)
                return
            if isinstance(message, peer.Traced):
                self.on_traced(node, message)
                return
        except ProtocolRefused as error:
            tag = peer.unknown_tag(body)
            if tag is None:
                connection.close(str(error))
            else:
                self._leave_out(node, tag)
            return
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, peer.Lookup):
            log.debug("request %r: a Lookup of %s", message.request, node)
        self._driver.handle(events.PeerSent(node, message))

    def _leave_out(self, node: str, tag: int) -> None:
        """Count a message of a type that this version does not know. The other node runs a newer one: without the
        connection no request between the two would be served during an upgrade."""
        self._driver.core.counters.add(UNKNOWN_MESSAGES)
        if node not in self._newer:
            self._newer.add(node)
            log.warning(
                "peer %s sends messages of type %d, which only a newer version knows; they are dropped", node, tag
            )

    def _take_key(self, node: str, message: peer.ConnectionKey) -> None:
        if self._certificates is None:
            raise ProtocolRefused("keys on a connection that is not encrypted")
        now = self._loop.time()
        self._keys.add(node, self._connections[node][1], message, now)
        waiting = self._waiting.pop(message.connection, None)
        granted = self._keys.take(message.connection, now) if waiting is not None else None
        if waiting is not None and granted is not None:
            self._open(*waiting, granted)

    def _lost(self, connection: FrameConnection, node: str, incarnation: int, since: float, reason: str) -> None:
        current = self._connections.get(node)
        if current is None or current[0] is not connection:
            return
        del self._connections[node]
        self._newer.discard(node)
        self._keys.forget(node)
        self.on_lost(node)
        if self._closing:
            return
        log.warning("connection with %s ended: %s", node, reason)
        if self._loop.time() - since >= LONGEST_REDIAL_S:
            self._pauses.pop(node, None)
        if node not in self._addresses:
            # The rules have dropped this member already.
            return
        self.states.unreachable(node, f"the connection ended: {reason}")
        self._driver.handle(events.PeerDown(node, incarnation))
        self._dial_soon(node)

    def _drop(self, node: str, reason: str) -> None:
        current = self._connections.get(node)
        if current is not None:
            current[0].close(reason)

    def refuse(self, node: str, error: Exception) -> None:
        """Close the connection of a peer, one of whose messages the rules refused. The peer may connect again."""
        self._drop(node, str(error))

    def _say(self, instruction: SendToPeer) -> None:
        self._send(instruction.node, instruction.message)

    def tell(self, node: str, message: peer.MemoryAgent | peer.Traced) -> None:
        """Tell a node how the memory of this one can be read, or to which trace the next lookup belongs; nothing is
        sent without a control connection."""
        self._send(node, message)

    def _send(self, node: str, message: peer.PeerMessage | peer.ConnectionKey | peer.MemoryAgent | peer.Traced) -> None:
        current = self._connections.get(node)
        if current is not None:
            current[0].send(pack_frame(message))

    @property
    def connected(self) -> list[str]:
        """The names of the nodes with which this daemon has a control connection."""
        return list(self._connections)

    async def close(self) -> None:
        """Stop listening and dialling, close all connections with other daemons."""
        self._closing = True
        self.states.close()
        await self.introductions.close()
        self._listeners.close()
        tasks: list[asyncio.Task[None]] = [*self._dialling.values(), *self._resolving]
        if self._reloading is not None:
            tasks.append(self._reloading)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in [*self._handshakes, *(connection for connection, _ in self._connections.values())]:
            connection.close("the daemon stops")
        self._addresses.close()
        if self._tls_threads is not None:
            self._tls_threads.shutdown(wait=False, cancel_futures=True)
