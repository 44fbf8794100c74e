"""Control connections between daemons: one per pair, dialled by the node whose name sorts first."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.core.instructions import Note, SendToPeer
from tokenlake.errors import ConfigurationError, ProtocolRefused, RingRefused, TokenLakeError
from tokenlake.ring import Ring
from tokenlake.wire import pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.driver import Driver
from tokenlake_server.frames import FrameConnection
from tokenlake_server.proof import NONCE_BYTES, Acceptor, Dialler, PeerIdentity

__all__ = ["Adopt", "PeerIdentity", "PeerListener", "ring_members"]

log = logging.getLogger(__name__)

REDIAL_S = 0.1
"""Between two attempts; a dead port on one machine answers at once, so the cost is small and a restarted peer
is found soon."""
HELLO_S = 5.0
MAX_STRANGERS = 64
"""Connections that have not proven who they are."""
MAX_REASON = 2000
"""Characters of the other side's reason in the log."""


Adopt = Callable[[socket.socket, peer.PeerHello, bytes], None]
"""(socket, what its dialler said, bytes already read): the socket is the callee's."""


@dataclass
class _Stranger:
    """A connection on which the other side has proven nothing yet."""

    timer: asyncio.TimerHandle
    dialled: str | None
    """The node that was meant; None: the other side dialled."""
    answered: asyncio.Future[None] | None
    """Of the one who dialled: done when the attempt is over."""
    half: Dialler | Acceptor | None

    @property
    def name(self) -> str:
        """For the log."""
        if isinstance(self.half, Acceptor):
            return f"somebody who says to be {self.half.hello.node!r}"
        return self.dialled or "an unnamed connection"


def ring_members(ring: Ring, weights: Mapping[str, int]) -> tuple[str, ...]:
    """Members as shown in refusals: name, and weight where it is a size."""
    return tuple(f"{name}/{weights[name]}" if weights[name] > 1 else name for name in ring.members)


