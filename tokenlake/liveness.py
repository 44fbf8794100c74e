"""Whether the other side of a connection answers in time.

::

    in time --- a deadline passes without an answer ---> overdue
       ^                                                    |
       +------------- anything is received -----------------+

No request goes to a side that is overdue, so that a process that stands still costs each of its callers one deadline
and not one per request (`docs/decisions/004-what-an-overdue-peer-is.md`).
"""

from __future__ import annotations

import math

__all__ = ["Liveness"]


class Liveness:
    """Of one connection or peer, for its owner: the owner reports what happened and decides what to refuse. Times are
    seconds of the owner's clock. Not synchronised: the owner calls it under its own lock."""

    __slots__ = ("heard_at", "overdue")

    def __init__(self) -> None:
        self.heard_at = -math.inf
        """When the newest bytes were received."""
        self.overdue = False
        """A deadline passed without the answer, and nothing was received since."""

    def heard(self, now: float) -> None:
        """Something was received, whatever it says: the other side is in time again."""
        self.heard_at = now
        self.overdue = False

    def deadline_missed(self, since: float = math.inf) -> None:
        """A request was not answered by its deadline. `since`: when it was sent, where anything that was received after
        that proves that the other side is alive; by default every missed deadline makes it overdue."""
        self.overdue = self.overdue or self.heard_at < since
