"""A question to the pool whose answer is polled, and what follows from a late one. No call waits for the daemon.
Imports no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tokenlake.errors import TokenLakeError
from tokenlake_client.lease import Lease
from tokenlake_client.match import PendingMatch

SILENT_S = 1.0
"""A daemon that has not answered a lookup for this long after its deadline is reported as silent."""


class PolledMatch:
    """A match whose answer, a lease, is polled within a deadline. For the scheduler's thread."""

    def __init__(self, pending: PendingMatch | None, deadline_s: float, clock: Callable[[], float]) -> None:
        """`pending`: the match; None: it is sent later."""
        self._pending = pending
        self._deadline_s = deadline_s
        self._clock = clock
        self.started = clock()
        self.due = self.started + deadline_s
        """The time from which the next answer counts as late."""
        self.lease: Lease | None = None
        self._took: tuple[int, int, float] | None = None

    def poll(self) -> bool:
        """True if the answer has arrived. Raises `TokenLakeError` if it will not arrive."""
        if self.lease is None and self._pending is not None:
            answers = self._pending.answers
            self.lease = self._pending.poll()
            if self._pending.answers > answers:
                # A long prompt takes several requests, and the engine may poll only between its steps.
                self.due = max(self.due, self._clock() + self._deadline_s)
            if self.lease is not None and self._took is not None:
                self.lease.takes(*self._took)
        return self.lease is not None

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record the tokens that are loaded, as `Lease.takes`. A later call replaces an earlier one."""
        self._took = start, stop, saved_s
        if self.lease is not None:
            self.lease.takes(start, stop, saved_s)

    def drop(self) -> None:
        """Release the lease, now or when the answer arrives."""
        if self._pending is not None:
            self._pending.cancel()


class LateLookup:
    """The lookup of an engine that was given up and is not answered yet, if there is one. For the scheduler's
    thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lookup: PolledMatch | None = None

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered the late lookup for more than `SILENT_S`."""
        return self._lookup is not None and self._clock() - self._lookup.due > SILENT_S

    def give_up(self, lookup: PolledMatch) -> None:
        """Give up `lookup`, whose answer is late. It is dropped as soon as its answer has arrived, or at once if there
        is a late lookup already."""
        if self._lookup is None:
            self._lookup = lookup
        else:
            lookup.drop()

    def answered(self) -> bool:
        """False while the daemon has not answered the late lookup. An unforeseen error of the lookup is raised once,
        and ends it."""
        late = self._lookup
        if late is None:
            return True
        ended = True
        try:
            with contextlib.suppress(TokenLakeError):
                ended = late.poll()
        finally:
            if ended:
                self._lookup = None
                late.drop()
        return ended
