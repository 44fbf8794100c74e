"""A proxy in front of a daemon's socket. A test tells it to slow down, cut or flip what it forwards, also on open
connections."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import HEADER_BYTES, Code, peer
from tokenlake.wire.frames import decode

CHUNK = 64 << 10
TICK_S = 0.01
MAX_DESCRIPTORS = 4

Direction = Literal["up", "down"]
"""Up: from the process that connected to the one that accepted."""
Part = Literal["hello", "header", "body", "raw"]
"""The part of the stream: its first frame, a frame's length, its MessagePack, or the bytes of segments that follow a
`Pulled`."""
Address = Path | tuple[str, int]


@dataclass(frozen=True)
class Trickle:
    """Forward `nbytes` every 10 ms in one direction."""

    direction: Direction
    nbytes: int


@dataclass(frozen=True)
class Cut:
    """Cut both directions within the next `part`."""

    direction: Direction
    part: Part


@dataclass(frozen=True)
class Flip:
    """Flip one bit in one of `every` pieces of `part`."""

    direction: Direction
    part: Part
    every: int = 1


@dataclass(frozen=True)
class Drop:
    """Forward nothing on bulk connections in these directions, or everything but `part`; other connections go on."""

    directions: tuple[Direction, ...]
    part: Part | None = None


Fault = Trickle | Cut | Flip | Drop


class _Walk:
    """The position of a stream within its frames."""

    def __init__(self) -> None:
        self._part: Part = "header"
        self._left = HEADER_BYTES
        self._kept = b""
        self._greeted = False
        self.hello = b""
        """The body of the first frame, once it is complete."""

    def split(self, data: bytes) -> Iterator[tuple[Part, bytes]]:
        """The pieces of `data`, none of which reaches beyond the end of its part."""
        while data:
            piece, data = data[: self._left], data[self._left :]
            part: Part = self._part if self._greeted else "hello"
            self._left -= len(piece)
            self._kept += piece if part != "raw" else b""
            if not self._left:
                self._next()
            yield part, piece

    def _next(self) -> None:
        kept, self._kept = self._kept, b""
        if self._part == "header":
            self._part, self._left = "body", int.from_bytes(kept, "little")
            return
        self._part, self._left = "header", HEADER_BYTES
        self.hello = self.hello or kept
        self._greeted = True
        raw = _raw_bytes(kept)
        if raw:
            self._part, self._left = "raw", raw


def _is_bulk(hello: bytes) -> bool:
    """Is this the first frame of a bulk connection between daemons?"""
    try:
        message = decode(peer.handshake_decoder, hello)
    except ProtocolRefused:
        return False
    return isinstance(message, peer.PeerHello) and message.purpose == "bulk"


def _raw_bytes(body: bytes) -> int:
    """The number of raw bytes that follow this frame."""
    try:
        pulled = decode(peer.pulled_decoder, body)
    except ProtocolRefused:
        return 0
    # The answer to a request for no segments has as many bytes as one segment.
    return pulled.slot_bytes * (pulled.codes.count(Code.LOCAL) if pulled.codes else 1)


class Proxy:
    """Listens at `at` (a path, or a port of loopback) and connects to `target`. A context manager. Without a fault it
    only forwards, descriptors included."""

    def __init__(self, target: Address, at: Path | None = None, seed: int = 0) -> None:
        self.target = target
        """Connections that come while nothing listens there are closed."""
        self._draw = random.Random(seed)
        if at is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address: Address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(at))
            self._listener.listen()
            self.address = at
        self.fault: Fault | None = None
        self.done = 0
        """Cuts made, bits flipped, chunks trickled."""
        self._open: list[socket.socket] = []

    @property
    def port(self) -> int:
        """The port of a TCP address."""
        assert isinstance(self.address, tuple)
        return self.address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        _end(self._listener)
        self.cut()

    def cut(self) -> None:
        """End the connections that are open."""
        while self._open:
            # The threads of these connections close the sockets.
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = _connect(self.target)
                except OSError:
                    near.close()
                    continue
                if isinstance(self.target, tuple):
                    for sock in (near, far):
                        # Without this option each small frame could wait 40 ms for an acknowledgement.
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += (near, far)
                up = _Walk()
                for direction, walk, source, sink in (("up", up, near, far), ("down", _Walk(), far, near)):
                    arguments = (direction, walk, up, source, sink)
                    threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, direction: Direction, walk: _Walk, up: _Walk, source: socket.socket, sink: socket.socket) -> None:
        """Forward one direction of a connection. `walk`: its position; `up`: the position of the direction up, which
        begins with the hello of the process that connected."""
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, CHUNK, MAX_DESCRIPTORS)
                if not data:
                    break
                try:
                    pieces = list(walk.split(data))
                    fault = self.fault
                    dropping = isinstance(fault, Drop) and direction in fault.directions and _is_bulk(up.hello)
                    for part, piece in pieces:
                        if dropping and isinstance(fault, Drop) and fault.part in (None, part):
                            self.done += 1
                            continue
                        self._pass(direction, part, piece, sink, descriptors)
                        _close(descriptors)
                        descriptors = []
                finally:
                    _close(descriptors)
        _end(source)
        _end(sink)

    def _pass(
        self, direction: Direction, part: Part, piece: bytes, sink: socket.socket, descriptors: list[int]
    ) -> None:
        fault = self.fault
        if fault is None or isinstance(fault, Drop) or fault.direction != direction:
            _send(sink, piece, descriptors)
            return
        match fault:
            case Trickle():
                self.done += 1
                while piece and self.fault is fault:
                    _send(sink, piece[: fault.nbytes], descriptors)
                    descriptors, piece = [], piece[fault.nbytes :]
                    time.sleep(TICK_S)
            case Cut() if part == fault.part and len(piece) > 1:
                self.done += 1
                self.fault = None
                _send(sink, piece[: len(piece) // 2], [])
                raise ConnectionAbortedError
            case Flip() if part == fault.part and not self._draw.randrange(fault.every):
                self.done += 1
                flipped = bytearray(piece)
                flipped[self._draw.randrange(len(piece))] ^= 1 << self._draw.randrange(8)
                piece = bytes(flipped)
        if piece:
            _send(sink, piece, descriptors)


def _connect(target: Address) -> socket.socket:
    if isinstance(target, tuple):
        return socket.create_connection(target)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(target))
    except OSError:
        sock.close()
        raise
    return sock


def _send(sink: socket.socket, data: bytes, descriptors: list[int]) -> None:
    if descriptors:
        data = data[socket.send_fds(sink, [data], descriptors) :]
    sink.sendall(data)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
