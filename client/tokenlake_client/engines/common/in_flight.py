"""The time that a match may wait for segments that another engine is computing (in-flight segments).

Another engine may have begun a moment ago, and stores its segments a little later than it computes them. A match
therefore waits `FACTOR` times as long as this engine is predicted to take for the missing segments itself. The
integrations decide whether a wait pays; this module turns their prediction into the two limits of a match.
"""

from __future__ import annotations

from typing import NamedTuple

FACTOR = 1.5
"""Limit of the wait for another engine, as a multiple of the time that this engine is predicted to take for the missing
segments."""
LEAST_S = 0.02
"""Seconds: an engine does not wait for another engine's prefill that takes less than this."""
LONGEST_S = 10.0
"""Seconds after which the daemon ends every wait for another engine."""


class InFlightWait(NamedTuple):
    """The limits of one match's wait, in seconds."""

    total_s: float
    """Seconds that the match may wait, for any number of missing segments; 0: the match does not wait."""
    segment_s: float
    """Seconds that the match may wait per missing segment; 0: only `total_s` limits the wait."""
    expected_s: float = 0.0
    """Seconds for which the match waits without an in-flight marker too: another engine has named the segments."""

    def seconds(self, missing: int) -> float:
        """Seconds that the match may wait for another engine when `missing` segments are missing."""
        return min(self.total_s, missing * self.segment_s) if self.segment_s else self.total_s


NO_WAIT = InFlightWait(0.0, 0.0)


def wait_for(predicted_s: float, segment_s: float) -> InFlightWait:
    """The limits of a wait for another engine's prefill, which is predicted to take `predicted_s`, and `segment_s` for
    its last segment. The last segment attends to all others, so no segment takes longer."""
    return InFlightWait(min(FACTOR * predicted_s, LONGEST_S), FACTOR * segment_s)
