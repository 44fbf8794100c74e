"""The bulk path from a peer, over which segments come: its health and its speed.

A peer may answer every ping although no segment can be fetched from it (a firewall, no descriptors left, a full
backlog), so the path has a health of its own::

    delivers -- transfers to which no bytes came --> delivers nothing: no transfer begins, no match leases there
       ^                                                                     |
       +--- bytes come to a probe, which is repeated in the background ------+

If the peer answers calls at once, one such transfer is enough. If it is slow to answer calls, its path counts as dead
only when transfers have together waited for `PATIENT_TRIPS` times its longest recent round trip, at most `suspect_s`.
"""

from __future__ import annotations

from tokenlake.wire.liveness import Liveness

DEFAULT_RATE = 500e6
"""Bytes per second assumed of a peer before the first fetch from it; a sixth of the rate of loopback TCP, so that the
first deadline holds on a slower network."""
MEASURED_BYTES = 1 << 20
"""Minimum bytes of a fetch that counts for the measured rate: a smaller one measures the delay of the network and not
its rate."""
LEAST_RATE = 10e6
"""Minimum of the rate assumed of a peer, in bytes per second (a network of 100 Mbit/s), so that the deadlines of
fetches from a peer that sends next to nothing stop growing."""
MAX_SLOWDOWN = 4
"""Maximum factor by which one fetch that missed its deadline reduces the expected rate of a peer."""
RATE_WEIGHT = 0.2
"""Weight of the newest fetch in the running mean of the rate."""
PATIENT_TRIPS = 4
"""Number of round trips of calls for which transfers may wait without bytes before the path counts as dead."""


class BulkPath:
    """The path from one peer. Times are seconds of the rules' clock."""

    def __init__(self) -> None:
        self._liveness = Liveness()
        self._waited_s = 0.0
        """Seconds for which transfers have waited without bytes since the last one that was answered."""
        self._deaths = 0
        """Times in a row that the path became dead before a segment came."""
        self._rate = DEFAULT_RATE
        """Bytes per second of fetches, as a running mean."""

    @property
    def alive(self) -> bool:
        """False from the time when transfers have waited too long without bytes, until one is answered."""
        return not self._liveness.overdue

    def renew(self) -> None:
        """The peer started again: its path counts as alive. Its speed is kept."""
        self._liveness, self._waited_s, self._deaths = Liveness(), 0.0, 0

    def answered(self, now: float) -> bool:
        """Note that bytes came. Returns True if the path was dead."""
        revived = not self.alive
        self._liveness.heard(now)
        self._waited_s = 0.0
        return revived

    def silent(self, began: float, waited_s: float, patience_s: float) -> int:
        """Note that no bytes came to a transfer from `began` on, in `waited_s` seconds. The path is dead once transfers
        have waited for `patience_s` together, unless another one was answered since `began`. Returns how many times in
        a row it became dead; 0 if it did not by this call."""
        known = not self.alive
        self._waited_s += waited_s
        if self._waited_s < patience_s:
            return 0
        self._liveness.deadline_missed(began)
        if known or self.alive:
            return 0
        self._deaths += 1
        return self._deaths

    def predict_s(self, nbytes: int) -> float:
        """Returns the expected seconds of a fetch of `nbytes`."""
        return nbytes / self._rate

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note that a fetch of `nbytes` took `seconds`."""
        self._deaths = 0
        if nbytes >= MEASURED_BYTES:
            rate = nbytes / max(seconds, 1e-6)
            self._rate = max(LEAST_RATE, self._rate + RATE_WEIGHT * (rate - self._rate))

    def missed(self, nbytes: int, seconds: float) -> None:
        """Expect less speed, because a fetch of `nbytes` was not done after `seconds`: on a network that became slower
        no later fetch would end in its deadline otherwise. The reduction is bounded, because the peer may only have
        paused."""
        if nbytes >= MEASURED_BYTES:
            slower = min(self._rate, nbytes / max(seconds, 1e-6))
            self._rate = max(LEAST_RATE, self._rate / MAX_SLOWDOWN, slower)
