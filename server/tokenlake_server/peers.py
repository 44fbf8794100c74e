"""Control connections between daemons: one per pair, dialled by the node whose name sorts first."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

import msgspec

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.core.instructions import Note, Say
from tokenlake.errors import ConfigurationError, ProtocolRefused, RingRefused, TokenLakeError
from tokenlake.ring import Ring
from tokenlake.wire import agree, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION
from tokenlake_server.driver import Driver
from tokenlake_server.frames import FrameConnection

__all__ = ["PeerIdentity", "PeerListener", "check_hello", "hello"]

log = logging.getLogger(__name__)

REDIAL_S = 0.1
"""Between two attempts; a dead port on one machine answers at once, so the cost is small and a restarted peer
is found soon."""
HELLO_S = 5.0
MAX_STRANGERS = 64
"""Connections that have not said who they are."""


class PeerIdentity(msgspec.Struct, frozen=True):
    """Who this node says it is."""

    node: str
    incarnation: int
    epoch: int
    members: tuple[str, ...]
    """As shown to people (`ring_members`)."""
    names: tuple[str, ...]
    max_frame: int


def hello(identity: PeerIdentity, *, bulk: bool) -> peer.PeerHello:
    """The first frame of a connection to a peer."""
    return peer.PeerHello(
        OLDEST_VERSION,
        PROTOCOL_VERSION,
        identity.node,
        identity.incarnation,
        identity.epoch,
        identity.members,
        bulk,
    )


def check_hello(identity: PeerIdentity, message: peer.PeerHello) -> int:
    """The version to speak. Raises `RingRefused` or `ProtocolRefused`, naming what differs."""
    version = agree(message.oldest_version, message.newest_version)
    if message.node == identity.node:
        raise RingRefused(f"two daemons are called '{identity.node}'; every node needs a name of its own")
    if message.epoch == identity.epoch and message.node not in identity.names:
        raise RingRefused(f"node '{message.node}' is not one of the members {', '.join(identity.members)}")
    if message.epoch != identity.epoch:
        mine, theirs = ", ".join(identity.members), ", ".join(message.members)
        raise RingRefused(
            f"node '{message.node}' has another ring: its members are {theirs}; those of '{identity.node}' are {mine}. "
            "Give all daemons the same 'peers' (with the same sizes) and 'run_length'"
        )
    return version


def ring_members(ring: Ring, weights: Mapping[str, int]) -> tuple[str, ...]:
    """Members as shown in refusals: name, and weight where it is a size."""
    return tuple(f"{name}/{weights[name]}" if weights[name] > 1 else name for name in ring.members)


class PeerListener:
    """Owns the listening socket and the control connections. Bulk connections are handed to `on_bulk`."""

    def __init__(
        self,
        identity: PeerIdentity,
        listen: Address,
        peers: Mapping[str, Address],
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        on_bulk: Callable[[socket.socket, peer.PeerHello, bytes], None],
    ) -> None:
        """`on_bulk(socket, hello, bytes already read)` takes the socket over."""
        self._identity = identity
        self._addresses = dict(peers)
        self._driver = driver
        self._loop = loop
        self._on_bulk = on_bulk
        self._connections: dict[str, tuple[FrameConnection, int]] = {}
        self._strangers: dict[FrameConnection, asyncio.TimerHandle] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._closing = False
        self._sock = _listen(listen)
        self.address = Address(*self._sock.getsockname()[:2])
        loop.add_reader(self._sock, self._accept)
        driver.carry_out(Say, self._say)
        driver.carry_out(Note, lambda note: log.warning("%s", note.text))
        for name in self._addresses:
            self._dial_soon(name)

    # -- dialling

    def _dial_soon(self, name: str) -> None:
        if self._identity.node < name and not self._closing and name not in self._dialling:
            self._dialling[name] = self._loop.create_task(self._dial(name))

    async def _dial(self, name: str) -> None:
        """Until it answers. The peer's `PeerWelcome` completes the connection."""
        address = self._addresses[name]
        while name not in self._connections and not self._closing:
            sock = socket.socket(_family(address), socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await asyncio.wait_for(self._loop.sock_connect(sock, tuple(address)), HELLO_S)
            except OSError:
                sock.close()
                await asyncio.sleep(REDIAL_S)
                continue
            except asyncio.CancelledError:
                sock.close()
                raise
            answered: asyncio.Future[None] = self._loop.create_future()
            self._adopt(sock, name, answered)
            await answered
            if name not in self._connections:
                await asyncio.sleep(REDIAL_S)
        self._dialling.pop(name, None)

    # -- accepting

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            self._loop.remove_reader(self._sock)
            self._loop.call_later(REDIAL_S, self._accept_again)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            sock.close()
            return
        self._adopt(sock, None, None)

    def _accept_again(self) -> None:
        if not self._closing:
            self._loop.add_reader(self._sock, self._accept)

    def _adopt(self, sock: socket.socket, dialled: str | None, answered: asyncio.Future[None] | None) -> None:
        """Watch a connection until it said who it is."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def closed(reason: str) -> None:
            timer = self._strangers.pop(connection, None)
            if timer is not None:
                timer.cancel()
            if answered is not None and not answered.done():
                answered.set_result(None)

        connection = FrameConnection(
            self._loop,
            sock,
            self._identity.max_frame,
            lambda body: self._introduced(connection, body, dialled, answered),
            closed,
            lambda error: self._refuse_stranger(connection, dialled, error),
        )
        self._strangers[connection] = self._loop.call_later(
            HELLO_S, lambda: connection.close("it never said who it is")
        )
        if dialled is not None:
            connection.send(pack_frame(hello(self._identity, bulk=False)))

    def _introduced(
        self, connection: FrameConnection, body: bytes, dialled: str | None, answered: asyncio.Future[None] | None
    ) -> None:
        try:
            message = decode(peer.handshake_decoder, body)
            if isinstance(message, peer.PeerRefused):
                self._log_refusal(dialled or "?", message.reason)
                connection.close("refused by the other side")
            elif isinstance(message, peer.PeerWelcome) and dialled is not None:
                if message.node != dialled:
                    raise RingRefused(f"the node at the address of '{dialled}' calls itself '{message.node}'")
                self._established(connection, message.node, message.incarnation)
                if answered is not None:
                    answered.set_result(None)
            elif isinstance(message, peer.PeerHello) and dialled is None:
                self._hello(connection, message)
            else:
                raise ProtocolRefused(f"a {type(message).__name__} where none belongs")
        except TokenLakeError as error:
            self._refuse_stranger(connection, dialled, error)

    def _refuse_stranger(self, connection: FrameConnection, dialled: str | None, error: TokenLakeError) -> None:
        self._log_refusal(dialled or "an unnamed connection", str(error))
        connection.send(pack_frame(peer.PeerRefused(type(error).__name__, str(error))))
        connection.close(str(error))

    def _hello(self, connection: FrameConnection, message: peer.PeerHello) -> None:
        version = check_hello(self._identity, message)
        current = self._connections.get(message.node)
        if current is not None and current[1] > message.incarnation:
            raise RingRefused(
                f"two daemons are called '{message.node}', and the one that started later is connected; every node "
                "needs a name of its own"
            )
        connection.send(pack_frame(peer.PeerWelcome(version, self._identity.node, self._identity.incarnation)))
        if message.bulk:
            self._strangers.pop(connection).cancel()
            sock, rest = connection.detach()
            self._on_bulk(sock, message, rest)
        else:
            self._established(connection, message.node, message.incarnation)

    def _log_refusal(self, node: str, reason: str) -> None:
        if self._refused.get(node) != reason:
            self._refused[node] = reason
            log.error("connection with %s refused: %s", node, reason)

    # -- established

    def _established(self, connection: FrameConnection, node: str, incarnation: int) -> None:
        self._strangers.pop(connection).cancel()
        self._drop(node, "replaced by a newer connection")
        self._refused.pop(node, None)
        self._connections[node] = (connection, incarnation)
        connection.on_broken = None
        connection.on_frame = lambda body: self._frame(connection, node, body)
        connection.on_closed = lambda reason: self._lost(connection, node, incarnation, reason)
        log.info("peer %s (incarnation %d) is connected", node, incarnation)
        self._driver.handle(events.PeerUp(node, incarnation))

    def _frame(self, connection: FrameConnection, node: str, body: bytes) -> None:
        try:
            message = decode(peer.peer_decoder, body)
        except ProtocolRefused as error:
            connection.close(str(error))
            return
        self._driver.handle(events.PeerSaid(node, message))

    def _lost(self, connection: FrameConnection, node: str, incarnation: int, reason: str) -> None:
        current = self._connections.get(node)
        if current is None or current[0] is not connection:
            return
        del self._connections[node]
        log.warning("connection with %s ended: %s", node, reason)
        self._driver.handle(events.PeerDown(node, incarnation))
        self._dial_soon(node)

    def _drop(self, node: str, reason: str) -> None:
        current = self._connections.get(node)
        if current is not None:
            current[0].close(reason)

    def refuse(self, node: str, error: Exception) -> None:
        """It broke the protocol: cut it off; it may come back."""
        self._drop(node, str(error))

    def _say(self, instruction: Say) -> None:
        current = self._connections.get(instruction.node)
        if current is not None:
            current[0].send(pack_frame(instruction.message))

    @property
    def connected(self) -> list[str]:
        """Names of the peers that are connected."""
        return list(self._connections)

    async def close(self) -> None:
        """Stop listening and dialling, close all."""
        self._closing = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for task in list(self._dialling.values()):
            task.cancel()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        for connection in [*self._strangers, *(connection for connection, _ in self._connections.values())]:
            connection.close("the daemon stops")


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET


def _listen(address: Address) -> socket.socket:
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(tuple(address))
    except OSError as error:
        sock.close()
        raise ConfigurationError("listen", str(address), f"an address that is free ({error.strerror})") from error
    sock.listen(128)
    sock.setblocking(False)
    return sock
