"""Each peer has its own bulk connections, and a peer that reads slowly pins no slot for long."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tokenlake.core.events import Event, PullRequested, SendDone
from tokenlake.core.instructions import SendBulk
from tokenlake.wire import Code, pack_frame, peer
from tokenlake_server.bulk import sender as bulk_sender
from tokenlake_server.bulk.sender import CONNECTIONS_PER_PEER, BulkSender

SLOT_BYTES = 8 << 20
SLOTS = 4


class Rules:
    """Stands for the driver: sends some slots on each request, and counts the ends of sends."""

    def __init__(self) -> None:
        self.sinks: dict[type, Any] = {}
        self.done = 0

    def carry_out(self, kind: type, sink: Any) -> None:
        self.sinks[kind] = sink

    def post(self, event: Event) -> None:
        match event:
            case PullRequested():
                self.sinks[SendBulk](
                    SendBulk(event.stream, SLOT_BYTES, bytes([Code.LOCAL]) * SLOTS, b"", bytes(8 * SLOTS))
                )
            case SendDone():
                self.done += 1


class Slots:
    """Stands for the arena."""

    def slots(self, places: object, slot_bytes: int) -> list[memoryview]:
        return [memoryview(bytes(slot_bytes)) for _ in range(SLOTS)]


class Peers:
    """Bulk connections of peers to one sender."""

    def __init__(self, sender: BulkSender, stack: contextlib.ExitStack) -> None:
        self._sender = sender
        self._stack = stack

    def gauge(self) -> float:
        """The number of requests that the shared thread served."""
        (level,) = self._sender.gauges()
        return level.value

    def connect(self, node: str, incarnation: int = 1) -> socket.socket:
        """The peer's end of a new connection."""
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = self._stack.enter_context(socket.socket())
        # A small buffer: the sender notices soon that some bytes were taken.
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        near.settimeout(LIMIT_S)
        hello = peer.PeerHello(1, 1, node=node, cluster="", incarnation=incarnation, purpose="bulk", nonce=bytes(32))
        self._sender.adopt(far, hello, None)
        return near


@contextlib.contextmanager
def sender() -> Iterator[tuple[Peers, Rules]]:
    rules: Any = Rules()
    arena: Any = Slots()
    made = BulkSender(arena, rules)
    with contextlib.ExitStack() as stack:
        stack.callback(made.close)
        yield Peers(made, stack), rules


def request(sock: socket.socket) -> None:
    sock.sendall(pack_frame(peer.Pull("red", bytes(32 * SLOTS))))


def served(sock: socket.socket) -> bool:
    """Is a request on this connection answered?"""
    with contextlib.suppress(ConnectionError):
        request(sock)
        return bool(sock.recv(1))
    return False


def test_no_peer_takes_the_connections_of_another() -> None:
    with sender() as (peers, _):
        mine = [peers.connect("x") for _ in range(3 * CONNECTIONS_PER_PEER)]
        assert served(peers.connect("y"))
        assert [served(sock) for sock in mine].count(True) == CONNECTIONS_PER_PEER


def test_a_peer_that_started_again_has_new_connections() -> None:
    """Its former process may have ended without closing its connections."""
    with sender() as (peers, _):
        former = [peers.connect("x", 1) for _ in range(CONNECTIONS_PER_PEER)]
        assert all(served(peers.connect("x", 2)) for _ in range(CONNECTIONS_PER_PEER))
        assert not served(former[0])


def test_a_connection_that_ended_before_the_rules_answered() -> None:
    """Another process of the peer has connected, and the sender ended the connection of the former one."""
    with sender() as (peers, rules):
        sock = peers.connect("x", 1)
        request(sock)
        peers.connect("x", 2)
        sock.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 20):
                pass
        wait_until(lambda: rules.done == 1, "the send has ended")
        rules.sinks[SendBulk](SendBulk(1, SLOT_BYTES, bytes([Code.LOCAL]) * SLOTS, b"", bytes(8 * SLOTS)))
        assert rules.done == 1


def test_a_send_to_a_slow_reader_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes some bytes again and again, so that no send stalls."""
    monkeypatch.setattr(bulk_sender, "SEND_STALL_S", 0.2)
    monkeypatch.setattr(bulk_sender, "LEAST_RATE", 1e9)
    with sender() as (peers, rules):
        sock = peers.connect("x")
        request(sock)
        stop = threading.Event()

        def read() -> None:
            with contextlib.suppress(ConnectionError):
                while not stop.wait(0.02) and sock.recv(4096):
                    pass

        thread = threading.Thread(target=read)
        thread.start()
        try:
            wait_until(lambda: rules.done == 1, "the send has ended")
        finally:
            stop.set()
            thread.join(LIMIT_S)


def test_without_a_free_thread_connections_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes of the container is reached: others still get the segments of this node."""
    start, limit = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if limit.is_set() and thread.name.startswith("send-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def whole(sock: socket.socket) -> None:
        """The whole answer to a request comes."""
        request(sock)
        left = SLOTS * SLOT_BYTES
        while left > 0:
            received = len(sock.recv(1 << 20))
            assert received
            left -= received

    monkeypatch.setattr(bulk_sender, "SEND_STALL_S", 0.2)
    with sender() as (peers, _):
        own = peers.connect("x")
        monkeypatch.setattr(threading.Thread, "start", limited)
        limit.set()
        shared = [peers.connect(name) for name in ("x", "x", "y")]
        for sock in (shared[2], own, shared[0], shared[1], shared[2]):
            whole(sock)
        wait_until(lambda: peers.gauge() == 4, "the shared thread served all but the first connection")
        # A peer that sends a part of a request only is given up.
        shared[0].sendall(b"\0")
        whole(shared[1])
        shared[2].close()
        whole(shared[1])
        limit.clear()
        whole(shared[1])
        with contextlib.suppress(ConnectionError):
            while shared[0].recv(1 << 20):
                pass
        assert peers.gauge() == 6, "the connection has a thread of its own"
