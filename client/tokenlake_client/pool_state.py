"""State that a pool shares with its leases and writes."""

from __future__ import annotations

import threading

from tokenlake.layout import Layout
from tokenlake_client.deadlines import Deadlines
from tokenlake_client.grants import Grants
from tokenlake_client.parallel_copy import ParallelCopy

__all__ = ["PoolState"]


class PoolState:
    """The pool, its leases, its writes and the arrays of its leases refer to this object, and it refers to none of
    them. The heartbeats go on, and the session lives, until it is collected (`tokenlake_client.heartbeat`)."""

    def __init__(self, grants: Grants, layout: Layout, deadlines: Deadlines, *, verify: bool) -> None:
        self.grants = grants
        self.layout = layout
        self.deadlines = deadlines
        self.verify = verify
        """Check the checksum of each segment that is read."""
        self.parallel_copy = ParallelCopy()
        self._corrupt = 0
        self._lock = threading.Lock()

    @property
    def corrupt(self) -> int:
        """Segments whose bytes did not match their checksum so far; 0 unless `verify`."""
        return self._corrupt

    def count_corrupt(self) -> None:
        """A segment's bytes did not match its checksum."""
        with self._lock:
            self._corrupt += 1
