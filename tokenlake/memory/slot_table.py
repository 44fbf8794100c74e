"""The slots of all regions: the generation of each slot, the segment in it, and a walk over all segments that may
pause.

A segment stays in one slot for life, so a walk in order of slots passes each segment that stays exactly once, however
many segments come and go while the walk pauses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from tokenlake.memory.segment import Segment
from tokenlake.wire.slots import SlotRef


class Cursor(NamedTuple):
    """The slot at which a walk over all slots continues."""

    region: int = 0
    slot: int = 0


class SlotTable:
    """Slots of the regions that belong to some pool. A segment in quarantine still has its slot."""

    def __init__(self) -> None:
        self._segments: dict[int, list[Segment | None]] = {}
        """The segment in each slot, by region and slot; None where the slot is free."""
        self._generations: dict[int, list[int]] = {}
        """Generation of each slot, by region and slot: it grows by 1 with each segment."""
        self._regions: list[int] = []
        """Numbers of the regions that belong to a pool, in ascending order."""

    def add_region(self, region: int, generations: list[int]) -> None:
        """Add the free slots of a region that a pool got, with the generation of each; no other region has its
        number."""
        self._generations[region] = generations
        self._segments[region] = [None] * len(generations)
        insort(self._regions, region)

    def drop_region(self, region: int) -> None:
        """Remove an empty region, which belongs to no pool any more."""
        del self._segments[region], self._generations[region]
        self._regions.remove(region)

    def next_generation(self, region: int, slot: int) -> SlotRef:
        """Raise the generation of a free slot that gets a new segment. Returns the reference to the slot."""
        generations = self._generations[region]
        generations[slot] += 1
        return SlotRef(region, slot, generations[slot])

    def put(self, segment: Segment) -> None:
        """Record which segment is in a slot: `segment`, in the slot `segment.place`."""
        self._segments[segment.place.region][segment.place.slot] = segment

    def clear(self, place: SlotRef) -> None:
        """Record that the slot at `place` holds no segment any more."""
        self._segments[place.region][place.slot] = None

    def at(self, region: int, slot: int) -> Segment | None:
        """Returns the segment in a slot of a region that belongs to a pool; None where it is free."""
        return self._segments[region][slot]

    def is_generation(self, place: SlotRef) -> bool:
        """Returns True if there is this slot, and its content has the generation that `place` names."""
        generations = self._generations.get(place.region, ())
        return place.slot < len(generations) and generations[place.slot] == place.generation > 0

    def count(self, region: int) -> int:
        """Returns the number of slots of a region that belongs to a pool."""
        return len(self._segments[region])

    def in_region(self, region: int) -> list[Segment]:
        """Returns the segments in a region that belongs to a pool, in order of slots."""
        return [segment for segment in self._segments[region] if segment is not None]

    def free_in(self, region: int) -> list[tuple[int, int]]:
        """Returns the free slots, as (region, slot), of a region that belongs to a pool, in order of slots."""
        return [(region, slot) for slot, segment in enumerate(self._segments[region]) if segment is None]

    def walk(self, start: Cursor, slots: int) -> tuple[list[Segment], Cursor | None]:
        """Returns the segments in the next `slots` slots from `start` on, and the cursor at which the walk continues
        (None at the end)."""
        found: list[Segment] = []
        for at in range(bisect_left(self._regions, start.region), len(self._regions)):
            region = self._regions[at]
            first = start.slot if region == start.region else 0
            here = self._segments[region]
            found += [segment for segment in here[first : first + slots] if segment is not None]
            if first + slots < len(here):
                return found, Cursor(region, first + slots)
            slots -= len(here) - first
            if not slots:
                return found, Cursor(region + 1)
        return found, None

    def __iter__(self) -> Iterator[Segment]:
        for region in self._regions:
            yield from self.in_region(region)

    def check_integrity(self) -> None:
        """Raises AssertionError when a segment is in another slot, or under another generation, than it says, or when
        generations are kept of a region without a pool."""
        assert sorted(self._segments) == sorted(self._generations) == self._regions
        for region, segments in self._segments.items():
            generations = self._generations[region]
            for slot, segment in enumerate(segments):
                place = (region, slot, generations[slot])
                assert segment is None or segment.place == place, f"{segment}: its slot has generation {place[2]}"
