"""Connections to a query engine that can send messages which no client sends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.robustness.live import LIMIT_S
from tests.server import raw as server
from tokenlake.wire import HEADER_BYTES, engine, pack_frame, peer
from tokenlake.wire import query as wire
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster


class Raw:
    """A socket to a query engine; `theirs` decodes its messages."""

    def __init__(self, sock: socket.socket, theirs: msgspec.msgpack.Decoder[Any]) -> None:
        self.sock = sock
        self._theirs = theirs
        sock.settimeout(LIMIT_S)

    def send(self, message: msgspec.Struct, payload: bytes = b"", descriptor: int | None = None) -> None:
        """Send a frame and the raw bytes that follow it."""
        frame = pack_frame(message)
        if descriptor is None:
            self.sock.sendall(frame + payload)
        else:
            socket.send_fds(self.sock, [frame], [descriptor])

    def receive(self) -> Any:
        """The next message."""
        size = int.from_bytes(self.exactly(HEADER_BYTES), "little")
        return self._theirs.decode(self.exactly(size))

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes."""
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            assert more, "the query engine closed the connection"
            data += more
        return data

    def refused(self) -> wire.Refused:
        """The next message, which must be a refusal."""
        message = self.receive()
        assert isinstance(message, wire.Refused), message
        return message

    def wait_for_end(self) -> None:
        """Read until the connection ends. TimeoutError if it does not end."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(1 << 16):
                pass


@contextlib.contextmanager
def raw_engine(pool: Pool) -> Iterator[Raw]:
    """A connection that the query engine takes for one of `pool`'s engine."""
    link = pool.link
    pending = link.channel.begin(engine.OpenQuery)
    link.expect(link.channel.wait(pending, LIMIT_S), engine.QueryOpened)
    assert pending.descriptor is not None
    with socket.socket(fileno=pending.descriptor) as sock:
        yield Raw(sock, wire.query_reply_decoder)


@contextlib.contextmanager
def raw_peer(cluster: Cluster, node: int, asker: int) -> Iterator[Raw]:
    """A connection that the query engine takes for one of the query engine of the node `asker`."""
    answerer = cluster.nodes[node]
    with server.Raw(server.peer_address(answerer)) as raw:
        welcome = server.introduce(raw, server.identity_of(cluster.nodes[asker]), answerer.name, "query")
        assert isinstance(welcome, peer.PeerWelcome), welcome
        yield Raw(raw.sock, wire.ask_reply_decoder)


def memfd(nbytes: int, *, sealed: bool = True) -> int:
    """The caller closes it."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor
