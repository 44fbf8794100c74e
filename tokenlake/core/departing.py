"""Segments that memory would evict next, and the writes that keep them: for the disk tier and for the cold tier."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from tokenlake.memory import Kind, Segment, SegmentStore, SlotPool

LOOK_EVERY = 8
"""Evictions after which the rules look for further segments to write."""
AHEAD_PART, LEAST_AHEAD, MOST_AHEAD = 4, 64, 1024
"""The segments that are examined for a write: those that would be evicted next, a quarter of the slots, within these
limits."""
WRITE_SEGMENTS, WRITE_BYTES = 64, 64 << 20
"""Limits of one write; it has at least one segment."""
Name = TypeVar("Name", bound=Hashable)


def departing(store: SegmentStore, pool: SlotPool) -> Iterator[Segment]:
    """Yields the segments of a pool that would be evicted next: cached copies, then primary copies, as the orders are
    when the first of each kind is asked for. None while the pool has enough free slots."""
    ahead = max(LEAST_AHEAD, min(MOST_AHEAD, pool.slots // AHEAD_PART))
    ahead -= len(pool.free) + store.room(pool)
    if ahead > 0:
        yield from list(islice(pool.orders[Kind.CACHED], ahead))
        yield from list(islice(pool.primary, ahead))


def value_of(pool: SlotPool, segment: Segment, now: float) -> float:
    """The retention value of a READY segment that this node owns."""
    return pool.orders[segment.kind].retention_value(segment, now)


def by_value(store: SegmentStore, now: float, saved: Callable[[Segment], bool]) -> list[Segment]:
    """Returns the segments that this node owns and that are not `saved`, those of the highest retention value first;
    of equal ones, the first in their prompt."""
    found: list[tuple[float, int, int, Segment]] = []
    for pool in store.pools():
        for segment in store.index(pool.tenant).values():
            if segment.pool == pool.id and segment.owned and not saved(segment):
                found.append((-value_of(pool, segment, now), segment.depth, len(found), segment))
    return [segment for *_, segment in sorted(found, key=lambda each: each[:3])]


def batches(segments: Iterable[Segment], name: Callable[[Segment], Name]) -> Iterator[tuple[Name, list[Segment]]]:
    """Yields segments of equal names and equal sizes together, within the limits of one write."""
    open_: dict[tuple[Name, int, int], list[Segment]] = {}
    for segment in segments:
        at = name(segment), segment.slot_bytes, len(segment.checksums)
        batch = open_.setdefault(at, [])
        batch.append(segment)
        if len(batch) == WRITE_SEGMENTS or (len(batch) + 1) * segment.slot_bytes > WRITE_BYTES:
            yield at[0], open_.pop(at)
    for at, batch in open_.items():
        yield at[0], batch
