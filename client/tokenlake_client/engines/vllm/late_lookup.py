"""The lookup whose answer is late. Imports no engine.

No lookup is started until the daemon has answered the late one, so that a frozen daemon delays one request by one
deadline and not every request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from tokenlake.errors import TokenLakeError

SILENT_S = 1.0
"""A daemon that has not answered a lookup for this long after its deadline is reported as silent."""


class _Lookup(Protocol):
    due: float
    """The time from which its answer counts as late."""

    def poll(self) -> bool:
        """True if the answer has arrived. Raises `TokenLakeError` if none will."""

    def drop(self) -> None:
        """Release what the answer grants, now or when it arrives."""


class LateLookup:
    """The lookup of an engine that was given up and is not answered yet, if there is one. For the scheduler's
    thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lookup: _Lookup | None = None

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered the late lookup for more than `SILENT_S`."""
        return self._lookup is not None and self._clock() - self._lookup.due > SILENT_S

    def give_up(self, lookup: _Lookup) -> None:
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
