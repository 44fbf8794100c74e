"""A peer (another store), measured through its client process, as a `System`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake_bench.transfer.base import Size
from tokenlake_bench.transfer.worker import Worker


class PeerProcess:
    """The client of a peer that runs in another process, which also started the peer's servers."""

    def __init__(self, mode: str, size: Size, python: str) -> None:
        """Starts the client process. Raises `Unreachable` when the peer does not start on this machine."""
        self.name = mode
        module = f"tokenlake_bench.transfer.peers.{mode.partition('-')[0]}"
        self._worker = Worker(module, mode, size.label, python=python)
        try:
            self._rows: list[str] = self._worker.call("start")
        except BaseException:
            self._worker.close()
            raise

    def rows(self) -> Sequence[str]:
        """Names of the kinds of calls that the peer can make; see `System`."""
        return self._rows

    def sample(self, row: str, turn: int) -> list[float]:
        """Let the client process make one or several calls of a kind. Returns the seconds of each. Raises `Unreachable`
        when that process has ended. See `System`."""
        taken: list[float] = self._worker.call("sample", row=row, turn=turn)
        return taken

    def close(self) -> None:
        """End the client process and with it the peer's servers; see `System`."""
        self._worker.close()