class PeerListener:
    """Owns the listening socket and the control connections. All others are handed to `adopt`."""

    def __init__(
        self,
        identity: PeerIdentity,
        listen: Address,
        peers: Mapping[str, Address],
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        adopt: Mapping[peer.Purpose, Adopt],
    ) -> None:
        """`adopt`: who takes over a connection that is not for control."""
        self._identity = identity
        self._addresses = dict(peers)
        self._driver = driver
        self._loop = loop
        self._handed_over = adopt
        self._connections: dict[str, tuple[FrameConnection, int]] = {}
        self._strangers: dict[FrameConnection, _Stranger] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._closing = False
        self._sock = _listen(listen)
        self.address = Address(*self._sock.getsockname()[:2])
        loop.add_reader(self._sock, self._accept)
        driver.carry_out(SendToPeer, self._say)
        driver.carry_out(Note, lambda note: log.warning("%s", note.text))
        for name in self._addresses:
            self._dial_soon(name)

    # -- dialling

    def _dial_soon(self, name: str) -> None:
        if self._identity.node < name and not self._closing and name not in self._dialling:
            self._dialling[name] = self._loop.create_task(self._dial(name))

    async def _dial(self, name: str) -> None:
        """Until it answers. The peer's `PeerWelcome` completes the connection."""
        try:
            while name not in self._connections and not self._closing:
                try:
                    await self._attempt(name)
                except OSError:
                    pass
                except Exception:
                    # Whatever went wrong with one attempt, the next may succeed; without it the peer is lost for good.
                    log.exception("dialling %s failed", name)
                if name not in self._connections:
                    await asyncio.sleep(REDIAL_S)
        finally:
            self._dialling.pop(name, None)

    async def _attempt(self, name: str) -> None:
        """One connection, until it is established or closed. Raises OSError when there is none."""
        address = self._addresses[name]
        sock = socket.socket(_family(address), socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.wait_for(self._loop.sock_connect(sock, tuple(address)), HELLO_S)
            if sock.getsockname() == sock.getpeername():
                # An absent peer's port may be the one the kernel gave us: TCP then connects the socket to itself.
                raise ConnectionRefusedError
            answered: asyncio.Future[None] = self._loop.create_future()
            self._adopt(sock, name, answered)
        except BaseException:
            sock.close()
            raise
        await answered

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
        """Watch a connection until it proved who it is."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def closed(reason: str) -> None:
            gone = self._strangers.pop(connection, None)
            if gone is not None:
                gone.timer.cancel()
            if answered is not None and not answered.done():
                answered.set_result(None)

        connection = FrameConnection(
            self._loop,
            sock,
            self._identity.max_frame,
            lambda body: self._introduced(connection, stranger, body),
            closed,
            lambda error: self._refuse_stranger(connection, stranger, error),
        )
        timer = self._loop.call_later(HELLO_S, lambda: connection.close("it never said who it is"))
        stranger = self._strangers[connection] = _Stranger(timer, dialled, answered, None)
        if dialled is not None:
            stranger.half = Dialler(self._identity, dialled, secrets.token_bytes(NONCE_BYTES), purpose="control")
            connection.send(pack_frame(stranger.half.hello))

    def _introduced(self, connection: FrameConnection, stranger: _Stranger, body: bytes) -> None:
        """One frame of the handshake that `tokenlake_server.proof` draws."""
        try:
            match decode(peer.handshake_decoder, body), stranger.half:
                case peer.PeerRefused() as refused, _:
                    self._log_refusal(stranger.name, refused.reason)
                    connection.close("refused by the other side")
                case peer.PeerHello() as hello, None:
                    stranger.half = Acceptor(self._identity, hello, secrets.token_bytes(NONCE_BYTES))
                    connection.send(pack_frame(stranger.half.challenge))
                case peer.PeerChallenge() as challenge, Dialler(incarnation=None) as dialler:
                    connection.send(pack_frame(dialler.answer(challenge)))
                case peer.PeerProof() as proof, Acceptor() as acceptor:
                    acceptor.check(proof)
                    self._accepted(connection, acceptor.hello)
                case peer.PeerWelcome(), Dialler(incarnation=int(incarnation)):
                    assert stranger.dialled is not None
                    self._established(connection, stranger.dialled, incarnation)
                    if stranger.answered is not None:
                        stranger.answered.set_result(None)
                case message, _:
                    raise ProtocolRefused(f"a {type(message).__name__} where none belongs")
        except TokenLakeError as error:
            self._refuse_stranger(connection, stranger, error)

    def _refuse_stranger(self, connection: FrameConnection, stranger: _Stranger, error: TokenLakeError) -> None:
        self._log_refusal(stranger.name, str(error))
        connection.send(pack_frame(peer.PeerRefused(type(error).__name__, str(error))))
        connection.close(str(error))

    def _accepted(self, connection: FrameConnection, hello: peer.PeerHello) -> None:
        """It dialled, and proved that it is a member."""
        current = self._connections.get(hello.node)
        if current is not None and current[1] > hello.incarnation:
            raise RingRefused(
                f"two daemons are called '{hello.node}', and the one that started later is connected; every node "
                "needs a name of its own"
            )
        connection.send(pack_frame(peer.PeerWelcome()))
        if connection not in self._strangers:
            # The send found out that it is gone.
            return
        if hello.purpose == "control":
            self._established(connection, hello.node, hello.incarnation)
        else:
            self._strangers.pop(connection).timer.cancel()
            sock, rest = connection.detach()
            self._handed_over[hello.purpose](sock, hello, rest)

    def _log_refusal(self, name: str, reason: str) -> None:
        """Once per node that is dialled, and once for all others together, until the reason changes."""
        # Name and reason may be a stranger's: no line of its making, nor a map that grows with its names.
        known = name if name in self._addresses else ""
        line = "".join(each if each.isprintable() else " " for each in f"{name} refused: {reason}"[:MAX_REASON])
        if self._refused.get(known) != line:
            self._refused[known] = line
            log.error("connection with %s", line)

    # -- established

    def _established(self, connection: FrameConnection, node: str, incarnation: int) -> None:
        self._strangers.pop(connection).timer.cancel()
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
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, peer.Lookup | peer.Offer):
            log.debug("request %r: a %s of %s", message.request, type(message).__name__, node)
        self._driver.handle(events.PeerSent(node, message))

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

    def _say(self, instruction: SendToPeer) -> None:
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
