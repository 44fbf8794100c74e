"""Logs each change of the state of the connection to the pool."""

from __future__ import annotations

import enum
import logging

from tokenlake_client.pool import Pool


class _State(enum.Enum):
    NEVER_CONNECTED = enum.auto()
    CONNECTED = enum.auto()
    SILENT = enum.auto()
    LOST = enum.auto()


class PoolStatus:
    """Logs when the connection to the daemon is made, lost, silent or back. For one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._state = _State.NEVER_CONNECTED

    def update(self, pool: Pool | None, *, silent: bool) -> None:
        """Log the state of the connection to the daemon if it has changed since the last call. `pool`: the connection,
        None before the first one. `silent`: the daemon owes an answer that is overdue."""
        state = _state_of(pool, silent=silent)
        if pool is None or state is self._state:
            return
        previous, self._state = self._state, state
        if state is _State.LOST:
            self._logger.warning("TokenLake: lost the daemon at %s; serving without the pool", pool.socket)
        elif state is _State.SILENT:
            self._logger.warning(
                "TokenLake: the daemon at %s does not answer; serving without the pool until it does", pool.socket
            )
        elif previous is _State.NEVER_CONNECTED:
            self._logger.info("TokenLake: connected to the pool: node %s at %s", pool.node, pool.socket)
        else:
            self._logger.info("TokenLake: the daemon at %s is back; using the pool again", pool.socket)


def _state_of(pool: Pool | None, *, silent: bool) -> _State:
    if pool is None:
        return _State.NEVER_CONNECTED
    if not pool.connected:
        return _State.LOST
    return _State.SILENT if silent else _State.CONNECTED
