"""A load on one daemon, from a separate process: it repeats fetches of segments of another node, and stores of new
segments. This module, run as a program, is that process."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench.transfer.base import SIZES, WINDOWS, Size
from tokenlake_bench.transfer.windows import keys_of
from tokenlake_bench.worker import Worker, serve
from tokenlake_client import Pool

STORED_AT_A_TIME = 16
"""Number of segments per store of the load, far below the number of segments being written at which a daemon refuses
stores."""
BETWEEN_STORES_S = 0.01
SETTLE_S = 0.05
PATIENCE_S = 1.0
CALL_S = 2.0


def layout_of(size: Size) -> Layout:
    """A layout whose segments have the given size in bytes: 256 tokens, 32 layers, 8 KV heads."""
    dimension = size.segment_bytes // (32 * 8 * 256 * 2 * 2)
    return Layout(
        model_id=f"bench-{size.label}",
        weights_digest="00",
        dtype="bfloat16",
        layers=32,
        kv_heads=8,
        key_dim=dimension,
        value_dim=dimension,
        position="none",
    )


class Load:
    """A load on one daemon during a measurement, as a context manager: a separate process fetches and stores segments
    while the context is open."""

    def __init__(self, socket: Path, label: str) -> None:
        """Starts the process of the load. `socket`: path of the local socket of the daemon that is loaded; `label`: the
        segment size, as in `SIZES`. The process fetches the segments stored at the other node, which the
        measurements also fetch."""
        self._worker = Worker("tokenlake_bench.transfer.load", str(socket), label)
        self._worker.call("ready")

    def __enter__(self) -> None:
        self._worker.call("go")

    def __exit__(self, *error: object) -> None:
        done = self._worker.call("stop")
        if not min(done) and error[0] is None:
            raise TokenLakeError(f"the load did not run: {done[0]} fetches, {done[1]} stores")

    def close(self) -> None:
        """End the process of the load."""
        self._worker.close()


class _Running:
    def __init__(self, socket: Path, label: str) -> None:
        self._size = next(size for size in SIZES if size.label == label)
        self._pool = Pool.connect(socket, layout_of(self._size))
        self._on = threading.Event()
        self._idle = threading.Semaphore(2)
        self._numbers = itertools.count()
        self._done = [0, 0]
        for number, step in enumerate((self._fetch, self._store)):
            threading.Thread(target=self._repeat, args=(number, step), daemon=True).start()

    def ready(self) -> None:
        """Does nothing. It is called first: its reply shows that the process of the load is connected to the daemon."""

    def go(self) -> None:
        """Start the two threads of the load: one repeats fetches, the other repeats stores, until `stop`. Returns after
        `SETTLE_S` seconds, when both are under way."""
        self._done = [0, 0]
        self._on.set()
        time.sleep(SETTLE_S)

    def stop(self) -> list[int]:
        """Stop the threads that fetch and store, each at the end of its present call. Returns (number of fetches,
        number of stores) completed since `go`."""
        self._on.clear()
        for _ in range(2):
            self._idle.acquire()
        for _ in range(2):
            self._idle.release()
        return self._done

    def _repeat(self, number: int, step: Callable[[], bool]) -> None:
        while True:
            self._on.wait()
            with self._idle, contextlib.suppress(TokenLakeError):
                self._done[number] += step()

    def _fetch(self) -> bool:
        keys = keys_of("read", next(self._numbers) % WINDOWS, self._size.count)
        with self._pool.match(keys, deadline_s=CALL_S) as lease:
            return lease.local_hits < lease.hits and len(lease.fetch(deadline_s=CALL_S)) > 0

    def _store(self) -> bool:
        keys = keys_of("load", next(self._numbers), STORED_AT_A_TIME)
        with self._pool.store(keys, patience=PATIENCE_S) as write:
            for index, slot in write.slots:
                slot[:] = np.uint8(index)
        time.sleep(BETWEEN_STORES_S)
        return Code.COMMITTED in write.codes


if __name__ == "__main__":
    running = _Running(Path(sys.argv[1]), sys.argv[2])
    serve({"ready": running.ready, "go": running.go, "stop": running.stop})
