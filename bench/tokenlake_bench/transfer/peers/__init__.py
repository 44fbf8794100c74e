"""Other stores that the pool is compared with, each measured in a process of its own that also starts the store's
servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenlake_bench.transfer.base import Size
from tokenlake_bench.worker import Worker

PEERS = {
    "mooncake": ("mooncake-tcp", "mooncake-shm"),
    "redis": ("redis",),
}
"""The modes in which each peer is measured, by the peer's name on the command line."""


class PeerProcess:
    """A peer as a `System`: a client in another process, which also started the peer's servers."""

    def __init__(self, mode: str, size: Size, python: Path | None) -> None:
        """Starts the process. `python`: an interpreter that has the peer's packages and TokenLake; None: this one.
        Raises `Unreachable`, which names the missing package or server."""
        self.name = mode
        module = f"tokenlake_bench.transfer.peers.{mode.partition('-')[0]}"
        self._worker = Worker(module, mode, size.label, python=str(python or sys.executable))
        try:
            self._rows: list[str] = self._worker.call("start")
        except BaseException:
            self._worker.close()
            raise

    def rows(self) -> Sequence[str]:
        return self._rows

    def sample(self, row: str, turn: int) -> list[float]:
        """Raises `Unreachable` when the process has ended."""
        taken: list[float] = self._worker.call("sample", row=row, turn=turn)
        return taken

    def close(self) -> None:
        self._worker.close()
