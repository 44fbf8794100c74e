"""A fetch is aborted while it connects, waits for an answer, or waits for a thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tokenlake.config import Address
from tokenlake.core.events import Event, FetchDone
from tokenlake.core.instructions import AbortFetch, StartFetch
from tokenlake.errors import ProtocolRefused
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.bulk.blocking_sockets import read_frame
from tokenlake_server.bulk.receiver import RECEIVE_THREADS, THREADS_PER_NODE, BulkReceiver
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.handshake import NONCE_BYTES, Acceptor, PeerIdentity

FOREVER_S = 1000.0


class Rules:
    """Stands for the driver: its instructions go to the receiver, whose events it keeps."""

    def __init__(self) -> None:
        self.sinks: dict[type, Any] = {}
        self.receiver: BulkReceiver
        self.done: dict[int, FetchDone] = {}

    def carry_out(self, kind: type, sink: Any) -> None:
        self.sinks[kind] = sink

    def post(self, event: Event) -> None:
        assert isinstance(event, FetchDone)
        assert event.fetch not in self.done, "a fetch ends once"
        self.done[event.fetch] = event

    def start(self, fetch: int, node: str, count: int = 1, answer_s: float = FOREVER_S) -> None:
        self.sinks[StartFetch](StartFetch(fetch, node, "t", bytes(32 * count), bytes(16 * count), 16, 1, answer_s))

    def abort(self, fetch: int) -> None:
        self.receiver.abort(AbortFetch(fetch))

    def wait(self, *fetches: int) -> list[bool | None]:
        """Wait until these have ended without a segment. Returns whether they were answered."""
        wait_until(lambda: all(fetch in self.done for fetch in fetches), f"fetches {fetches} have ended")
        for fetch in fetches:
            assert set(self.done[fetch].codes) == {Code.LOST}
        return [self.done[fetch].answered for fetch in fetches]


@contextlib.contextmanager
def silent(backlog: int) -> Iterator[Address]:
    """The address of a listener that accepts nothing. With a backlog of 0 the kernel drops attempts to connect."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))
        for _ in range(0 if backlog else 4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield Address(*listener.getsockname())


def welcomed(listener: socket.socket) -> socket.socket:
    """A connection of a node, whose handshake this side has completed as node x."""
    sock, _ = listener.accept()
    sock.settimeout(LIMIT_S)
    hello = decode(peer.handshake_decoder, read_frame(sock, peer.HANDSHAKE_BYTES))
    assert isinstance(hello, peer.PeerHello)
    sock.sendall(pack_frame(Acceptor(PeerIdentity("x", 1), hello, bytes(NONCE_BYTES)).challenge))
    read_frame(sock, peer.HANDSHAKE_BYTES)
    sock.sendall(pack_frame(peer.PeerWelcome()))
    return sock


def answer(sock: socket.socket) -> None:
    """Answer one request: a probe with its bytes; none of the segments is here."""
    request = decode(peer.bulk_request_decoder, read_frame(sock, peer.MAX_FRAME))
    count = len(request.keys) // 32
    pulled = peer.Pulled(16 if count else peer.PROBE_BYTES, bytes([Code.LOST]) * count, b"")
    sock.sendall(pack_frame(pulled) + bytes(0 if count else peer.PROBE_BYTES))


@contextlib.contextmanager
def sound() -> Iterator[Address]:
    """The address of a node x that answers probes."""

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ProtocolRefused, EOFError):
            while True:
                answer(sock)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(welcomed(listener),), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield Address(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def receiver(addresses: dict[str, Address], told: Address | None = None) -> Iterator[Rules]:
    """`told`: a further address of every node."""
    rules: Any = Rules()
    # No fetch of these tests has segments that come.
    arena: Any = SimpleNamespace(slots=lambda places, size: [])
    identity = PeerIdentity("here", 1)
    known = PeerAddresses(addresses)
    for name in addresses:
        known.tell(name, [str(told)] if told is not None else [])
    made = rules.receiver = BulkReceiver(identity, known, arena, rules)
    try:
        yield rules
    finally:
        closing = threading.Thread(target=made.close)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive(), "a thread hangs"


@pytest.mark.parametrize("backlog", [0, 64], ids=["connecting", "unanswered"])
def test_a_silent_node(backlog: int) -> None:
    """An abort ends a fetch at once; without one the node is given up in time."""
    with silent(backlog) as address, receiver({"x": address}) as rules:
        fetches = range(THREADS_PER_NODE)
        for fetch in fetches:
            rules.start(fetch, "x")
        assert not rules.done
        for fetch in fetches:
            rules.abort(fetch)
        assert rules.wait(*fetches) == [None] * THREADS_PER_NODE
        rules.start(100, "x", answer_s=0.05)
        assert rules.wait(100) == [False]


def test_a_fetch_without_a_thread_ends_when_it_is_aborted() -> None:
    """It was not sent, so that it says nothing of the node."""
    with silent(0) as address, receiver({"x": address}) as rules:
        count = RECEIVE_THREADS + 2
        for fetch in range(count):
            rules.start(fetch, "x")
        for fetch in reversed(range(count)):
            rules.abort(fetch)
        assert rules.wait(*range(count)) == [None] * count


def test_one_node_leaves_threads_for_another() -> None:
    """The other node refuses connections at once, which takes a thread."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = Address(*closed.getsockname())
    with silent(0) as address, receiver({"x": address, "y": refusing}) as rules:
        for fetch in range(2 * RECEIVE_THREADS):
            rules.start(fetch, "x")
        rules.start(100, "y")
        assert rules.wait(100) == [False]
        assert list(rules.done) == [100]


@pytest.mark.parametrize("backlog", [0, 64], ids=["connecting", "unanswered"])
@pytest.mark.parametrize("main", [True, False], ids=["the main path", "the further path"])
def test_one_path_of_two_that_fails(backlog: int, main: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The node is not taken for a silent one: its other path is used, and the one that failed is left alone."""
    caplog.set_level(logging.INFO, "tokenlake_server.bulk.receiver")
    with silent(backlog) as address, sound() as other:
        addresses = (address, other) if main else (other, address)
        with receiver({"x": addresses[0]}, addresses[1]) as rules:
            for fetch in range(6):
                rules.start(fetch, "x", count=0, answer_s=0.5)
                wait_until(lambda fetch=fetch: fetch in rules.done, "the probe has ended")  # type: ignore[misc]
                assert rules.done[fetch].answered is True
        assert [record.getMessage().count("leaves the path") for record in caplog.records] == [1]


def test_the_idle_connections_with_a_member_that_left_are_closed() -> None:
    arena: Any = SimpleNamespace(slots=lambda places, size: [])
    rules: Any = Rules()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = PeerAddresses({"x": Address(*listener.getsockname())})
        made = BulkReceiver(PeerIdentity("here", 1), addresses, arena, rules)
        rules.start(1, "x")
        with welcomed(listener) as sock:
            answer(sock)
            assert rules.wait(1) == [True]
            made.follow()
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            addresses.change({})
            made.follow()
            sock.settimeout(LIMIT_S)
            assert sock.recv(1) == b""
        made.close()
