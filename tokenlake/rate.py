"""A recent amount per second."""

from __future__ import annotations

import math

__all__ = ["Rate"]


class Rate:
    """A sum that decays with the half-life `half_life_s`, read as an amount per second: for a steady stream, its
    rate."""

    __slots__ = ("_at", "_half_life_s", "_sum")

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount` at `now`, in seconds, which never decreases."""
        self._sum = self._decayed(now) + amount
        self._at = max(self._at, now)

    def set(self, per_second: float, until: float) -> None:
        """Replace the sum: the rate is `per_second` until that time, then decays."""
        self._sum = per_second * self._half_life_s / math.log(2)
        self._at = until

    def at(self, now: float) -> float:
        """The amount per second at `now`."""
        return self._decayed(now) * math.log(2) / self._half_life_s

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp2(min(0.0, self._at - now) / self._half_life_s)
