"""The bulk connections that this daemon opens to others, which stay open for later transfers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from tokenlake_server.bulk.blocking_sockets import NewKeys, introduce, size_buffer
from tokenlake_server.bulk.stream import BulkStream
from tokenlake_server.peers.addresses import Endpoint, PeerAddresses, set_tcp_options
from tokenlake_server.peers.handshake import PeerIdentity

IDLE_CONNECTIONS = 4
"""Limit of the unused bulk connections per path to a peer that stay open for later fetches."""


class BulkConnections:
    """Opens connections and keeps the idle ones. Used by several threads."""

    def __init__(self, identity: PeerIdentity, addresses: PeerAddresses, new_keys: NewKeys) -> None:
        """`new_keys`: makes the keys of connections."""
        self._identity = identity
        self._addresses = addresses
        self._new_keys = new_keys
        self._idle: dict[tuple[str, Endpoint], list[BulkStream]] = {}
        self._lock = threading.Lock()

    def borrow(self, node: str, path: Endpoint, until: float, use: Callable[[socket.socket], None]) -> BulkStream:
        """An idle bulk connection to `node` over `path`, else a new one, made until the time `until`. The caller owns
        it. `use` is called with its socket before anything waits for it; the connection is closed if it raises."""
        idle = self._take_idle(node, path)
        sock = idle.sock if idle is not None else socket.socket(path.family, socket.SOCK_STREAM)
        try:
            use(sock)
            if idle is not None:
                return idle
            limit(sock, until)
            set_tcp_options(sock)
            try:
                sock.connect(path.address)
            except OSError:
                self._addresses.failed(node, path)
                raise
            limit(sock, until)
            keys = introduce(sock, self._identity, node, "bulk", self._new_keys)
            size_buffer(sock, socket.SO_RCVBUF, encrypted=keys is not None)
            return BulkStream(sock, keys)
        except BaseException:
            sock.close()
            raise

    @contextlib.contextmanager
    def opened(self, node: str, until: float) -> Iterator[BulkStream]:
        """A connection to `node`, with calls that end at the time `until`. It is kept if the block succeeds."""
        path = self._addresses.bulk(node)[0]
        stream = self.borrow(node, path, until, lambda sock: None)
        try:
            limit(stream.sock, until)
            yield stream
        except BaseException:
            stream.sock.close()
            raise
        self.give_back(node, path, stream)

    def _take_idle(self, node: str, path: Endpoint) -> BulkStream | None:
        with self._lock:
            idle = self._idle.get((node, path))
            while idle:
                stream = idle.pop()
                if not _dropped(stream.sock):
                    return stream
                stream.sock.close()
        return None

    def drop_idle(self, node: str, path: Endpoint) -> None:
        """Close the idle connections with a node over a path."""
        with self._lock:
            idle = self._idle.pop((node, path), [])
        for stream in idle:
            stream.sock.close()

    def give_back(self, node: str, path: Endpoint, stream: BulkStream) -> None:
        """Keep a connection on which nothing is under way, or close it."""
        # A socket with a timeout of Python's is non-blocking in the kernel, and `_dropped` would wait for the timeout.
        stream.sock.settimeout(None)
        with self._lock:
            if node in self._addresses:
                idle = self._idle.setdefault((node, path), [])
                if len(idle) < IDLE_CONNECTIONS:
                    idle.append(stream)
                    return
        stream.sock.close()

    def follow(self) -> None:
        """Follow a change of the addresses: close the idle connections with nodes that left."""
        with self._lock:
            left = [(node, path) for node, path in self._idle if node not in self._addresses]
        for node, path in left:
            self.drop_idle(node, path)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for stream in [stream for idle in self._idle.values() for stream in idle]:
                stream.sock.close()
            self._idle.clear()


def limit(sock: socket.socket, until: float) -> None:
    """Let the calls of `sock` raise TimeoutError at the time `until`. Raises TimeoutError after that time."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the node did not answer in time")
    sock.settimeout(left_s)


def _dropped(sock: socket.socket) -> bool:
    """True when the other side closed an idle connection, or sent bytes although nothing was requested."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
