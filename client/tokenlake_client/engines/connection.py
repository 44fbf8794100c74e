"""The engine's connection to a pool that may not be there yet, or not any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tokenlake.errors import Refused
from tokenlake_client.engines.base import CachePool

__all__ = ["Connection"]

RETRY_S = 1.0
"""Between attempts to connect, and after a call that failed: a dead pool costs one request a second."""
REFUSED_RETRY_S = 30.0
"""A daemon that answers no will not soon answer otherwise."""
WAIT_S = 0.05
"""How long a request waits for an attempt that it started; the attempt goes on behind it."""


class Connection:
    """Hands out a pool or None, and never blocks a request for longer than `wait_s`."""

    def __init__(
        self,
        connect: Callable[[], CachePool] | None,
        report: Callable[[str, BaseException], None],
        pool: CachePool | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_S,
    ) -> None:
        """`connect` opens a pool that is then owned here; it is tried once before this returns. `pool`
        is one that the caller owns. `report` takes what was attempted and its error."""
        self._connect = connect
        self._clock = clock
        self._wait_s = wait_s
        self._report = report
        self._pool = pool
        self._owned = pool is None
        self._lock = threading.Lock()
        self._attempt: threading.Thread | None = None
        self._retry_at = 0.0
        self._closed = False
        if pool is None and connect is not None:
            self._try()

    def get(self) -> CachePool | None:
        """The pool, if there is one and its last failure was long enough ago."""
        with self._lock:
            if self._closed or self._clock() < self._retry_at:
                return None
            if self._pool is not None or self._connect is None:
                return self._pool
            if self._attempt is not None and self._attempt.is_alive():
                return None
            attempt = threading.Thread(target=self._try, name="tokenlake-connect", daemon=True)
            self._attempt = attempt
            self._retry_at = self._clock() + RETRY_S
            attempt.start()
        attempt.join(self._wait_s)
        return self._pool

    def failed(self) -> None:
        """A call on the pool failed: leave it alone for a while. It reconnects by itself."""
        with self._lock:
            self._retry_at = self._clock() + RETRY_S

    def close(self) -> None:
        """Close the pool if it was opened here."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None and self._owned:
            pool.close()

    def _try(self) -> None:
        assert self._connect is not None
        try:
            pool = self._connect()
        except Exception as error:
            self._report("connecting to the pool", error)
            with self._lock:
                pause = REFUSED_RETRY_S if isinstance(error, Refused) else RETRY_S
                self._retry_at = self._clock() + pause
            return
        with self._lock:
            if not self._closed:
                self._pool, self._retry_at = pool, 0.0
                return
        pool.close()
