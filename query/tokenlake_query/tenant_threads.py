"""Threads that run functions which may block, shared fairly by tenants."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tokenlake.errors import LimitReached
from tokenlake_query.pace import Pace, TenantPace

__all__ = ["TenantThreads"]

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 16 << 20
"""Limit of the bytes of one tenant's calls that wait for a thread: the keys of some 500,000 segments."""
CALL_BYTES = 1 << 10
"""Bytes that are counted for a waiting call itself: its objects."""


class TenantThreads:
    """Threads that run functions which may block. Tenants take turns, and a tenant never has more than half of the
    threads, so that calls that wait for a dead node delay no other tenant. `submit` is thread-safe."""

    def __init__(self, threads: int, name: str, pace: Pace) -> None:
        """`pace`: counts the processor time of the calls; a thread pauses after a call as it says."""
        self._pace = pace
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._most = max(1, threads // 2)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Callable[[], object], int]]] = {}
        """By tenant, the calls that wait for a thread with their bytes, in order of the tenants' next turns."""
        self._waiting_bytes: dict[str, int] = {}
        self._running: dict[str, int] = {}

    def submit(self, tenant: str, call: Callable[[], object], nbytes: int) -> None:
        """Run the function `call` in a thread; an exception of it is logged. `nbytes`: memory that it keeps while it
        waits, beside its own objects. Raises LimitReached when the tenant's waiting calls keep too much."""
        nbytes += CALL_BYTES
        with self._lock:
            waiting_bytes = self._waiting_bytes.get(tenant, 0)
            if waiting_bytes + nbytes > MAX_WAITING_BYTES:
                raise LimitReached(
                    f"requests of this tenant that wait to be served take {waiting_bytes} bytes; at most "
                    f"{MAX_WAITING_BYTES}"
                )
            self._waiting.setdefault(tenant, deque()).append((call, nbytes))
            self._waiting_bytes[tenant] = waiting_bytes + nbytes
            self._start()

    def _start(self) -> None:
        """Start the calls for which there are threads. The caller holds the lock."""
        while self._free:
            tenant = next((name for name in self._waiting if self._running.get(name, 0) < self._most), None)
            if tenant is None:
                return
            waiting = self._waiting.pop(tenant)
            call, nbytes = waiting.popleft()
            self._waiting_bytes[tenant] -= nbytes
            if waiting:
                # The tenant's next turn is after those of all others.
                self._waiting[tenant] = waiting
            else:
                del self._waiting_bytes[tenant]
            self._free -= 1
            self._running[tenant] = self._running.get(tenant, 0) + 1
            self._threads.submit(self._run, tenant, call)

    def _run(self, tenant: str, call: Callable[[], object]) -> None:
        pace = TenantPace(self._pace, tenant)
        pace()
        try:
            call()
        except Exception:
            log.exception("a request of tenant %s failed", tenant)
        finally:
            pace()
            with self._lock:
                self._free += 1
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._start()
