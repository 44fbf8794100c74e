"""Bare TCP transfers of given sizes to another process and back: the ceiling for queries that are shipped over the
network."""

from __future__ import annotations

import multiprocessing
import socket
import struct
from typing import Final

from tokenlake_testing.children import end_with_parent

HEADER: Final = struct.Struct("<QQ")
MOST_BYTES: Final = 64 << 20


class Echo:
    """The process at the other end of the bare TCP transfers, which answers each message with the requested number of
    bytes; `close` ends it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_serve, args=(address,), daemon=True)
            self._process.start()
            self._sock, _ = listener.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(bytearray(MOST_BYTES))

    def exchange(self, there: int, back: int) -> None:
        """Send `there` bytes to the other process and wait until `back` bytes of its answer are received."""
        self._sock.sendmsg([HEADER.pack(there, back)])
        self._sock.sendall(self._memory[:there])
        _receive(self._sock, self._memory[:back])

    def close(self) -> None:
        """End the other process. Idempotent."""
        self._sock.close()
        self._process.join()


def _serve(address: tuple[str, int]) -> None:
    end_with_parent()
    memory = memoryview(bytearray(MOST_BYTES))
    header = memoryview(bytearray(HEADER.size))
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(sock, header):
            there, back = HEADER.unpack(header)
            _receive(sock, memory[:there])
            sock.sendall(memory[:back])


def _receive(sock: socket.socket, target: memoryview) -> bool:
    """Receive bytes until `target` is full. Returns False if the stream ends before."""
    done = 0
    while done < len(target):
        count = sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
        if not count:
            return False
        done += count
    return True
