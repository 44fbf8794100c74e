"""Other stores, each in a process of its own that also starts its servers."""

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
"""Modes of each peer, by its name on the command line."""


def start_peer(mode: str, size: Size, python: Path | None) -> PeerProcess:
    """Start the process of a peer in one of its modes. `python`: an interpreter that has the peer's packages and
    TokenLake; None: this one. Raises `Unreachable`, which names the missing package or server."""
    return PeerProcess(mode, size, str(python or sys.executable))
