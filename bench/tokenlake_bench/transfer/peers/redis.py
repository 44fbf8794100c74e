"""Redis over TCP, with hiredis for its parser. Run as a module: a client of it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenlake_bench.transfer.base import WINDOWS, Size
from tokenlake_bench.transfer.peers.client import free_port, run_peer, server, wait_for_port

__all__ = ["RedisStore"]

IO_THREADS = "2"


class RedisStore:
    """MSET and MGET, nothing on disk. A get is whole when its bytes are in the target, as everybody's."""

    fetch_many = "fetch_tcp"
    fetch_one = "fetch"

    def __init__(self, size: Size) -> None:
        module: Any = importlib.import_module("redis")
        importlib.import_module("hiredis")
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server: apt-get install redis-server")
        port = free_port()
        options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
        options |= {"--io-threads": IO_THREADS, "--proto-max-bulk-len": "1gb"}
        process = server(program, *(word for option in options.items() for word in option))
        wait_for_port(port, process)
        self._client = module.Redis(host="127.0.0.1", port=port, protocol=2)
        shape = (WINDOWS, size.count, size.segment_bytes)
        self.source = np.ones(shape, np.uint8)
        self.target = np.ones(shape, np.uint8)

    def exist(self, names: Sequence[str]) -> int:
        """See `Store`."""
        return int(self._client.exists(*names))

    def put(self, names: Sequence[str], window: int) -> None:
        """See `Store`."""
        segments = self.source[window, : len(names)]
        if not self._client.mset({name: segment.data for name, segment in zip(names, segments, strict=True)}):
            raise RuntimeError("MSET refused")

    def get(self, names: Sequence[str], window: int, start: int = 0) -> None:
        """See `Store`."""
        for index, value in enumerate(self._client.mget(names), start):
            if value is None:
                raise RuntimeError("MGET did not find all segments")
            self.target[window, index] = np.frombuffer(value, np.uint8)

    def remove(self, names: Sequence[str]) -> None:
        """See `Store`."""
        self._client.delete(*names)


if __name__ == "__main__":
    run_peer({"redis": RedisStore})
