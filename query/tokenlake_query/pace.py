"""The share of each tenant in the processor time of threads that read requests and open views.

These threads, the computing thread and the timers share one interpreter lock. Without a share, a tenant whose 32
connections send cheap frames would have 32 threads that compete with one thread of another tenant.

::

    red   [work][ pause    ][work][ pause    ]     each pause is in proportion to the work before it
    blue           [work]           [work]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.5
"""Share of one processor that reading may take while several tenants send requests. They divide it equally."""
ALONE_S = 10.0
"""Seconds after its last request for which a tenant counts as one that sends requests."""
BURST_NS = 1_000_000
"""Nanoseconds of processor time, divided by the tenant's share, by which a tenant may be ahead without a pause."""


class Pace:
    """The processor time that tenants have used for reading requests and opening views. Thread-safe."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock`: returns the monotonic time in nanoseconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._paid: dict[str, int] = {}
        """By tenant, the monotonic time in nanoseconds at which its work so far is paid for: the time of its last work
        or later. A tenant that was idle begins at the time at which its work began."""

    def spend(self, tenant: str, ns: int) -> float:
        """Count `ns` nanoseconds of processor time of a thread that works for `tenant`. Returns the seconds for which
        this thread must pause."""
        now = self._clock()
        with self._lock:
            active = [name for name, paid in self._paid.items() if paid > now - ALONE_S * 1e9]
            if len(active) < len(self._paid):
                self._paid = {name: self._paid[name] for name in active}
            others = len(active) - (tenant in self._paid)
            # A tenant that is alone may use one processor: one of its threads works at a time, on average.
            price = (others + 1) / SHARE if others else 1
            paid = max(now - ns, self._paid.get(tenant, 0)) + int(ns * price)
            self._paid[tenant] = paid
        ahead = paid - now
        return ahead / 1e9 if ahead > BURST_NS else 0.0


class TenantPace:
    """The pace of one thread. Only this thread calls it."""

    def __init__(self, pace: Pace, tenant: str) -> None:
        self._pace = pace
        self.tenant = tenant
        """The tenant for which the thread works."""
        self._counted: int | None = None

    def __call__(self) -> None:
        """Count the processor time of the thread since the call before, and pause the thread as `Pace.spend` says."""
        now = time.thread_time_ns()
        used = now - (now if self._counted is None else self._counted)
        self._counted = now
        if used and (pause := self._pace.spend(self.tenant, used)):
            time.sleep(pause)
