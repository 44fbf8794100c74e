"""Drain: before this node leaves the cluster it hands its primary copies over.

::

    the ring record says that this node drains
        --> a walk over the slots finds the primary copies; those accessed last come first
        --> Offer, in parts, to the other nodes that have room            (`handover`); where none has, those that are
            worth more than the segment that another node would evict next, to that node
               taken    the copy here is a cached copy of the new owner
               refused  the segment is offered again in the next round
        --> none is left, no other node stays, or `drain_s` has passed: Drained, once; the driver takes this node out of
            the record

Meanwhile this node is on the ring no more, and serves its engines and the other nodes as before. It refuses offers.
Segments that no node takes stay until the end, and are lost with this node; so are those that it has on disk alone, and
copies that the policy did not admit, which are not offered.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from functools import partial

from tokenlake.core.cluster.directory_node import WALKED_SLOTS
from tokenlake.core.cluster.handover import MAX_OFFERS, Handover
from tokenlake.core.cluster.owner import Ownership
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, Part
from tokenlake.core.instructions import Drained
from tokenlake.identity import NodeId
from tokenlake.memory import Cursor, Kind, Segment, State
from tokenlake.metrics import Metric
from tokenlake.timers import Timer

LEFT_BEHIND = Metric(
    "tokenlake_drain_left_segments_total",
    "Segments that this node still owned, in memory or on disk, when it had drained",
)

EXAMINED = 128
"""Segments that are examined for one offer."""
OFFER_SEGMENTS, OFFER_BYTES = 32, 64 << 20
"""Limits of one offer; it has at least one segment."""
REFUSED_S = 2.5
"""Seconds for which a node that took nothing of an offer is offered nothing: the other nodes are asked in its place."""
AGAIN_S = 1.0
"""Seconds between two rounds, of which the next offers the segments that were refused before."""


class Drain(Part):
    """Hands over the primary copies of this node while the ring record says that it drains."""

    def __init__(self, context: Context, peers: Peers, ownership: Ownership, handover: Handover) -> None:
        self._context = context
        self._peers = peers
        self._ownership = ownership
        self._handover = handover
        self._end_timer: Timer | None = None
        """Ends the drain after `drain_s`; None while this node does not drain, or has drained."""
        self._again: Timer | None = None
        self._draining = False
        self._cursor: Cursor | None = None
        self._by_age: dict[int, deque[Segment]] = {}
        """The primary copies that were found in this round and are not offered yet, by the power of two of the seconds
        since their last access."""
        self._found = 0
        """Number of primary copies that this round has found."""
        self._offered: Counter[NodeId] = Counter()
        """Offers under way, by node."""
        self._refused: dict[NodeId, float] = {}
        """By node, the time in seconds at which it last took nothing of an offer."""

    def ring_changed(self) -> None:
        """The ring record has changed: begin or end to drain as it says."""
        draining = self._context.draining
        if draining and not self._draining:
            self._ownership.given.clear()
            self._end_timer = self._context.after(self._context.config.drain_s, self._end)
            self._round()
        elif self._draining and not draining:
            self._stop()
        self._draining = draining

    # -- rounds

    def _round(self) -> None:
        self._again = None
        self._cursor, self._found = Cursor(), 0
        self._by_age.clear()
        timer = self._end_timer

        def work() -> bool:
            if self._cursor is None or self._end_timer is not timer:
                return False
            segments, self._cursor = self._context.store.walk(self._cursor, WALKED_SLOTS)
            _, least = self._receiver()
            for segment in segments:
                if not _primary(segment):
                    continue
                self._found += 1
                if self._retention_value(segment) > least:
                    age = int(max(0.0, self._context.now - segment.touched)).bit_length()
                    self._by_age.setdefault(age, deque()).append(segment)
            if self._cursor is None:
                self._offer_some()
            return self._cursor is not None

        self._context.in_slices(work, later=True)

    def _offer_some(self) -> None:
        if self._end_timer is None:
            return
        while self._handover.offers < MAX_OFFERS:
            node, least = self._receiver()
            part = self._next_part(least) if node is not None else []
            if node is None or not part:
                break
            self._offered[node] += 1
            self._handover.offer(node, part, partial(self._answered, node, part))
        if not self._offered.total():
            self._end_round()

    def _answered(self, node: NodeId, part: list[Segment]) -> None:
        self._offered[node] -= 1
        if all(map(_primary, part)):
            self._refused[node] = self._context.now
        if self._cursor is None and self._again is None:
            self._offer_some()

    def _end_round(self) -> None:
        if not self._found or all(peer.draining for peer in self._peers):
            self._end()
        else:
            self._again = self._context.after(AGAIN_S, self._round)

    def _receiver(self) -> tuple[NodeId | None, float]:
        """Returns the node to offer segments to next, and the retention value above which it is offered them: the node
        with the most free memory for each offer under way; if all are full, the one that would evict the segment of the
        least value. (None, infinity) if no node can take segments."""
        since = self._context.now - REFUSED_S
        able = [
            peer
            for peer in self._peers
            if peer.usable and not peer.draining and self._refused.get(peer.node, -math.inf) <= since
        ]
        roomy = [peer for peer in able if not peer.vacancy.full]
        if roomy:
            return max(roomy, key=lambda peer: peer.vacancy.free_share / (1 + self._offered[peer.node])).node, -math.inf
        if not able:
            return None, math.inf
        cheapest = min(able, key=lambda peer: peer.vacancy.victim_value * (1 + self._offered[peer.node]))
        return cheapest.node, cheapest.vacancy.victim_value

    def _retention_value(self, segment: Segment) -> float:
        return self._context.store.retention_value(segment, self._context.now)

    def _next_part(self, least: float) -> list[Segment]:
        """Returns the next primary copies to offer: they have the same pool, number of shards and hints, and retention
        values above `least`. Returns none at the end of the round, or if none of the next `EXAMINED` segments has such
        a value."""
        part: list[Segment] = []
        examined = 0
        while self._by_age and len(part) < OFFER_SEGMENTS and examined < EXAMINED:
            examined += 1
            youngest = min(self._by_age)
            left = self._by_age[youngest]
            segment = left[0]
            if _primary(segment) and self._retention_value(segment) > least:
                if part and (not _together(part[0], segment) or (len(part) + 1) * segment.slot_bytes > OFFER_BYTES):
                    break
                part.append(segment)
            left.popleft()
            if not left:
                del self._by_age[youngest]
        return part

    # -- the end

    def _end(self) -> None:
        """Nothing is left to hand over, or the time is up: count what this node still owns."""
        self._stop()
        cursor: Cursor | None = Cursor()
        entry: int | None = 0
        left = Counter[int]()

        def work() -> bool:
            nonlocal cursor, entry
            if not self._draining or self._end_timer is not None:
                # The drain was taken back meanwhile, and another one may have begun.
                return False
            if cursor is not None:
                segments, cursor = self._context.store.walk(cursor, WALKED_SLOTS)
                left.update(segment.slot_bytes for segment in segments if segment.owned)
            if entry is not None:
                entries, entry = self._context.disk.walk(entry, WALKED_SLOTS)
                slabs = ((each, self._context.disk.slab(each)) for each in entries)
                left.update(slab.slot_bytes for each, slab in slabs if each not in slab.resident)
            if cursor is None and entry is None:
                self._drained(left)
                return False
            return True

        self._context.in_slices(work)

    def _drained(self, left: Counter[int]) -> None:
        """`left`: the segments that this node still owns, by size."""
        self._context.counters.add(LEFT_BEHIND, left.total())
        segments: Counter[NodeId] = Counter()
        nbytes: Counter[NodeId] = Counter()
        for (node, size), taken in self._ownership.given.items():
            segments[node] += taken
            nbytes[node] += taken * size
        moved = tuple((node, taken, nbytes[node]) for node, taken in segments.most_common())
        self._context.emit(Drained(moved, left.total(), sum(size * count for size, count in left.items())))

    def _stop(self) -> None:
        for timer in (self._end_timer, self._again):
            if timer is not None:
                timer.cancel()
        self._end_timer = self._again = self._cursor = None
        self._by_age.clear()
        self._refused.clear()

    # -- checks

    def census(self) -> dict[str, int]:
        return {"segments to hand over": sum(map(len, self._by_age.values()))}


def _primary(segment: Segment) -> bool:
    return segment.kind is Kind.PRIMARY and segment.state is State.READY


def _together(a: Segment, b: Segment) -> bool:
    """Returns True if one offer may contain both segments: an offer names one size, number of shards and hints."""
    return a.pool is b.pool and len(a.checksums) == len(b.checksums) and a.hints == b.hints
