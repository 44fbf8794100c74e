"""Measurement of a store that has names, gets and puts; a `Store` contains the parts that differ between peers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake_bench.transfer.base import FAST, MATCH, SIZES, WINDOWS, Size
from tokenlake_bench.transfer.windows import fill_windows, segment_names
from tokenlake_bench.worker import serve
from tokenlake_testing.children import start_child

KEPT_STORES = WINDOWS
"""Number of further stores after which stored segments are removed, so that the stores use as much memory in rotation
as those of the pool."""
FILLERS = WINDOWS + 2
"""Number of windows (sets of segments) that fill a peer's memory in addition to those that are read."""
START_S = 30.0
PAUSE_S = 0.001
"""Seconds of pause between two calls, the same as between the pool's matches."""


class Store(Protocol):
    """A client of a peer. Its attributes name the measurements after the path of the bytes: `fetch_many` is "fetch_tcp"
    for a peer over TCP, "copy" for one with shared memory."""

    fetch_many: str
    fetch_one: str
    source: NDArray[np.uint8]
    """Array from which puts read, with the shape [WINDOWS, count, segment_bytes]."""
    target: NDArray[np.uint8]
    """Array into which gets write, with the shape [WINDOWS, count, segment_bytes]."""

    def exist(self, names: Sequence[str]) -> int:
        """Number of these names that the store has, asked in one batch."""

    def put(self, names: Sequence[str], window: int) -> None:
        """Store segments of window number `window` of `source` under these names, in one batch. Raises RuntimeError."""

    def get(self, names: Sequence[str], window: int, start: int = 0) -> None:
        """Read the segments of these names into a window of `target`, from segment `start` on, in one batch. Raises
        RuntimeError."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove the segments of these names, in one batch."""


class _Rows:
    def __init__(self, store: Store, size: Size) -> None:
        self._store = store
        self._size = size
        self._stored = 0
        self._kept: deque[list[str]] = deque()
        fill_windows(store.source)
        store.target[:] = 1
        for window in range(WINDOWS):
            store.put(segment_names("read", window, size.count), window)
        # The peer's memory is filled once, so that none of its pages is touched for the first time while the clock
        # runs.
        fillers = [segment_names("old", number, size.count) for number in range(FILLERS)]
        for number, names in enumerate(fillers):
            store.put(names, number % WINDOWS)
        for names in fillers:
            store.remove(names)
        # Every window is read once before the clock runs, because a process maps shared pages at its first access.
        for window in range(WINDOWS):
            store.get(segment_names("read", window, size.count), window)
        self.rows: dict[str, Callable[[int], list[float]]] = {
            f"{store.fetch_many}_{size.many}": lambda turn: self._get(turn, 0, size.count),
            f"store_{size.many}": lambda turn: [self._store_names(size.count, turn % WINDOWS)],
            f"store_{size.one}": lambda turn: [self._store_names(1, turn % WINDOWS)],
            f"{store.fetch_one}_{size.one}": lambda turn: self._get(
                turn + WINDOWS // 2, turn % size.count, turn % size.count + 1
            ),
        }
        if size.key_rows():
            self.rows[MATCH] = self._exist

    def _exist(self, turn: int) -> list[float]:
        names = segment_names("read", turn % WINDOWS, self._size.count)
        taken = []
        for _ in range(FAST):
            began = time.perf_counter()
            found = self._store.exist(names)
            taken.append(time.perf_counter() - began)
            if found != len(names):
                raise RuntimeError(f"{found} of {len(names)} were found")
            time.sleep(PAUSE_S)
        return taken

    def _get(self, turn: int, start: int, stop: int) -> list[float]:
        window = turn % WINDOWS
        names = segment_names("read", window, self._size.count)[start:stop]
        target = self._store.target[window, start:stop]
        target[:, 0] += 1
        began = time.perf_counter()
        self._store.get(names, window, start)
        took = time.perf_counter() - began
        if not np.array_equal(target, self._store.source[window, start:stop]):
            raise RuntimeError("segments have wrong bytes")
        return [took]

    def _store_names(self, count: int, window: int) -> float:
        self._stored += 1
        names = segment_names(f"store-{count}", self._stored, count)
        began = time.perf_counter()
        self._store.put(names, window)
        took = time.perf_counter() - began
        self._kept.append(names)
        if len(self._kept) > KEPT_STORES:
            self._store.remove(self._kept.popleft())
        return took


def run_peer(modes: dict[str, Callable[[Size], Store]]) -> None:
    """The main function of the client process: `python -m MODULE MODE SIZE`."""
    size = next(size for size in SIZES if size.label == sys.argv[2])
    rows: dict[str, Callable[[int], list[float]]] = {}

    def start() -> list[str]:
        rows.update(_Rows(modes[sys.argv[1]](size), size).rows)
        return list(rows)

    try:
        serve({"start": start, "sample": lambda row, turn: rows[row](turn)})
    finally:
        # Kills the process group, which contains the peer's servers and this process, whose client may have threads
        # that never end.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def server(*command: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a server of the system that the pool is compared with, in the process group of this process; the group is
    killed as a whole. The server writes to this process's log."""
    return start_child(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env={**os.environ, **environment})


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens on the port. Raises RuntimeError."""
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{process.args!r} does not listen on port {port}: {error}") from error
            time.sleep(0.05)
