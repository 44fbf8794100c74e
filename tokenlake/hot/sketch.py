"""Space-saving counters (Metwally et al. 2005) that forget: the heaviest items of a stream in bounded memory.

Each amount counts half as much after a half-life. That is the plain algorithm over amounts that grow by 2 per half-life
and are scaled back when asked about (forward decay, Cormode et al. 2009), so its bound holds at every moment: with
`m` counters and a decayed total of T no item's count is above the truth by more than T / m, and every item that has
more than T / m is among them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

__all__ = ["Heavy", "SpaceSaving"]

Item = TypeVar("Item", bound=Hashable)

FARTHEST = 64.0
"""Half-lives after which all counts are scaled back, so that no float overflows."""
YOUNGEST = 0.25


class Heavy(msgspec.Struct, Generic[Item], frozen=True):
    """An item and what it has, decayed: between `count - error` and `count`."""

    item: Item
    count: float
    error: float


class SpaceSaving(Generic[Item]):
    """At most `counters` items. Of equals the one that has been counted longest gives way."""

    def __init__(self, counters: int, half_life_s: float) -> None:
        self.counters = counters
        self._half_life_s = half_life_s
        self._counts: dict[Item, tuple[float, float, float]] = {}
        """(count, error) in units of the landmark's time, and since when it has been counted."""
        self._landmark = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, item: Item) -> bool:
        return item in self._counts

    def add(self, item: Item, amount: float, now: float) -> None:
        """`item` had `amount` (positive) more at `now`, which never decreases."""
        grown = amount * self._growth(now)
        known = self._counts.get(item)
        if known is not None:
            self._counts[item] = (known[0] + grown, known[1], known[2])
        elif len(self._counts) < self.counters:
            self._counts[item] = (grown, 0.0, now)
        else:
            least = min(self._counts, key=lambda each: self._counts[each][0])
            error, _, _ = self._counts.pop(least)
            self._counts[item] = (error + grown, error, now)

    def forget(self, item: Item) -> None:
        """It is counted from nothing when it comes again."""
        self._counts.pop(item, None)

    def rate(self, item: Item, now: float) -> float:
        """Amount per second of `item`: of a stream that has been steady since it was first counted, its true rate; 0
        when it is not among the heaviest. What came a moment ago counts as if it had taken `YOUNGEST` half-lives."""
        if item not in self._counts:
            return 0.0
        age = max(YOUNGEST, (now - self._counts[item][2]) / self._half_life_s)
        return self.count(item, now) * math.log(2) / self._half_life_s / (1.0 - math.exp2(-age))

    def count(self, item: Item, now: float) -> float:
        """What `item` has, decayed, at least; 0 when it is not among the heaviest."""
        # In this order: counts are scaled back when it is long ago that they were.
        growth = self._growth(now)
        count, error, _ = self._counts.get(item, (0.0, 0.0, 0.0))
        return (count - error) / growth

    def heaviest(self, now: float) -> Iterator[Heavy[Item]]:
        """All counted items, in the order in which they came among them."""
        growth = self._growth(now)
        for item, (count, error, _) in self._counts.items():
            yield Heavy(item, count / growth, error / growth)

    def _growth(self, now: float) -> float:
        """What an amount of `now` counts in units of the landmark's time."""
        elapsed = (now - self._landmark) / self._half_life_s
        if elapsed > FARTHEST:
            shrink = 2.0**-elapsed
            self._counts = {
                item: (count * shrink, error * shrink, since) for item, (count, error, since) in self._counts.items()
            }
            self._landmark, elapsed = now, 0.0
        return float(2.0**elapsed)
