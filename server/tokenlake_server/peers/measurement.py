"""Measures the path from another node to this one: round trip and bandwidth, over each address of its bulk connections.

The bytes are probes of the bulk protocol (`Pull` without keys): no segment is read, and no slot is written.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import peer
from tokenlake.wire.frames import decode
from tokenlake_server.bulk.blocking_sockets import NewKeys, ended, introduce, size_buffer
from tokenlake_server.bulk.stream import BulkStream
from tokenlake_server.peers.addresses import Endpoint, PeerAddresses, set_tcp_options
from tokenlake_server.peers.handshake import PeerIdentity

MAX_BYTES = 256 << 20
MAX_S = 1.0
"""Limits of one measurement of a node, for all of its paths together; a probe that has begun is received to its end."""
DIALS = 3
"""TCP handshakes on each path, of which the shortest is the round trip."""
DIAL_S = 1.0
"""Limit of the seconds of a TCP handshake."""
STALL_S = 2.0
"""Limit of the seconds in which no byte comes, once there is a connection."""
PART = 0.25
"""Share of the time left that the next probe may take, by the rate so far."""


class PathMeasured(NamedTuple):
    """The result for one address of a node."""

    address: str
    round_trip_s: float
    """The shortest TCP handshake, in seconds; 0 if none was completed."""
    bytes: int
    seconds: float
    problem: str
    """The reason why not all bytes of the measurement were received; empty if all were."""


class PeerMeasurement:
    """Measures one node at a time. May be used by several threads."""

    def __init__(self, identity: PeerIdentity, addresses: PeerAddresses, new_keys: NewKeys) -> None:
        self._identity = identity
        self._addresses = addresses
        self._new_keys = new_keys
        self._lock = threading.Lock()

    def measure(self, node: str, max_bytes: int = MAX_BYTES, max_s: float = MAX_S) -> list[PathMeasured]:
        """Measure all paths to `node`. Blocks for at most `max_s`, and `DIAL_S` or `STALL_S` for each path that does
        not answer."""
        with self._lock:
            try:
                paths = self._addresses.bulk(node)
            except OSError as error:
                return [PathMeasured("", 0.0, 0, 0.0, str(error))]
            share = len(paths)
            return [self._path(node, path, max_bytes // share, max_s / share) for path in paths]

    def _path(self, node: str, path: Endpoint, max_bytes: int, max_s: float) -> PathMeasured:
        host, port = str(path.address[0]), int(path.address[1])
        address = f"[{host}]:{port}" if path.family == socket.AF_INET6 else f"{host}:{port}"
        trips: list[float] = []
        total, began = 0, time.monotonic()
        try:
            waited_s = DIAL_S
            for _ in range(DIALS - 1):
                _dial(path, trips).close()
            with _dial(path, trips) as sock:
                waited_s = STALL_S
                set_tcp_options(sock)
                sock.settimeout(STALL_S)
                keys = introduce(sock, self._identity, node, "bulk", self._new_keys)
                size_buffer(sock, socket.SO_RCVBUF, encrypted=keys is not None)
                stream, target, buffer = BulkStream(sock, keys), bytearray(peer.MAX_PROBE_BYTES), bytearray()
                # The first probe warms the connection up.
                _probe(stream, node, peer.PROBE_BYTES, target, buffer)
                size, began = peer.PROBE_BYTES, time.monotonic()
                while total < max_bytes and (left_s := max_s - (time.monotonic() - began)) > 0:
                    total += _probe(stream, node, min(size, max_bytes - total), target, buffer)
                    rate = total / max(1e-6, time.monotonic() - began)
                    size = min(peer.MAX_PROBE_BYTES, max(peer.PROBE_BYTES, int(rate * PART * left_s)))
        except (OSError, TokenLakeError) as error:
            reason = f"no answer within {waited_s:g} s" if isinstance(error, TimeoutError) else str(error)
            return PathMeasured(address, min(trips, default=0.0), total, time.monotonic() - began, reason)
        return PathMeasured(address, min(trips), total, time.monotonic() - began, "")


def _dial(path: Endpoint, trips: list[float]) -> socket.socket:
    """Connect, and append the time that it took to `trips`. Raises OSError."""
    sock = socket.socket(path.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(DIAL_S)
        began = time.monotonic()
        sock.connect(path.address)
        trips.append(time.monotonic() - began)
    except BaseException:
        sock.close()
        raise
    return sock


def _probe(stream: BulkStream, node: str, size: int, target: bytearray, buffer: bytearray) -> int:
    """Receive `size` bytes, or as many as a node of an earlier version sends. Returns their number. Raises as
    `BulkStream.fill`."""
    stream.send_frame(peer.Pull("", b"", probe_bytes=size))
    reply = decode(peer.pulled_decoder, stream.read_frame(peer.MAX_FRAME))
    if reply.codes or not 0 < reply.slot_bytes <= peer.MAX_PROBE_BYTES:
        raise ProtocolRefused(f"node {node} answered a probe of {size} bytes with {reply.slot_bytes}")

    def receive(part: memoryview) -> None:
        filled = 0
        while filled < len(part):
            received = stream.sock.recv_into(part[filled:])
            if not received:
                raise ended()
            filled += received

    with memoryview(target) as view:
        stream.fill(view[: reply.slot_bytes], receive, buffer)
    return reply.slot_bytes
