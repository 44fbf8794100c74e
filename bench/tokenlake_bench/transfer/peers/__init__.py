"""Other stores that the pool is compared with, each measured in a process of its own that also starts the store's
servers."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenlake_bench.transfer.base import Size
from tokenlake_bench.transfer.peers.process import PeerProcess

__all__ = ["PEERS", "start_peer"]

PEERS = {
    "mooncake": ("mooncake-tcp", "mooncake-shm"),
    "redis": ("redis",),
    "lmcache": ("lmcache",),
}
"""The modes in which each peer is measured, by the peer's name on the command line."""


def start_peer(mode: str, size: Size, python: Path | None) -> PeerProcess:
    """Start the client process of a peer in one of its modes. `python`: an interpreter that has the peer's packages and
    TokenLake; None: this one. Raises `Unreachable`, which names the missing package or server."""
    return PeerProcess(mode, size, str(python or sys.executable))
