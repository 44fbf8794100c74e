"""An amount per second, averaged over the recent past."""

from __future__ import annotations

import math


class Rate:
    """The recent rate of some amount, such as bytes sent: a sum that halves every `half_life_s` seconds, scaled so that
    a steady stream shows its amount per second."""

    __slots__ = ("_at", "_half_life_s", "_sum")

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount`, which came at the time `now` in seconds; the time never decreases."""
        self._sum = (self._sum if now == self._at else self._decayed(now)) + amount
        self._at = max(self._at, now)

    def set(self, per_second: float, until: float) -> None:
        """Set the rate to `per_second` until the time `until`, after which it decays."""
        self._sum = per_second * self._half_life_s / math.log(2)
        self._at = until

    def at(self, now: float) -> float:
        """Returns the rate at the time `now`, in units of the amount per second."""
        return self._decayed(now) * math.log(2) / self._half_life_s

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp2(min(0.0, self._at - now) / self._half_life_s)
