"""Connections between daemons: handshakes that fail or never end, and changes of the ring."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.robustness.live import daemons, total, wait_until
from tests.server.raw import Raw, identity_of, introduce, peer_address
from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.wire import peer
from tokenlake.wire.frames import decode
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.connections import PeerConnections
from tokenlake_server.peers.handshake import NONCE_BYTES, Acceptor, Dialler, PeerIdentity
from tokenlake_server.peers.listeners import open_listener
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

OBSERVED_S = 3.0
TIMES = 5
"""Several attempts, because the write of the welcome fails at once or later, as the kernel decides."""


def test_a_name_that_no_other_machine_reaches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's installer gives the machine's name the address 127.0.1.1."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.1.1", *rest, **more))
    for host, told in (("gpu-1.example", 1), ("127.0.1.1", 1), ("localhost", 1)):
        open_listener(Address(host, 0), "listen").close()
        assert caplog.text.count("resolves to 127.0.1.1, an address of its own that no other machine reaches") == told


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    """A member whose daemon was killed, in whose name a test may speak, and a daemon that runs."""
    with daemons(2) as cluster:
        cluster.nodes[0].kill()
        yield cluster.nodes[0], cluster.nodes[1]


def test_short_frames_before_the_proof(pair: tuple[Node, Node]) -> None:
    """The limit of both sides is part of the protocol. It was once the setting `max_frame`: nodes whose settings
    differed closed their connections again and again."""
    member, node = pair
    with Raw(peer_address(node)) as raw:
        raw.write((peer.HANDSHAKE_BYTES + 1).to_bytes(4, "little"))
        refused = raw.answer()
        assert isinstance(refused, peer.PeerRefused)
        assert f"at most {peer.HANDSHAKE_BYTES}" in refused.reason
        assert raw.closed()
    with Raw(peer_address(node)) as raw:
        assert isinstance(introduce(raw, identity_of(member), node.name, "control"), peer.PeerWelcome)
        wait_until(lambda: _connected(node), "the member is connected")
        statistics = tuple((f"tenant {number}", 512, bytes(1 << 18)) for number in range(7))
        raw.send(peer.EvictionStatistics(statistics))
        answered(raw, 7)
        raw.write((peer.MAX_FRAME + 1).to_bytes(4, "little"))
        _until_logged(node, lambda text: f"at most {peer.MAX_FRAME} are accepted" in text)


def answered(raw: Raw, call: int) -> None:
    """A ping is answered, and with it all that was sent before was read."""
    raw.send(peer.Ping(call, (0.0, 0.0, 0.0), 0.0))
    while not isinstance(said := decode(peer.peer_decoder, raw.body()), peer.Pong):
        pass
    assert said.call == call


def test_a_peer_that_ends_each_connection_is_dialled_with_pauses() -> None:
    welcomed: list[float] = []
    own = reserve_port()
    with daemons() as cluster, socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with Raw.of(listener.accept()[0]) as raw:
                        hello = raw.answer()
                        assert isinstance(hello, peer.PeerHello)
                        acceptor = Acceptor(PeerIdentity("b", 1), hello, secrets.token_bytes(NONCE_BYTES))
                        raw.send(acceptor.challenge)
                        raw.answer()
                        raw.send(peer.PeerWelcome())
                        welcomed.append(time.monotonic())

        threading.Thread(target=welcome, daemon=True).start()
        _node(cluster, "a", own, f"b=127.0.0.1:{listener.getsockname()[1]}").start()
        wait_until(lambda: bool(welcomed), "the peer was dialled")
        time.sleep(OBSERVED_S)
        listener.shutdown(socket.SHUT_RDWR)
    assert 2 <= len(welcomed) <= 20


def _connected(node: Node) -> bool:
    try:
        return total(node, "tokenlake_peers_connected") == 1
    except OSError:
        return False


def _node(cluster: Cluster, name: str, port: int, peers: str) -> Node:
    settings = {"memory": "1MiB", "listen": f"127.0.0.1:{port}", "peers": peers}
    node = Node(name, cluster.directory, settings)
    cluster.nodes.append(node)
    return node


def _until_logged(node: Node, found: Callable[[str], bool]) -> None:
    wait_until(lambda: node.log.exists() and found(node.log.read_text()), f"the log of {node.name} says so")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("purpose", ["control", "bulk", "query"])
def test_a_dialler_that_dies_in_the_handshake(pair: tuple[Node, Node], purpose: peer.Purpose, reset: bool) -> None:
    """The death of the dialler makes no callback of the control loop fail, which would log a traceback."""
    member, node = pair
    identity = identity_of(member)
    for _ in range(TIMES):
        with Raw(peer_address(node)) as raw:
            dialler = Dialler(identity, node.name, secrets.token_bytes(NONCE_BYTES), purpose)
            raw.send(dialler.hello)
            challenge = raw.answer()
            assert isinstance(challenge, peer.PeerChallenge)
            if reset:
                raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.send(dialler.answer(challenge))
    with Raw(peer_address(node)) as raw:
        assert isinstance(introduce(raw, identity, node.name, "bulk"), peer.PeerWelcome)
    assert "Traceback" not in node.log.read_text()


def test_silent_connections_keep_no_peer_out() -> None:
    """They stay open, and further ones take the place of each that the daemon closes."""
    with daemons(2) as cluster, contextlib.ExitStack() as stack:
        member, node = cluster.nodes
        identity = identity_of(member)
        member.kill()
        silent = [stack.enter_context(Raw(peer_address(node))) for _ in range(70)]
        purposes: list[peer.Purpose] = ["control", "bulk", "query"]
        for purpose in purposes:
            with Raw(peer_address(node)) as raw:
                assert isinstance(introduce(raw, identity, node.name, purpose), peer.PeerWelcome)
            silent += [stack.enter_context(Raw(peer_address(node))) for _ in range(10)]
        member.start()
        wait_until(lambda: _connected(member) and _connected(node), "the two nodes know each other")


def test_connections_of_one_address_close_none_of_another(pair: tuple[Node, Node]) -> None:
    """Each source address has a share of the connections that have not proven their identity."""
    member, node = pair
    # Any address of the network 127/8 is one of this machine.
    with contextlib.ExitStack() as stack, Raw(peer_address(node), "127.0.0.2") as raw:
        dialler = Dialler(identity_of(member), node.name, secrets.token_bytes(NONCE_BYTES), "bulk")
        raw.send(dialler.hello)
        challenge = raw.answer()
        for _ in range(200):
            stack.enter_context(Raw(peer_address(node)))
        with Raw(peer_address(node)) as last:
            assert isinstance(introduce(last, identity_of(member), node.name, "bulk"), peer.PeerWelcome)
        assert isinstance(challenge, peer.PeerChallenge)
        raw.send(dialler.answer(challenge))
        assert isinstance(raw.answer(), peer.PeerWelcome)


def test_messages_of_an_unknown_type_keep_the_connection(pair: tuple[Node, Node]) -> None:
    """A node of a newer version sends them: they are dropped and counted. So is a location that is none left out. Bytes
    that are no message end the connection."""
    member, node = pair
    with Raw(peer_address(node)) as raw:
        # A location that is none is as no location.
        identity = msgspec.structs.replace(identity_of(member), location="rack 1")
        introduce(raw, identity, node.name, "control")
        _until_logged(node, lambda log: "has the location 'rack 1'; expected 1 to 4 labels" in log)
        for fields in ([120], [121, "text", {"a": 1}], [120, [1, 2]]):
            body = msgspec.msgpack.encode(fields)
            raw.write(len(body).to_bytes(4, "little") + body)
        answered(raw, 77)
        assert total(node, "tokenlake_unknown_messages_total") == 3
        assert node.log.read_text().count("which only a newer version knows") == 1
        # A known type with wrong fields.
        raw.write(b"\x02\x00\x00\x00\x91\x12")
        _until_logged(node, lambda log: "a frame that this protocol does not know" in log)


LIMIT_S = 20.0
NOWHERE = Address("127.0.0.1", 0)


class Rules:
    """In place of the driver: keeps the events."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def carry_out(self, kind: type, sink: Callable[[Any], None]) -> None:
        pass

    def handle(self, event: events.Event) -> None:
        self.events.append(event)


