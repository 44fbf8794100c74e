"""A rank's place in the session that the scheduler opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["Membership", "SessionPool"]

WAIT_S = 0.05
"""How long a step waits for a session that it is about to join; joining goes on behind it."""


RETRY_S = 1.0
"""Between attempts to join one session."""


class SessionPool(Protocol):
    """What is used of a pool here."""

    @property
    def session(self) -> int:
        """Another one after the daemon restarted."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the daemon."""
        ...

    def close(self) -> None:
        """Leave the session."""
        ...


P = TypeVar("P", bound=SessionPool)


class Membership(Generic[P]):
    """Joins the session that each step's plan names, and leaves the one before. Usable from several threads."""

    def __init__(self, join: Callable[[int], P], report: Callable[[str, BaseException], None]) -> None:
        self._join = join
        self._report = report
        self._lock = threading.Lock()
        self._pool: P | None = None
        self._attempt: threading.Thread | None = None
        self._failed: tuple[int, int] | None = None
        self._retry_at = 0.0
        self._closed = False

    def get(self, session: int, incarnation: int, wait_s: float = WAIT_S) -> P | None:
        """The pool of that session; None where there is none within `wait_s` seconds."""
        wanted = (session, incarnation)
        with self._lock:
            if not session or self._closed:
                return None
            if self._pool is not None and (self._pool.session, self._pool.incarnation) == wanted:
                return self._pool
            if self._failed == wanted and time.monotonic() < self._retry_at:
                return None
            attempt = self._attempt
            if attempt is None or not attempt.is_alive():
                attempt = threading.Thread(target=self._try, args=(wanted,), name="tokenlake-join", daemon=True)
                self._attempt = attempt
                attempt.start()
        attempt.join(wait_s)
        with self._lock:
            pool = self._pool
            return pool if pool is not None and (pool.session, pool.incarnation) == wanted else None

    def close(self) -> None:
        """Leave."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _try(self, wanted: tuple[int, int]) -> None:
        try:
            pool = self._join(wanted[0])
        except Exception as error:
            self._report("joining the scheduler's session", error)
            with self._lock:
                self._failed, self._retry_at = wanted, time.monotonic() + RETRY_S
            return
        with self._lock:
            former, self._pool = (pool, None) if self._closed else (self._pool, pool)
        if former is not None:
            former.close()
