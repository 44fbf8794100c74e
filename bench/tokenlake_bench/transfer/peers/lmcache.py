"""LMCache's server over TCP. Run as a module, it is the client process that is measured.

The server's own messages consist of nine native integers and, from the client, a key in 150 bytes. A put has no reply,
so the client asks for the last key after a batch of puts, to know that the server has taken all of them.
"""

from __future__ import annotations

import importlib
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from tokenlake_bench.transfer.base import WINDOWS, Size
from tokenlake_bench.transfer.peers.client import run_peer, server, wait_for_port
from tokenlake_testing.ports import free_port

REQUEST: Final = struct.Struct("9i150s")
REPLY: Final = struct.Struct("9i")
PUT, GET, EXIST = 1, 2, 3
SUCCESS: Final = 200
BINARY: Final = 4
"""Number by which LMCache's server knows the memory format of plain bytes."""
UINT8: Final = 6


class LMCacheStore:
    """One connection to LMCache's server. A batch of requests with small replies is sent as a whole before the replies
    are read."""

    fetch_many = "fetch_tcp"
    fetch_one = "fetch"

    def __init__(self, size: Size) -> None:
        importlib.import_module("lmcache.v1.server")
        port = free_port()
        wait_for_port(port, server(sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)))
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shape = (WINDOWS, size.count, size.segment_bytes)
        self.source = np.ones(shape, np.uint8)
        self.target = np.ones(shape, np.uint8)

    def exist(self, names: Sequence[str]) -> int:
        self._sock.sendall(b"".join(_request(EXIST, name) for name in names))
        return sum(self._reply()[0] == SUCCESS for _ in names)

    def put(self, names: Sequence[str], window: int) -> None:
        for name, segment in zip(names, self.source[window], strict=False):
            self._sock.sendall(_request(PUT, name, len(segment)))
            self._sock.sendall(segment.data)
        if self.exist(names[-1:]) != 1:
            raise RuntimeError("the last put was not stored")

    def get(self, names: Sequence[str], window: int, start: int = 0) -> None:
        for index, name in enumerate(names, start):
            self._sock.sendall(_request(GET, name))
            if self._reply()[:2] != (SUCCESS, self.target.shape[-1]):
                raise RuntimeError(f"{name} was not found")
            self._receive(self.target[window, index].data)

    def remove(self, names: Sequence[str]) -> None:
        """Does nothing: the server has no call that removes segments, so they stay, as they do in normal use of it."""

    def _reply(self) -> tuple[int, ...]:
        head = bytearray(REPLY.size)
        self._receive(memoryview(head))
        return REPLY.unpack(head)

    def _receive(self, into: memoryview) -> None:
        at = 0
        while at < len(into):
            received = self._sock.recv_into(into[at:], 0, socket.MSG_WAITALL)
            if not received:
                raise RuntimeError("the server closed the connection")
            at += received


def _request(command: int, name: str, length: int = 0) -> bytes:
    # The server's key has the fields: model @ world size @ worker @ hash of the chunk @ dtype.
    digest = int.from_bytes(name.encode(), "big")
    key = f"bench@1@0@{digest:x}@uint8".encode()
    return REQUEST.pack(command, length, BINARY, UINT8, 0, length, 0, 0, 0, key.ljust(150))


if __name__ == "__main__":
    run_peer({"lmcache": LMCacheStore})
