"""The machine's own rates of copies and transfers, measured alternately with the systems."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from tokenlake_bench.transfer.base import COPY_CEILING, COPY_CEILING_2, WINDOWS, WIRE_CEILING
from tokenlake_bench.transfer.windows import Windows
from tokenlake_testing.children import end_with_parent

SOCKET_BUFFER = 4 << 20
MAX_IOVEC = 64
STOP_S = 5.0


class Ceilings:
    """The machine's own rates as a `System`: numpy copies within memory, and bare transfers over TCP from `sendmsg` in
    another process to `recv_into` in this one."""

    name = "ceiling"

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._wire = _Wire(windows)
        self._threads = ThreadPoolExecutor(2)

    def rows(self) -> Sequence[str]:
        return (COPY_CEILING, COPY_CEILING_2, WIRE_CEILING)

    def sample(self, row: str, turn: int) -> list[float]:
        window = turn % WINDOWS
        source, target = self._windows.source[window], self._windows.target[window]
        began = time.perf_counter()
        if row == COPY_CEILING:
            _copy(target, source)
        elif row == COPY_CEILING_2:
            half = len(source) // 2
            halves = (slice(None, half), slice(half, None))
            list(self._threads.map(lambda part: _copy(target[part], source[part]), halves))
        else:
            self._wire.receive(window, target)
        return [time.perf_counter() - began]

    def close(self) -> None:
        self._wire.close()
        self._threads.shutdown()


def _copy(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy the segments of `source` to `target` one by one, as the pool's calls copy them."""
    for into, segment in zip(target, source, strict=True):
        np.copyto(into, segment)


class _Wire:
    """A second process that sends 128 MiB of segments (one window) for each byte that it receives."""

    def __init__(self, windows: Windows) -> None:
        """Forks the sending process, which so shares the pages of the source memory. Must be called before any thread
        is started."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._process = multiprocessing.get_context("fork").Process(
                target=_send_windows, args=(server.getsockname()[1], windows.source), daemon=True
            )
            self._process.start()
            server.settimeout(60)
            self._sock, _ = server.accept()
        self._sock.settimeout(60)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        _receive(self._sock, memoryview(bytearray(1)))

    def receive(self, window: int, target: NDArray[np.uint8]) -> None:
        """Receive one window of segments into `target`, one segment at a time."""
        self._sock.sendall(bytes([window]))
        for segment in target:
            _receive(self._sock, segment.data)

    def close(self) -> None:
        """Close the connection, at whose end the sending process ends."""
        self._sock.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _receive(sock: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        received = sock.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the sender of the bare loop ended")
        at += received


def _send_windows(port: int, data: NDArray[np.uint8]) -> None:
    """The main function of the sending process: serve until the connection ends. The first byte that it sends signals
    that it is ready."""
    end_with_parent()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        sock.sendall(b"\0")
        while asked := sock.recv(1):
            buffers = [segment.data for segment in data[asked[0]]]
            while buffers:
                sent = sock.sendmsg(buffers[:MAX_IOVEC])
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = buffers[0][sent:]
