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


class Liveness:
    """Whether one connection or peer is overdue. Its owner reports received bytes and missed deadlines, and decides
    which requests not to send. Times are seconds of the owner's clock. Not synchronised: the owner calls it under its
    own lock."""

    __slots__ = ("heard_at", "overdue")

    def __init__(self) -> None:
        self.heard_at = -math.inf
        """Time in seconds at which the newest bytes were received from the other side."""
        self.overdue = False
        """True from a missed deadline until anything is received."""

    def heard(self, now: float) -> None:
        """Report that bytes were received, of any message: the other side is in time again."""
        self.heard_at = now
        self.overdue = False

    def deadline_missed(self, since: float = math.inf) -> None:
        """Report that a request was not answered by its deadline. The other side is overdue then, unless bytes were
        received at or after the time `since`; by default such bytes make no difference."""
        self.overdue = self.overdue or self.heard_at < since
