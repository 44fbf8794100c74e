"""Which segment lies in which slot: a walk over all segments that may pause, while segments come and go.

A segment stays in one place for life, so a walk in order of places passes each segment that is there all the
while exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from tokenlake.store.segment import Segment

__all__ = ["Cursor", "Places"]


class Cursor(NamedTuple):
    """The next slot of a walk."""

    region: int = 0
    slot: int = 0


class Places:
    """Slots of the regions that belong to some pool. A segment in quarantine still has its place."""

    def __init__(self) -> None:
        self.of: dict[int, list[Segment | None]] = {}
        """By region and slot; None where nothing lies."""
        self._regions: list[int] = []
        """In ascending order."""

    def add_region(self, region: int, slots: int) -> None:
        """Fresh, all slots free."""
        self.of[region] = [None] * slots
        insort(self._regions, region)

    def drop_region(self, region: int) -> None:
        """It belongs to no pool any more."""
        del self.of[region]
        self._regions.remove(region)

    def walk(self, start: Cursor, slots: int) -> tuple[list[Segment], Cursor | None]:
        """What lies in the next `slots` slots, and where to go on; None at the end."""
        found: list[Segment] = []
        for at in range(bisect_left(self._regions, start.region), len(self._regions)):
            region = self._regions[at]
            first = start.slot if region == start.region else 0
            here = self.of[region]
            found += [segment for segment in here[first : first + slots] if segment is not None]
            if first + slots < len(here):
                return found, Cursor(region, first + slots)
            slots -= len(here) - first
            if not slots:
                return found, Cursor(region + 1)
        return found, None
