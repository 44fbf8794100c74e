"""The engine's connection to a daemon that may start later than the engine, stop and restart; and that of an engine
that cannot use the pool, which tells the daemon why: operators see it beside the engines that were refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tokenlake.errors import Refused
from tokenlake_client.pool import Pool

RETRY_S = 1.0
"""Seconds between two attempts to connect to the daemon, and after a call that failed, so that a dead daemon delays at
most one request a second."""
REFUSED_RETRY_S = 30.0
"""Seconds until the next attempt to connect after the daemon refused the connection; the reason of a refusal seldom
goes away within seconds."""
WAIT_S = 0.05
"""Seconds that a request waits for an attempt to connect that it started. The attempt continues in the background."""


class Connection:
    """Owns the connection to the daemon, and connects again in the background after a failure. Thread-safe."""

    def __init__(
        self,
        connect: Callable[[], Pool] | None,
        report: Callable[[str, BaseException], None],
        pool: Pool | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_S,
        *,
        at_once: bool = True,
    ) -> None:
        """`connect` opens a pool, which this object then owns; with `at_once`, one attempt is made before the
        constructor returns. `pool`: an open pool to use instead of `connect`; the caller owns it. `report` is called
        with the operation that failed and its error. `wait_s`: as of `get`."""
        self._connect = connect
        self._clock = clock
        self._wait_s = wait_s
        self._report = report
        self._pool = pool
        self._owned = pool is None
        self._lock = threading.Lock()
        self._attempt: threading.Thread | None = None
        self._retry_at = 0.0
        self._disconnected = False
        """True if the last failed call found the pool without a connection to the daemon."""
        self._closed = False
        if at_once and pool is None and connect is not None:
            self._try()

    def get(self, wait_s: float | None = None) -> Pool | None:
        """The connected pool, or None while there is no connection and for a pause after a failure. May start an
        attempt to connect. `wait_s`: how long to wait for an attempt that is under way (default: `wait_s` of the
        constructor, and only for one that this call starts)."""
        with self._lock:
            attempt = self._attempt
            paused = self._closed or (self._clock() < self._retry_at and not self._is_back())
            if not paused and (self._pool is not None or self._connect is None):
                return self._pool
            if attempt is not None and attempt.is_alive():
                if wait_s is None:
                    return None
            elif paused:
                return None
            else:
                attempt = threading.Thread(target=self._try, name="tokenlake-connect", daemon=True)
                self._retry_at = self._clock() + RETRY_S
                try:
                    attempt.start()
                except RuntimeError:
                    # No thread can be started: the engine goes on without the pool.
                    return None
                self._attempt = attempt
        attempt.join(self._wait_s if wait_s is None else wait_s)
        return self._pool

    @property
    def pool(self) -> Pool | None:
        """The pool that this object opened or was given, also during the pause after a failure; None where there is
        none."""
        return self._pool

    def failed(self) -> None:
        """Record that a call on the pool failed: `get` returns None for `RETRY_S`. If the pool has no connection, it
        connects again by itself, which ends the pause: then the next request uses the daemon that has restarted."""
        with self._lock:
            self._retry_at = self._clock() + RETRY_S
            self._disconnected = not self._is_connected()

    def close(self) -> None:
        """Close the connection to the pool if this object opened it. Never raises."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None and self._owned:
            self._leave(pool)

    def _is_back(self) -> bool:
        return self._disconnected and self._is_connected()

    def _is_connected(self) -> bool:
        """False if the pool says that it has no connection to the daemon. Never raises."""
        try:
            return self._pool is None or self._pool.connected
        except Exception:
            # The next call on such a pool fails too, and is reported.
            return True

    def _leave(self, pool: Pool) -> None:
        try:
            pool.close()
        except Exception as error:
            self._report("closing the pool", error)

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
        self._leave(pool)


def declined(socket: str | Path | None, daemon_uid: int | None, reason: str) -> Connection:
    """A connection that is never made. At the start, and later when `get` is called, at most every 30 s, it tells the
    daemon why the engine goes without the pool: the daemon may start later, or again. `socket`, `daemon_uid`: as of
    `Pool.connect`. Never raises."""

    def tell() -> NoReturn:
        # The import is here, because an engine that was given a pool does not need the client's connection code.
        from tokenlake_client.link import decline

        decline(Path(socket) if socket else None, daemon_uid, reason)

    return Connection(tell, lambda operation, error: None, wait_s=0.0)
