"""Space-saving counters (Metwally et al. 2005) with decay: the heaviest items of a stream in bounded memory.

The weight of an amount halves with each half-life. The implementation is the plain algorithm over amounts that are
multiplied by 2 per half-life, and divided by that factor when they are read (forward decay, Cormode et al. 2009), so
its bound holds at any time: with `m` counters and a decayed total of T, no count exceeds the true one by more than T /
m, and every item with more than T / m is counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

__all__ = ["Heavy", "SpaceSaving"]

Item = TypeVar("Item", bound=Hashable)

FARTHEST = 64.0
"""Half-lives after which all counts are scaled down, so that no float overflows."""
YOUNGEST = 0.25
"""Half-lives: the least age of a stream in the estimate of its rate."""


class Heavy(msgspec.Struct, Generic[Item], frozen=True):
    """An item; its decayed amount is between `count - error` and `count`."""

    item: Item
    count: float
    error: float


class SpaceSaving(Generic[Item]):
    """Counts at most `counters` items. A new item replaces the one with the lowest count; of several, the one that has
    been counted longest."""

    def __init__(self, counters: int, half_life_s: float) -> None:
        self.counters = counters
        self._half_life_s = half_life_s
        self._counts: dict[Item, tuple[float, float, float]] = {}
        """(count, error) in units of the landmark's time, and the time since which the item is counted."""
        self._landmark = 0.0

    def __contains__(self, item: Item) -> bool:
        return item in self._counts

    def add(self, item: Item, amount: float, now: float) -> None:
        """Add the positive `amount` of `item` at `now`, in seconds, which never decreases."""
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
        """Drop the counter of `item`."""
        self._counts.pop(item, None)

    def rate(self, item: Item, now: float) -> float:
        """Amount per second of `item`: the true rate of a stream that has been steady since it is counted; 0 for an
        item that is not counted. A younger stream is taken to be `YOUNGEST` half-lives old."""
        if item not in self._counts:
            return 0.0
        age = max(YOUNGEST, (now - self._counts[item][2]) / self._half_life_s)
        return self.count(item, now) * math.log(2) / self._half_life_s / (1.0 - math.exp2(-age))

    def count(self, item: Item, now: float) -> float:
        """A lower bound of the decayed amount of `item`; 0 for an item that is not counted."""
        # Before the counter is read: `_growth` may scale all counts down.
        growth = self._growth(now)
        count, error, _ = self._counts.get(item, (0.0, 0.0, 0.0))
        return (count - error) / growth

    def heaviest(self, now: float) -> Iterator[Heavy[Item]]:
        """All counted items, the one counted longest first."""
        growth = self._growth(now)
        for item, (count, error, _) in self._counts.items():
            yield Heavy(item, count / growth, error / growth)

    def _growth(self, now: float) -> float:
        """The weight of an amount at `now` in units of the landmark's time."""
        elapsed = (now - self._landmark) / self._half_life_s
        if elapsed > FARTHEST:
            shrink = 2.0**-elapsed
            self._counts = {
                item: (count * shrink, error * shrink, since) for item, (count, error, since) in self._counts.items()
            }
            self._landmark, elapsed = now, 0.0
        return float(2.0**elapsed)