def side(name: str, cluster: str = "tokenlake") -> tuple[PeerConnections, Rules]:
    rules: Any = Rules()
    identity = PeerIdentity(name, 1, cluster=cluster)
    loop = asyncio.get_running_loop()
    return PeerConnections(identity, NOWHERE, PeerAddresses({}), rules, loop, {}), rules


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0.005)


async def test_members_that_come_and_leave() -> None:
    """Members that come are dialled and those that leave are dropped."""

    (a, of_a), (b, of_b) = side("a"), side("b")
    strangers: list[str] = []
    b.on_stranger = strangers.append
    # a knows b first: b refuses it, and is told that the membership may have more.
    a.set_peers({"b": b.address})
    await until(lambda: bool(strangers))
    assert not of_a.events
    b.set_peers({"a": a.address})
    await until(lambda: a.connected == ["b"] and b.connected == ["a"])
    assert of_a.events == [events.PeerUp("b", 1)]
    assert of_b.events == [events.PeerUp("a", 1)]
    # b drops a: the rules of b know already, those of a are told.
    b.set_peers({})
    await until(lambda: not a.connected)
    assert of_b.events == [events.PeerUp("a", 1)]
    assert of_a.events == [events.PeerUp("b", 1), events.PeerDown("b", 1)]
    b.set_peers({"a": a.address})
    await until(lambda: a.connected == ["b"])
    a.set_peers({})
    await until(lambda: not b.connected)
    assert not a.connected
    for each in (a, b):
        await each.close()
