"""State that a pool shares with its leases and writes."""

from __future__ import annotations

import threading

from tokenlake.opaque_layout import AnyLayout
from tokenlake_client.deadlines import Deadlines
from tokenlake_client.grants import Grants
from tokenlake_client.parallel_copy import ParallelCopy


class PoolState:
    """The state of a pool that keeps its session alive. The pool, its leases, its writes and the arrays of its leases
    refer to this object, and it refers to none of them. It is therefore collected when the last of them is; until then
    the heartbeats keep the session alive (`tokenlake_client.heartbeat`)."""

    def __init__(self, grants: Grants, layout: AnyLayout, deadlines: Deadlines, *, verify: bool) -> None:
        self.grants = grants
        self.layout = layout
        self.deadlines = deadlines
        self.verify = verify
        """True: the pool checks the checksum of each segment that it reads."""
        self.parallel_copy = ParallelCopy()
        self._corrupt = 0
        self._lock = threading.Lock()

    @property
    def corrupt(self) -> int:
        """The number of segments so far whose bytes did not match their checksum when the pool read them; 0 unless
        `verify`."""
        return self._corrupt

    def count_corrupt(self) -> None:
        """Count a segment whose bytes did not match its checksum when the pool read it."""
        with self._lock:
            self._corrupt += 1
