"""The number of copies of each hot segment, decided by its directory node from reads and from the load of the nodes.

When the load of a node that has the segment exceeds (1 + eps) x the mean, the segment that is read most there gets as
many copies as bring the load per copy to one share, eps x the mean, at once; after that half as many again per second
for as long as one of its nodes stays above. It loses its copies after 20 s with less than a quarter of one share. Reads
are those that a copy on another node could serve. The rule is that of the simulations in
docs/decisions/009-hot-set.md, with three refinements, since reported loads are late, estimated, or false:

- The mean leaves out the busiest node as reported: a node that reports an enormous load does not prevent copies, and
  one that reports none lowers the mean by one part in n.
- A rate counts only if at least `LEAST_READS` reads stand behind it: on many idle nodes a single read would look like
  a share.
- A copy must be worth its transfer: where the mean is tiny, a share is one read in the time after which the copy would
  be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tokenlake.hot.sketch import SpaceSaving
from tokenlake.identity import NodeId, SegmentKey, TenantId

__all__ = ["COUNTERS", "Change", "HotItem", "HotRule", "Shape", "fair_mean"]

HotItem = tuple[TenantId, SegmentKey]

EPSILON = 0.1
COUNTERS = 64
"""Segments that a directory node counts; 16 suffice in simulations, with 8 they displace each other."""
REACTS_S, DECIDES_S = 2.0, 60.0
"""Half-lives of the two counts: the fast one reacts to a crowd, the slow one measures the steady rate."""
GROWTH, GROWTH_S = 1.5, 1.0
"""The number of copies grows by at most this factor per so many seconds."""
DROP_SHARE, DROP_S = 0.25, 20.0
"""A segment that is read for `DROP_S` seconds at less than `DROP_SHARE` of the read rate that justifies one copy loses
its replicas."""
SPARE = 1.25
"""The number of copies may exceed the need of the slow count by this factor."""
LEAST_READS = 4.0
"""Decayed reads in one of the counts, below which a rate is ignored."""
MOST_COPIES = 1.25
"""The number of copies is at most the need of the rate times this factor. Without the bound it would grow as long as a
node stays above the mean through reads of its own engines, which no copy takes over."""
MOST_HOT = 2 * COUNTERS
"""Segments of a directory node that have copies; honest reports cause no more."""


class Shape(msgspec.Struct, frozen=True):
    """The properties of a segment that a node needs to fetch it."""

    depth: int
    slot_bytes: int
    shards: int


class Change(msgspec.Struct, frozen=True):
    """`item` should have `copies` copies, the primary copy included; 1: no others."""

    item: HotItem
    copies: int


class _Read(NamedTuple):
    """A counted segment and its nodes."""

    item: HotItem
    nodes: Sequence[NodeId]
    per_copy: float
    """Bytes per second read from each copy."""


class _Hot:
    """A segment with more than one copy."""

    __slots__ = ("cold_since", "copies", "grown_at", "since", "spare_since")

    def __init__(self, copies: int, now: float) -> None:
        self.copies = copies
        self.since = self.grown_at = now
        self.cold_since: float | None = None
        self.spare_since: float | None = None


class HotRule:
    """The hot segments of one directory node. Times are in seconds and never decrease."""

    def __init__(self) -> None:
        self._reacts: SpaceSaving[HotItem] = SpaceSaving(COUNTERS, REACTS_S)
        self._decides: SpaceSaving[HotItem] = SpaceSaving(COUNTERS, DECIDES_S)
        self._shapes: dict[HotItem, Shape] = {}
        self._hot: dict[HotItem, _Hot] = {}
        self._may_be_busy = False

    def __contains__(self, item: HotItem) -> bool:
        """Is the segment hot?"""
        return item in self._hot

    def shape(self, item: HotItem) -> Shape:
        """The shape of a segment that is counted or hot."""
        return self._shapes[item]

    def read(self, item: HotItem, shape: Shape, times: int, now: float) -> None:
        """The segment was read `times` times, and a copy on another node could have served the reads."""
        self._may_be_busy = True
        self._reacts.add(item, times * shape.slot_bytes, now)
        self._decides.add(item, times * shape.slot_bytes, now)
        self._shapes[item] = shape
        if len(self._shapes) > 4 * COUNTERS:
            counted = (self._hot, self._reacts, self._decides)
            self._shapes = {each: known for each, known in self._shapes.items() if any(each in c for c in counted)}

    def forget(self, item: HotItem) -> None:
        """The segment is gone: it is not hot and not counted any more."""
        self._hot.pop(item, None)
        self._reacts.forget(item)
        self._decides.forget(item)

    def busy(self, now: float) -> bool:
        """False: `decide` would change nothing."""
        # Once no rate is high enough, none is until the next read.
        self._may_be_busy = bool(self._hot or (self._may_be_busy and self._rates(now)))
        return self._may_be_busy

    def decide(
        self,
        now: float,
        loads: Mapping[NodeId, float],
        nodes_of: Callable[[HotItem], Sequence[NodeId]],
    ) -> list[Change]:
        """The changes from now on. `loads`: bytes per second of every node that can be reached. `nodes_of`: the nodes
        with a copy, owner first; empty where none is known."""
        mean = fair_mean(list(loads.values()))
        changes = [self._drop(item, hot, mean, now) for item, hot in list(self._hot.items())]
        rates = self._rates(now)
        read = [
            _Read(item, nodes, rate / self._copies(item)) for item, rate in rates.items() if (nodes := nodes_of(item))
        ]
        over = self._over(loads, read, (1 + EPSILON) * mean)
        # The segments read most at the nodes above the limit, until the expected load of each is below it.
        for each in sorted(read, key=lambda each: -each.per_copy) if over else ():
            share = self._share(each.item, mean)
            least = share / MOST_COPIES if each.item in self._hot else share
            if each.per_copy <= least or not any(over.get(node, 0.0) > 0.0 for node in each.nodes):
                continue
            copies = self._needed(each.item, rates[each.item], share, now, len(loads))
            if copies is None:
                continue
            for node in each.nodes:
                if node in over:
                    over[node] -= each.per_copy - rates[each.item] / copies
            changes.append(Change(each.item, copies))
        return [change for change in changes if change is not None]

    def _copies(self, item: HotItem) -> int:
        hot = self._hot.get(item)
        return 1 if hot is None else hot.copies

    def _over(self, loads: Mapping[NodeId, float], read: list[_Read], limit: float) -> dict[NodeId, float]:
        """The excess load of the nodes above `limit`. A reported load is late, so a node's load is at least the reads
        that this directory node has counted there."""
        known: dict[NodeId, float] = {}
        for each in read:
            for node in each.nodes:
                known[node] = known.get(node, 0.0) + each.per_copy
        now = {node: max(load, known.get(node, 0.0)) for node, load in loads.items()}
        return {node: load - limit for node, load in now.items() if load > limit}

    def _needed(self, item: HotItem, rate: float, share: float, now: float, most: int) -> int | None:
        """The new number of copies; None: unchanged."""
        hot = self._hot.get(item)
        needed = math.ceil(rate / share)
        if hot is None:
            copies = min(most, needed)
            if copies < 2 or len(self._hot) >= MOST_HOT:
                return None
            self._hot[item] = _Hot(copies, now)
            return copies
        copies = min(most, math.ceil(MOST_COPIES * rate / share), math.ceil(hot.copies * GROWTH))
        if copies <= hot.copies or now < hot.grown_at + GROWTH_S:
            return None
        hot.copies, hot.grown_at = copies, now
        return copies

    def _drop(self, item: HotItem, hot: _Hot, mean: float, now: float) -> Change | None:
        rate = max(self._reacts.rate(item, now), self._decides.rate(item, now))
        if rate >= DROP_SHARE * self._share(item, mean):
            hot.cold_since = None
        elif hot.cold_since is None:
            hot.cold_since = now
        elif now >= hot.cold_since + DROP_S:
            del self._hot[item]
            return Change(item, 1)
        return self._shrink(item, hot, mean, now)

    def _shrink(self, item: HotItem, hot: _Hot, mean: float, now: float) -> Change | None:
        """Fewer copies where there have been too many for long: made for a crowd, or while all nodes were idle."""
        fit = max(2, math.ceil(MOST_COPIES * self._decides.rate(item, now) / self._share(item, mean)))
        if hot.copies <= SPARE * fit or now < hot.since + DECIDES_S:
            hot.spare_since = None
        elif hot.spare_since is None:
            hot.spare_since = now
        elif now >= hot.spare_since + DECIDES_S:
            hot.copies, hot.spare_since = fit, None
            return Change(item, fit)
        return None

    def _share(self, item: HotItem, mean: float) -> float:
        """The bytes per second that one copy should serve."""
        return max(EPSILON * mean, self._shapes[item].slot_bytes / DROP_S)

    def _rates(self, now: float) -> dict[HotItem, float]:
        """Bytes per second of the segments with enough reads."""
        rates: dict[HotItem, float] = {}
        for counts in (self._reacts, self._decides):
            for heavy in counts.heaviest(now):
                if heavy.count - heavy.error >= LEAST_READS * self._shapes[heavy.item].slot_bytes:
                    rates[heavy.item] = max(rates.get(heavy.item, 0.0), counts.rate(heavy.item, now))
        return rates

    def check_integrity(self) -> None:
        """AssertionError when a bound is exceeded, or a hot segment has no shape or no copies."""
        assert len(self._hot) <= MOST_HOT
        assert len(self._shapes) <= 4 * COUNTERS + 1
        assert all(item in self._shapes for item in self._hot)
        assert all(hot.copies > 1 for hot in self._hot.values())


def fair_mean(loads: Sequence[float]) -> float:
    """The mean of all loads but the greatest; 0 where there is no other."""
    return (sum(loads) - max(loads)) / (len(loads) - 1) if len(loads) > 1 else 0.0
