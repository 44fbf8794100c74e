"""A proxy before a node's port that changes the encrypted records which the node sends on bulk connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import HEADER_BYTES, peer
from tokenlake.wire.frames import decode
from tokenlake.wire.records import OVERHEAD_BYTES

Change = Callable[[int, bytes], list[bytes]]
"""Returns the records to forward in place of a record, which is given with its number."""


class Meddler:
    """Forwards connections from its `port` to the port `target`. A context manager."""

    def __init__(self) -> None:
        self.target = 0
        self.change: Change | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._bulk: list[socket.socket] = []

    def __enter__(self) -> Meddler:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def renew(self) -> None:
        """End the bulk connections that are open, so that the next fetch opens another one."""
        while self._bulk:
            with contextlib.suppress(OSError):
                self._bulk.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            far = socket.create_connection(("127.0.0.1", self.target))
            self._open.append(far)
            first = _exactly(near, HEADER_BYTES)
            size = int.from_bytes(first, "little")
            encrypted = False
            if size <= peer.HANDSHAKE_BYTES:
                body = _exactly(near, size)
                first += body
                with contextlib.suppress(ProtocolRefused):
                    encrypted = isinstance(decode(peer.handshake_decoder, body), peer.OpenConnection)
            far.sendall(first)
            up = threading.Thread(target=_pump, args=(near, far), daemon=True)
            up.start()
            try:
                if encrypted:
                    self._bulk.append(near)
                    self._records(far, near)
                else:
                    _pump(far, near)
            finally:
                for sock in (near, far):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                up.join()
                near.close()
                far.close()

    def _records(self, source: socket.socket, sink: socket.socket) -> None:
        welcome = _exactly(source, HEADER_BYTES)
        sink.sendall(welcome + _exactly(source, int.from_bytes(welcome, "little")))
        number = 0
        while True:
            length = _exactly(source, HEADER_BYTES)
            whole = length + _exactly(source, int.from_bytes(length, "little") + OVERHEAD_BYTES - HEADER_BYTES)
            for record in [whole] if self.change is None else self.change(number, whole):
                sink.sendall(record)
            number += 1


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
