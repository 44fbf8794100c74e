"""A rank's connection to the session that the scheduler's side opened. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tokenlake_client.pool import Pool

RETRY_S = 1.0
"""Seconds until a session that could not be joined is tried again."""


class RankSession:
    """A rank's membership in the scheduler's session: joins the session that the plan of a step names, and leaves the
    previous one. Thread-safe."""

    def __init__(self, join: Callable[[int], Pool], report: Callable[[str, BaseException], None]) -> None:
        """`join` opens a connection in a session. `report` is called with the operation that failed and its error."""
        self._join = join
        self._report = report
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._attempt: threading.Thread | None = None
        self._failed: tuple[int, int] | None = None
        self._retry_at = 0.0
        self._closed = False

    def get(self, session: int, incarnation: int, wait_s: float) -> Pool | None:
        """The connection to the daemon with this incarnation in its session `session`. Joins the session if necessary;
        None if that has not succeeded within `wait_s` seconds: the attempt then continues in the background."""
        target = (session, incarnation)
        with self._lock:
            if not session or self._closed:
                return None
            if self._pool is not None and (self._pool.engine.session, self._pool.engine.incarnation) == target:
                return self._pool
            if self._failed == target and time.monotonic() < self._retry_at:
                return None
            attempt = self._attempt
            if attempt is None or not attempt.is_alive():
                attempt = threading.Thread(target=self._try, args=(target,), name="tokenlake-join", daemon=True)
                try:
                    attempt.start()
                except RuntimeError:
                    # No thread can be started: the engine goes on without the pool.
                    return None
                self._attempt = attempt
        attempt.join(wait_s)
        with self._lock:
            pool = self._pool
            return pool if pool is not None and (pool.engine.session, pool.engine.incarnation) == target else None

    def close(self) -> None:
        """Leave the session. Never raises."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            self._leave(pool)

    def _leave(self, pool: Pool) -> None:
        try:
            pool.close()
        except Exception as error:
            self._report("leaving the scheduler's session", error)

    def _try(self, target: tuple[int, int]) -> None:
        try:
            pool = self._join(target[0])
        except Exception as error:
            self._report("joining the scheduler's session", error)
            with self._lock:
                self._failed, self._retry_at = target, time.monotonic() + RETRY_S
            return
        with self._lock:
            previous, self._pool = (pool, None) if self._closed else (self._pool, pool)
        if previous is not None:
            self._leave(previous)
