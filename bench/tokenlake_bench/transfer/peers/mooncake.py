"""Mooncake's store, whose segments lie in another process: copied over TCP, or through shared memory.

Run as a module, it is the client process that is measured; it also starts the store's servers.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenlake_bench.transfer.base import WINDOWS, Size
from tokenlake_bench.transfer.peers.client import FILLERS, run_peer, server, wait_for_port
from tokenlake_testing.ports import free_port

SEGMENT_WINDOWS = WINDOWS + FILLERS + 2

LOCAL_BUFFER = 16 << 20
TCP = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


class MooncakeStore:
    """A client of Mooncake's store. In both modes the stored segments are in a process `mooncake_client`, as on a node
    where they outlive the engines."""

    def __init__(self, size: Size, *, shared: bool) -> None:
        """`shared`: True if put and get use memory that is shared with the process that has the segments; otherwise
        they use TCP."""
        self.fetch_many = "copy" if shared else "fetch_tcp"
        self.fetch_one = "copy" if shared else "fetch"
        self._size = size
        os.environ.update(TCP)
        module: Any = importlib.import_module("mooncake.store")
        master, node = _start_servers(Path(str(module.__file__)).parent, SEGMENT_WINDOWS * size.window_bytes)
        self._store = module.MooncakeDistributedStore()
        nbytes = 2 * WINDOWS * size.window_bytes
        if shared:
            pool = nbytes + (64 << 20)
            _check(self._store.setup_dummy(pool, LOCAL_BUFFER, f"127.0.0.1:{node}"), "setup_dummy")
            address = int(self._store.alloc_from_mem_pool(nbytes))
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        else:
            _check(
                self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, LOCAL_BUFFER, "tcp", "", f"127.0.0.1:{master}"),
                "setup",
            )
            memory = np.ones(nbytes, np.uint8)
            address = memory.ctypes.data
        _check(self._store.register_buffer(address, nbytes), "register_buffer")
        shape = (2, WINDOWS, size.count, size.segment_bytes)
        self.source, self.target = memory.reshape(shape)

    def exist(self, names: Sequence[str]) -> int:
        return int(self._store.batch_is_exist(names).count(1))

    def put(self, names: Sequence[str], window: int) -> None:
        address, size = self.source[window].ctypes.data, self._size.segment_bytes
        places = [address + index * size for index in range(len(names))]
        if any(self._store.batch_put_from(names, places, [size] * len(names))):
            raise RuntimeError("batch_put_from refused segments")

    def get(self, names: Sequence[str], window: int, start: int = 0) -> None:
        address, size = self.target[window, start].ctypes.data, self._size.segment_bytes
        places = [address + index * size for index in range(len(names))]
        if set(self._store.batch_get_into(names, places, [size] * len(names))) != {size}:
            raise RuntimeError("batch_get_into did not find all segments")

    def remove(self, names: Sequence[str]) -> None:
        self._store.batch_remove(names, True)


def _start_servers(package: Path, segment_bytes: int) -> tuple[int, int]:
    """Starts Mooncake's master and the process of the node. Returns the ports of both."""
    master, node = free_port(), free_port()
    process = server(
        str(package / "mooncake_master"),
        "-rpc_address=127.0.0.1",
        f"-rpc_port={master}",
        f"-metrics_port={free_port()}",
        "-rpc_thread_num=2",
        "-default_kv_lease_ttl=600000",
        # Evictions begin only when the memory is full, because the segments to read were stored first and would be
        # evicted first.
        "-eviction_high_watermark_ratio=1.0",
    )
    wait_for_port(master, process)
    process = server(
        str(package / "mooncake_client"),
        "-host=127.0.0.1",
        f"-port={node}",
        f"-global_segment_size={segment_bytes}",
        f"-master_server_address=127.0.0.1:{master}",
        "-metadata_server=P2PHANDSHAKE",
        "-protocol=tcp",
        "-threads=2",
    )
    wait_for_port(node, process)
    return master, node


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} answered {code}")


if __name__ == "__main__":
    run_peer(
        {
            "mooncake-tcp": lambda size: MooncakeStore(size, shared=False),
            "mooncake-shm": lambda size: MooncakeStore(size, shared=True),
        }
    )
