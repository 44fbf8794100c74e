"""Segments that were refused a slot: those that got one at a later attempt, and those that were not stored.

::

    refused -- refused again --> refused
       |  a slot is reserved, or the segment is there by then --> retried
       |  no attempt within `FINAL_S` -----------------------> final
"""

from __future__ import annotations

from collections import OrderedDict

from tokenlake.core.context import Context, Part
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.wire import Code

REFUSED = Metric(
    "tokenlake_refused_segments_total",
    "Segments that were not stored because their engine got no slot, by the code of the last refusal, 5 s after it",
    "tenant",
    "code",
)
RETRIED = Metric(
    "tokenlake_retried_segments_total",
    "Segments whose engine got a slot, or found them stored, at a later attempt, by the code of the refusal before it",
    "tenant",
    "code",
)

CODES = (Code.NO_SLOT, Code.WRITE_BUDGET, Code.SESSION_LIMIT, Code.NO_REGION, Code.QUOTA)
"""The codes by which a store can be refused."""
FINAL_S = 5.0
"""Seconds without a further attempt after which a refusal is final. A client tries again after 50 ms at most, and fills
the slots that it got meanwhile."""
MAX_REFUSED = 1 << 13
"""Maximum number of refused segments that are remembered; of more, the oldest count as final at once."""
SETTLED = 512
"""Refusals that one call settles."""


class Refusals(Part):
    """The refused segments of which it is not known yet whether their engine tries again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: OrderedDict[tuple[TenantId, SegmentKey], tuple[Code, float]] = OrderedDict()
        """By segment: the code of the last refusal and its time, the oldest first."""
        self._waiting = False
        """True while a timer of `_settle` is set."""

    def begin_tenant(self, tenant: TenantId) -> None:
        """Let all series of the tenant exist from now on."""
        for code in CODES:
            for metric in (REFUSED, RETRIED):
                self._context.counters.add_for(metric, 0, tenant, code.name)

    def refused(self, tenant: TenantId, key: SegmentKey, code: Code) -> None:
        """An engine got no slot for a segment."""
        self._open[tenant, key] = code, self._context.now
        self._open.move_to_end((tenant, key))
        if len(self._open) > MAX_REFUSED:
            self._final()
        self._wait(FINAL_S)

    def served(self, tenant: TenantId, key: SegmentKey) -> None:
        """An engine got a slot for a segment, or found that it is stored or being written."""
        if self._open and (refusal := self._open.pop((tenant, key), None)) is not None:
            self._context.counters.add_for(RETRIED, 1, tenant, refusal[0].name)

    def _final(self) -> None:
        (tenant, _), (code, _) = self._open.popitem(last=False)
        self._context.counters.add_for(REFUSED, 1, tenant, code.name)

    def _wait(self, seconds: float) -> None:
        if not self._waiting:
            self._waiting = True
            self._context.after(seconds, lambda: self._context.in_slices(self._settle))

    def _settle(self) -> bool:
        """Count the refusals that are final by now. Returns True if more may be left."""
        for _ in range(SETTLED):
            oldest = next(iter(self._open.values()), None)
            left_s = FINAL_S if oldest is None else oldest[1] + FINAL_S - self._context.now
            if oldest is None or left_s > 0:
                self._waiting = False
                if oldest is not None:
                    self._wait(left_s)
                return False
            self._final()
        return True

    def census(self) -> dict[str, int]:
        return {"refused segments": len(self._open)}
