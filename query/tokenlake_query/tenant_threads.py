"""Threads that run functions which may block, shared fairly by tenants."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tokenlake.errors import LimitReached
from tokenlake_query.pace import Pace, TenantPace

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 16 << 20
"""Limit of the bytes of one tenant's calls that wait for a thread: the keys of some 500,000 segments."""
CALL_BYTES = 1 << 10
"""Bytes that are counted for a waiting call itself: its objects."""


class _Call(NamedTuple):
    call: Callable[[], object]
    nbytes: int


class TenantThreads:
    """Threads that run functions which may block. Tenants take turns, and a tenant never has more than half of the
    threads, so that calls that wait for a dead node delay no other tenant. A thread ends when no call waits. `submit`
    is thread-safe."""

    def __init__(self, threads: int, name: str, pace: Pace) -> None:
        """`pace`: counts the processor time of the calls; a thread pauses after a call as it says."""
        self._pace = pace
        self._name = name
        self._free = threads
        self._most = max(1, threads // 2)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Call]] = {}
        """By tenant, the calls that wait for a thread, in order of the tenants' next turns."""
        self._waiting_bytes: dict[str, int] = {}
        self._running: dict[str, int] = {}

    def submit(self, tenant: str, call: Callable[[], object], nbytes: int) -> None:
        """Run the function `call` in a thread; an exception of it is logged. `nbytes`: memory that it keeps while it
        waits, beside its own objects. Raises LimitReached when the tenant's waiting calls keep too much, and when the
        system starts no thread while none runs."""
        nbytes += CALL_BYTES
        with self._lock:
            waiting_bytes = self._waiting_bytes.get(tenant, 0)
            if waiting_bytes + nbytes > MAX_WAITING_BYTES:
                raise LimitReached(
                    f"requests of this tenant that wait to be served take {waiting_bytes} bytes; at most "
                    f"{MAX_WAITING_BYTES}"
                )
            self._waiting.setdefault(tenant, deque()).append(_Call(call, nbytes))
            self._waiting_bytes[tenant] = waiting_bytes + nbytes
            problem = self._start()
            if problem and not self._running:
                # No thread will take the call.
                self._take()
                self._ended(tenant)
                raise LimitReached(f"no thread can be started: {problem}")

    def _start(self) -> str:
        """Start threads for the calls that may run now. Returns the problem of a thread that cannot be started: its
        call waits until another one has ended. The caller holds the lock."""
        while (taken := self._take()) is not None:
            tenant, call = taken
            try:
                threading.Thread(target=self._run, args=taken, name=self._name, daemon=True).start()
            except RuntimeError as error:
                self._ended(tenant)
                self._waiting.setdefault(tenant, deque()).appendleft(call)
                self._waiting_bytes[tenant] = self._waiting_bytes.get(tenant, 0) + call.nbytes
                return str(error)
        return ""

    def _take(self) -> tuple[str, _Call] | None:
        """Count the call of the next tenant's turn as running, and return it; None if no call may run now. The caller
        holds the lock."""
        tenant = next((name for name in self._waiting if self._running.get(name, 0) < self._most), None)
        if tenant is None or not self._free:
            return None
        waiting = self._waiting.pop(tenant)
        call = waiting.popleft()
        self._waiting_bytes[tenant] -= call.nbytes
        if waiting:
            # The tenant's next turn is after those of all others.
            self._waiting[tenant] = waiting
        else:
            del self._waiting_bytes[tenant]
        self._free -= 1
        self._running[tenant] = self._running.get(tenant, 0) + 1
        return tenant, call

    def _ended(self, tenant: str) -> None:
        """Count a call of a tenant as ended. The caller holds the lock."""
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _run(self, tenant: str, call: _Call) -> None:
        taken: tuple[str, _Call] | None = (tenant, call)
        while taken is not None:
            tenant, call = taken
            pace = TenantPace(self._pace, tenant)
            pace()
            try:
                call.call()
            except Exception:
                log.exception("a request of tenant %s failed", tenant)
            pace()
            with self._lock:
                self._ended(tenant)
                taken = self._take()
                self._start()
