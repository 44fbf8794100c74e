"""The daemons with which the pool is measured: one alone, and a pair of an owner and a reader of segments."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

from tokenlake.config import ServerConfig
from tokenlake.errors import Unreachable
from tokenlake.layout import Layout
from tokenlake_bench.transfer.base import WINDOWS, Nodes, Size
from tokenlake_client import Pool
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port

START_S = 60.0
HEADER = 1 << 20
"""Bytes of a region of the arena that are not taken by one window (set) of segments."""
ALONE_WINDOWS = 2 * WINDOWS + 2
"""Size of the memory of the node `alone`, and of `writer`, in windows (equal sets of segments, of which each measured
call moves one): `WINDOWS` that are read, as many for the measured stores, and 2 spare ones."""
WRITER_WINDOWS = ALONE_WINDOWS
READER_WINDOWS = 5
"""Size of the memory of the node `reader` in windows (sets of segments): so few that a fetched window is evicted before
it is read again."""
READER_CACHED = "0.45"


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


class Daemons:
    """The nodes `alone`, `reader` and `writer`. They are started one by one; `close` ends all of them.

    Of two nodes the one whose name sorts first opens the connection. That is the reader, which is started after the
    writer: so no node dials a node that is not running yet.
    """

    def __init__(self, size: Size, nodes: Nodes = "plain") -> None:
        self._layout = layout_of(size)
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-")
        region = size.window_bytes + HEADER
        ports = {name: reserve_port() for name in ("alone", "reader", "writer")}
        pair = ",".join(f"{name}=127.0.0.1:{ports[name]}" for name in ("reader", "writer"))
        windows = {"alone": ALONE_WINDOWS, "reader": READER_WINDOWS, "writer": WRITER_WINDOWS}
        self.nodes = {
            name: Node(
                name,
                Path(self._directory.name),
                {
                    "memory": str(windows[name] * region),
                    "region-size": str(region),
                    "listen": f"127.0.0.1:{port}",
                    # A peer that does not answer counts as dead only after a long time, because this machine may stall.
                    "suspect-ms": "5000",
                    "match-deadline-ms": "1000",
                    # With the default share the reader would keep no cached copies once primary copies fill its memory,
                    # and every repetition reads cached copies.
                    "cached-share": READER_CACHED if name == "reader" else "0.1",
                    "peers": f"alone=127.0.0.1:{port}" if name == "alone" else pair,
                },
            )
            for name, port in ports.items()
        }
        if nodes == "nixl":
            for node in self.nodes.values():
                node.settings |= {"transport": "nixl", "fabric": "trusted"}
        if nodes == "encrypted":
            directory = Path(self._directory.name) / "ca"
            authority, _ = init_ca(directory, ServerConfig().cluster)
            for name, node in self.nodes.items():
                certificate, key = issue(directory, name)
                node.settings |= {"certificate": str(certificate), "key": str(key), "ca": str(authority)}

    def start(self, name: str, peers: int = 0) -> Pool:
        """Start the node and return a client of it, once it serves and is connected with `peers` other nodes."""
        node = self.nodes[name]
        node.start()
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, Unreachable):
                metrics = node.metrics()
                # With NIXL the memory of the other nodes is probed first.
                if min(metrics["tokenlake_peers_connected"], metrics.get("tokenlake_nixl_nodes", peers)) >= peers:
                    return Pool.connect(node.socket, self._layout)
            if not node.running or time.monotonic() > until:
                logs = " | ".join(node.log.read_text()[-1000:] for node in self.nodes.values() if node.log.exists())
                raise Unreachable(f"daemon {name} does not serve: {logs}")
            time.sleep(0.02)

    def close(self) -> None:
        """Close all clients and end all daemons. Idempotent."""
        for node in self.nodes.values():
            node.stop()
        self._directory.cleanup()
