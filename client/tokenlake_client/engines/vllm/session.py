"""A rank's connection to the session that the scheduler's side opened. Imports no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.pool import Pool


class RankSession:
    """A rank's membership in the scheduler's session: joins the session that the plan of a step names, and leaves the
    previous one. Thread-safe."""

    def __init__(self, join: Callable[[int], Pool], report: Callable[[str, BaseException], None]) -> None:
        """`join` opens a connection in a session. `report` is called with the operation that failed and its error."""
        self._join = join
        self._report = report
        self._lock = threading.Lock()
        self._target = 0, 0
        self._connection = Connection(None, report)
        self._closed = False

    def get(self, session: int, incarnation: int, wait_s: float) -> Pool | None:
        """The connection to the daemon with this incarnation in its session `session`; a number of 0 stands for none.
        Joins the session if necessary; None if that has not succeeded within `wait_s` seconds: the attempt then
        continues in the background."""
        target, previous = (session, incarnation), None
        with self._lock:
            if not (session and incarnation) or self._closed:
                return None
            pool = self._connection.pool
            if target != self._target or (pool is not None and _session_of(pool) != target):
                previous = self._connection
                connect = partial(self._join, session)
                self._target, self._connection = target, Connection(connect, self._report, at_once=False)
            connection = self._connection
        if previous is not None:
            previous.close()
        pool = connection.get(wait_s)
        return pool if pool is not None and _session_of(pool) == target else None

    def close(self) -> None:
        """Leave the session. Never raises."""
        with self._lock:
            self._closed = True
        self._connection.close()


def _session_of(pool: Pool) -> tuple[int, int]:
    return pool.engine.session, pool.engine.incarnation
