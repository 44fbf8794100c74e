"""How many copies of which segments: what a directory node decides from how often they are read and how busy the nodes
are.

The rule is that of the design's simulations, over reads that a copy elsewhere could take: when the load of a segment's
node is above (1 + eps) x the mean, the segment that is read most there gets as many copies as bring each of them to a
share of eps x the mean, at once; after that half as many again per second for as long as one of its nodes stays above.
It loses them when it was read less than a quarter of one share for 20 s.

Three things are said more exactly than there, since loads are late, estimated, and may be lies:

- The mean is that of all nodes but the busiest as reported: one node that claims an enormous load keeps nobody from
  getting copies, and one that claims none makes the mean smaller by one part in n.
- A rate counts when some reads stand behind it (`LEAST_READS`): on many nodes with little to do a single read would
  look like a share.
- A copy must be worth its own transfer: where the mean is tiny, the share is one read in the time after which it would
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
"""Segments that a directory node counts at a time; 16 suffice, 8 thrash."""
REACTS_S, DECIDES_S = 2.0, 60.0
"""Half-lives of the two counts: the first sees a crowd come, the second knows what is read at all times."""
GROWTH = 1.5
GROWTH_S = 1.0
DROP_SHARE, DROP_S = 0.25, 20.0
SPARE = 1.25
"""Times as many copies as the slow count asks for may stay."""
LEAST_READS = 4.0
"""Decayed, in one of the counts."""
MOST_COPIES = 1.25
"""Times as many as its rate needs. A node may stay above the mean for what its own engines read there, which no copy
takes from it."""
MOST_HOT = 2 * COUNTERS
"""Segments of a directory node that have copies: what is read beyond is reported by nodes that lie."""


class Shape(msgspec.Struct, frozen=True):
    """What whoever copies a segment must know of it."""

    depth: int
    slot_bytes: int
    shards: int


class Change(msgspec.Struct, frozen=True):
    """`item` is to be on `copies` nodes in all, its owner among them; 1: no copies any more."""

    item: HotItem
    copies: int


class _Read(NamedTuple):
    """A segment that is counted."""

    item: HotItem
    nodes: Sequence[NodeId]
    per_copy: float
    """Bytes per second."""


class _Hot:
    """A segment that has copies."""

    __slots__ = ("cold_since", "copies", "grown_at", "since", "spare_since")

    def __init__(self, copies: int, now: float) -> None:
        self.copies = copies
        self.since = self.grown_at = now
        self.cold_since: float | None = None
        self.spare_since: float | None = None


class HotRule:
    """Of one home. Times are seconds of the workload and never decrease."""

    def __init__(self) -> None:
        self._reacts: SpaceSaving[HotItem] = SpaceSaving(COUNTERS, REACTS_S)
        self._decides: SpaceSaving[HotItem] = SpaceSaving(COUNTERS, DECIDES_S)
        self._shapes: dict[HotItem, Shape] = {}
        self._hot: dict[HotItem, _Hot] = {}
        self._may_be_busy = False

    def __len__(self) -> int:
        """Segments that have copies."""
        return len(self._hot)

    def __contains__(self, item: HotItem) -> bool:
        return item in self._hot

    def shape(self, item: HotItem) -> Shape:
        """Of one that is counted, or has copies."""
        return self._shapes[item]

    def read(self, item: HotItem, shape: Shape, times: int, now: float) -> None:
        """Read so often, from wherever a copy elsewhere could have been read as well."""
        self._may_be_busy = True
        self._reacts.add(item, times * shape.slot_bytes, now)
        self._decides.add(item, times * shape.slot_bytes, now)
        self._shapes[item] = shape
        if len(self._shapes) > 4 * COUNTERS:
            counted = (self._hot, self._reacts, self._decides)
            self._shapes = {each: known for each, known in self._shapes.items() if any(each in c for c in counted)}

    def forget(self, item: HotItem) -> None:
        """It is gone: its copies are no copies any more."""
        self._hot.pop(item, None)
        self._reacts.forget(item)
        self._decides.forget(item)

    def busy(self, now: float) -> bool:
        """Is there anything to decide about?"""
        # Once nothing is read often enough, that stays so until something is read.
        self._may_be_busy = bool(self._hot or (self._may_be_busy and self._rates(now)))
        return self._may_be_busy

    def decide(
        self,
        now: float,
        loads: Mapping[NodeId, float],
        nodes_of: Callable[[HotItem], Sequence[NodeId]],
    ) -> list[Change]:
        """What changes. `loads`: bytes per second of every node that can be reached. `nodes_of`: who has it, owner
        first; empty when nobody is known to."""
        mean = fair_mean(list(loads.values()))
        changes = [self._drop(item, hot, mean, now) for item, hot in list(self._hot.items())]
        rates = self._rates(now)
        read = [
            _Read(item, nodes, rate / self._copies(item)) for item, rate in rates.items() if (nodes := nodes_of(item))
        ]
        over = self._over(loads, read, (1 + EPSILON) * mean)
        # What is read most at the nodes that are over, until what is expected to stay is not.
        for each in sorted(read, key=lambda each: -each.per_copy) if over else ():
            share = self._share(each.item, mean)
            least = share / MOST_COPIES if each.item in self._hot else share
            if each.per_copy <= least or not any(over.get(node, 0.0) > 0.0 for node in each.nodes):
                continue
            copies = self._wanted(each.item, rates[each.item], share, now, len(loads))
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
        """By how much which nodes are above `limit`. A load is late; what this directory node knows to be read there
        is not."""
        known: dict[NodeId, float] = {}
        for each in read:
            for node in each.nodes:
                known[node] = known.get(node, 0.0) + each.per_copy
        now = {node: max(load, known.get(node, 0.0)) for node, load in loads.items()}
        return {node: load - limit for node, load in now.items() if load > limit}

    def _wanted(self, item: HotItem, rate: float, share: float, now: float, most: int) -> int | None:
        """On how many nodes from now on; None: as before."""
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
        """Fewer copies where it has had too many for long: made for a crowd, or while all nodes had little to do."""
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
        """What one copy should have to do for it."""
        return max(EPSILON * mean, self._shapes[item].slot_bytes / DROP_S)

    def _rates(self, now: float) -> dict[HotItem, float]:
        """Bytes per second of those behind which enough reads stand."""
        rates: dict[HotItem, float] = {}
        for counts in (self._reacts, self._decides):
            for heavy in counts.heaviest(now):
                if heavy.count - heavy.error >= LEAST_READS * self._shapes[heavy.item].slot_bytes:
                    rates[heavy.item] = max(rates.get(heavy.item, 0.0), counts.rate(heavy.item, now))
        return rates

    def check_integrity(self) -> None:
        """AssertionError when something is kept that nobody needs, or not kept that somebody does."""
        assert len(self._hot) <= MOST_HOT
        assert len(self._shapes) <= 4 * COUNTERS + 1
        assert all(item in self._shapes for item in self._hot)
        assert all(hot.copies > 1 for hot in self._hot.values())


def fair_mean(loads: Sequence[float]) -> float:
    """Of all but the greatest; 0 where there is no other."""
    return (sum(loads) - max(loads)) / (len(loads) - 1) if len(loads) > 1 else 0.0
