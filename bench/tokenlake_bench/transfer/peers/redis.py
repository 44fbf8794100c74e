"""Redis over TCP, with hiredis as its parser. Run as a module, it is the client process that is measured."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenlake_bench.transfer.base import WINDOWS, Size
from tokenlake_bench.transfer.peers.client import run_peer, server, wait_for_port
from tokenlake_testing.ports import free_port


class RedisStore:
    """A client of a Redis server that writes nothing to disk. SETs are sent in one pipeline and GETs one by one, which
    was faster than the other variants that were tried, such as MSET and MGET. As for every peer, a get ends when its
    bytes are in the target array."""

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
        options |= {"--proto-max-bulk-len": "1gb"}
        process = server(program, *(word for option in options.items() for word in option))
        wait_for_port(port, process)
        self._client = module.Redis(host="127.0.0.1", port=port, protocol=2)
        shape = (WINDOWS, size.count, size.segment_bytes)
        self.source = np.ones(shape, np.uint8)
        self.target = np.ones(shape, np.uint8)

    def exist(self, names: Sequence[str]) -> int:
        return int(self._client.exists(*names))

    def put(self, names: Sequence[str], window: int) -> None:
        segments = self.source[window, : len(names)]
        pipeline = self._client.pipeline(transaction=False)
        for name, segment in zip(names, segments, strict=True):
            pipeline.set(name, segment.data)
        pipeline.execute()

    def get(self, names: Sequence[str], window: int, start: int = 0) -> None:
        for index, name in enumerate(names, start):
            value = self._client.get(name)
            if value is None:
                raise RuntimeError(f"{name} was not found")
            self.target[window, index] = np.frombuffer(value, np.uint8)

    def remove(self, names: Sequence[str]) -> None:
        self._client.delete(*names)


if __name__ == "__main__":
    run_peer({"redis": RedisStore})
