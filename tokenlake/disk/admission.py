"""Admission: which segments are written to disk before memory evicts them.

A write costs endurance of the device and bandwidth. Two limits hold: written bytes are at most `SHARE` of the bytes
that memory evicts, and at most a number of bytes per day. Under them the segments with the highest retention values are
written: a threshold on the value follows the candidates so that the share of them that passes is the one that the
limits allow.

A segment is useful only if those before it in its prompt are found too, and memory evicts the deepest first. So the
segments of one request are admitted together: after the first of them was admitted, all others with at least as many
accesses are, although their value has fallen with their age and the threshold has risen meanwhile. Without the memory
of requests, where only the segments of one look are judged together, the tier finds 1.3 points fewer tokens on the
conversation trace and 2.5 fewer on the toolagent-like one; where a segment follows the one that continues it in memory,
0.1 more and 1.4 fewer (docs/results/disk-simulation.md).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from enum import StrEnum

SHARE = 0.5
"""Limit of written bytes, as a share of the bytes that memory evicts."""
DAY_S = 86_400.0
BURST_S = 3600.0
"""The daily budget of this time may be written at once."""
MAX_CREDIT = 256
"""Segments that may be written ahead of the evictions that allow them."""
STEP = 0.05
"""Relative step of the threshold."""
MEMORY = 0.995
"""Weight that the counts of candidates and evictions keep with each further candidate: 200 of them count."""
MAX_REQUESTS = 4096
"""Requests whose decision is remembered."""
LEAST_CREDIT = -256
"""Credit below which the further segments of an admitted request are refused too."""
TOGETHER_S = 10.0
"""Seconds within which the accesses of one request lie."""
LEAST_VALUE = 1e-9
"""Least threshold above 0, in accesses per second."""


class Refusal(StrEnum):
    """The reason why a segment was not written to disk."""

    VALUE = "value"
    """Its expected re-use is below that of the other candidates."""
    SHARE = "share"
    """The credit is used: a share (`SHARE`) of the segments that memory evicted was written."""
    DAY = "day"
    """The budget of bytes per day is used."""
    SLABS = "slabs"
    """The device has as many slabs as it may have for the tenant, each for one size of segments."""
    QUEUE = "queue"
    """The device has not written earlier segments yet, or no device has room."""


class DailyBudget:
    """Bytes that may be written now, of a number per day. A new budget begins with the bytes of `BURST_S`."""

    def __init__(self, bytes_per_day: float, now: float) -> None:
        self._rate = bytes_per_day / DAY_S
        self._most = self._rate * BURST_S
        self._left = self._most
        self._at = now

    def left(self, now: float) -> float:
        """Bytes that may be written now."""
        return min(self._most, self._left + self._rate * (now - self._at))

    def spend(self, nbytes: int, now: float) -> None:
        """Count bytes that are written."""
        self._left, self._at = self.left(now) - nbytes, now

    def resize(self, bytes_per_day: float, now: float) -> None:
        """Change the bytes per day; what is left stays."""
        left = self.left(now) if self._rate else math.inf
        self._rate = bytes_per_day / DAY_S
        self._most = self._rate * BURST_S
        self._left, self._at = min(left, self._most), now


class Admission:
    """Decides which segments of one tenant and size are written: by a threshold on their retention value, and by a
    limit that follows what memory evicts. Counts are in segments."""

    def __init__(self, share: float = SHARE) -> None:
        """`share`: limit of what is written, as a share of what memory evicts."""
        self._share = share
        self._credit = float(MAX_CREDIT)
        """Number of segments that may be written now, from the share of those that memory evicted. Further segments of
        admitted requests make it negative."""
        self._threshold = 0.0
        self._asked = self._evicted = 1.0
        self._requests: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """By request: the least number of accesses of a segment that was admitted, and the greatest of one that was
        refused."""

    def evicted(self, segments: int) -> None:
        """Count segments that memory evicted."""
        self._credit = min(float(MAX_CREDIT), self._credit + self._share * segments)
        self._evicted += segments

    def asks(self, request: Hashable, accesses: int, value: float, share: float = 1.0) -> Refusal | None:
        """Returns None if a candidate of this retention value is admitted, else the reason. `request`: names the
        request that accessed it last; `accesses`: how often it was accessed. `share`: the share of the evicted bytes
        that the budget of bytes per day allows to write. A candidate that is refused because the credit is used changes
        nothing; any other one moves the threshold."""
        admitted, refused = self._requests.get(request, (math.inf, 0))
        if self._credit < (LEAST_CREDIT if accesses >= admitted else 1):
            return Refusal.SHARE
        refusal = self._by_value(value, share)
        if accesses >= admitted:
            return None
        if accesses <= refused:
            return Refusal.VALUE
        self._requests[request] = (min(admitted, accesses), refused) if refusal is None else (admitted, accesses)
        self._requests.move_to_end(request)
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return refusal

    def _by_value(self, value: float, share: float) -> Refusal | None:
        self._asked = self._asked * MEMORY + 1.0
        self._evicted *= MEMORY
        # The credit stays near half of its maximum, so that the threshold decides and not the order of the candidates.
        # Segments that were read back and are evicted again need no write: they leave more for the candidates.
        share = min(
            0.95, min(share, self._share) * max(1.0, self._evicted / self._asked) * 2 * self._credit / MAX_CREDIT
        )
        above = value >= self._threshold and value > 0
        # The threshold rises with each candidate above it, and falls with each one below: it stays where `share` of
        # the candidates are above it.
        step = 1 + STEP * (1 - share) if above else 1 - STEP * share
        self._threshold = max(self._threshold, LEAST_VALUE) * step
        return None if above else Refusal.VALUE

    def wrote(self, segments: int) -> None:
        """Count segments that are written."""
        self._credit -= segments
