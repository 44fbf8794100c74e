"""Priority and time to live of primary copies: a layer over the policy of eviction.

::

    leaves first                                                      leaves last
    | EXPIRED | LOW      | NORMAL: by the policy | HIGH: bounded |
      ttl_s     priority                           priority 1, at most HIGH_SHARE of the slots and HIGH_S
      passed    -1                                 since the last access; then the segment is NORMAL

Each segment is in one tier. No tier keeps a segment for ever: victims come from the first tier that is not empty.
Outside NORMAL, segments leave in order of their last access. The policy knows and learns of NORMAL segments only; a
segment that becomes NORMAL is new to it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.memory.eviction.odds import Odds
from tokenlake.memory.segment import Segment

HIGH_SHARE = 0.2
"""Maximum share of a pool's slots for segments of high priority. Beyond it the least recently used of them gets normal
priority."""
HIGH_S = 3600.0
"""Seconds without an access after which a segment of high priority gets normal priority."""
MAX_PASSED = 64
"""Maximum number of segments whose deadline is handled in one call; the next call handles further ones."""
_LOW, _NORMAL, _HIGH, _EXPIRED = 0, 1, 2, 3
_LEAVES_FIRST = (_EXPIRED, _LOW, _NORMAL, _HIGH)


class Deadlines:
    """Deadlines of segments, at most one for each, which may be moved."""

    def __init__(self) -> None:
        self._deadlines: dict[Segment, float] = {}
        self._heap: list[tuple[float, int, Segment]] = []
        """(time, number, segment): an entry for each deadline at its time or earlier, and entries of segments without a
        deadline, which are skipped."""
        self._numbers = itertools.count()

    def set(self, segment: Segment, at: float) -> None:
        """Set the deadline of the segment to the time `at`, in place of an earlier one."""
        known = self._deadlines.get(segment)
        self._deadlines[segment] = at
        if known is None or at < known:
            heapq.heappush(self._heap, (at, next(self._numbers), segment))
            if len(self._heap) > 2 * len(self._deadlines) + MAX_PASSED:
                self._heap = [(at, next(self._numbers), each) for each, at in self._deadlines.items()]
                heapq.heapify(self._heap)

    def cancel(self, segment: Segment) -> None:
        """Remove the deadline of the segment, if it has one."""
        self._deadlines.pop(segment, None)

    def passed(self, now: float) -> Iterator[Segment]:
        """Yields the segments whose deadline is at most `now` and removes these deadlines; at most `MAX_PASSED` in one
        call."""
        for _ in range(MAX_PASSED):
            if not self._heap or self._heap[0][0] > now:
                return
            segment = heapq.heappop(self._heap)[2]
            at = self._deadlines.get(segment)
            if at is not None and at > now:
                heapq.heappush(self._heap, (at, next(self._numbers), segment))
            elif at is not None:
                del self._deadlines[segment]
                yield segment

    def __len__(self) -> int:
        """Number of entries in the heap; at least the number of deadlines."""
        return len(self._heap)


class Retention(EvictionPolicy):
    """An eviction policy that orders segments by priority and time to live (in tiers), and segments of normal priority
    by another policy."""

    def __init__(self, policy: EvictionPolicy, high_room: Callable[[], int]) -> None:
        """`policy`: orders NORMAL segments. `high_room`: how many segments may be of high priority now."""
        self._policy = policy
        self._high_room = high_room
        self._tiers: tuple[EvictionPolicy, ...] = (
            LeastRecentlyUsed(),
            policy,
            LeastRecentlyUsed(),
            LeastRecentlyUsed(),
        )
        """The order of the segments in each tier, by number of the tier."""
        self._tier: dict[Segment, int] = {}
        """Number of the tier of each segment that is not in the tier NORMAL."""
        self._deadlines = Deadlines()

    def insert(self, segment: Segment, now: float) -> None:
        """Add `segment` to the order of the tier that its hints name, with its deadline if it has a time to live; see
        `EvictionPolicy`."""
        hints = segment.hints
        if not (hints.priority or hints.ttl_s):
            self._policy.insert(segment, now)
            return
        self._put(segment, _tier_of(hints), now)
        self._schedule(segment, now)

    def touch(self, segment: Segment, now: float) -> None:
        """Record an access of `segment`. Its time to live begins anew, and it may move to another tier. See
        `EvictionPolicy`."""
        hints = segment.hints
        if segment not in self._tier and not (hints.priority or hints.ttl_s):
            self._policy.touch(segment, now)
            return
        tier = self._move(segment, now)
        if tier is None or tier == _NORMAL:
            self._tiers[self._tier.get(segment, _NORMAL)].touch(segment, now)
            self._schedule(segment, now)

    def hints_changed(self, segment: Segment, now: float) -> None:
        """Move `segment` to the tier that its new hints name. Its time to live begins anew. See `EvictionPolicy`."""
        if self._move(segment, now) is None:
            self._tiers[self._tier.get(segment, _NORMAL)].hints_changed(segment, now)
            self._schedule(segment, now)

    def follow(self, segment: Segment, child: Segment) -> bool:
        """Move `segment` to the tier of `child`, and there behind it; see `EvictionPolicy`."""
        tier, touched = self._tier.get(child, _NORMAL), segment.touched
        moves = tier != self._tier.get(segment, _NORMAL)
        if moves:
            self._leave_tier(segment, tier)
        moves |= self._tiers[tier].follow(segment, child)
        segment.touched = touched
        return moves

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Take `segment` out of the order of its tier and cancel its deadline; see `EvictionPolicy`."""
        self._tiers[self._tier.pop(segment, _NORMAL)].remove(segment, now, evicted)
        self._deadlines.cancel(segment)

    def victim(self, now: float) -> Segment:
        """Returns the segment to evict next: one whose time to live has passed, else one of low priority, else one of
        normal, else one of high priority. See `EvictionPolicy`."""
        self._pass_time(now)
        for tier in _LEAVES_FIRST[:3]:
            if len(self._tiers[tier]):
                return self._tiers[tier].victim(now)
        return self._tiers[_HIGH].victim(now)

    def expired(self, now: float) -> bool:
        """Returns True if the time to live of some segment has passed."""
        self._pass_time(now)
        return len(self._tiers[_EXPIRED]) > 0

    def rule(self, segment: Segment) -> str:
        """Returns the name of the rule (time to live, or low priority) by which `segment` would be evicted; empty if
        the other policy decides."""
        return {_EXPIRED: "time to live", _LOW: "low priority"}.get(self._tier.get(segment, _NORMAL), "")

    def rank(self, segment: Segment, now: float) -> tuple[int, float, float]:
        """Returns a rank by which primary copies in order can be compared: those of a lower rank leave first."""
        tier = self._tier.get(segment, _NORMAL)
        value = self._policy.retention_value(segment, now) if tier == _NORMAL else 0.0
        return _LEAVES_FIRST.index(tier), value, segment.touched

    def retention_value(self, segment: Segment, now: float) -> float:
        """Returns the value of keeping `segment`: that of the other policy for normal priority, that of a new segment
        for high priority, otherwise 0. See `EvictionPolicy`."""
        tier = self._tier.get(segment, _NORMAL)
        if tier == _NORMAL:
            return self._policy.retention_value(segment, now)
        return self._policy.retention_value_of_new(segment.key, segment.hints, now) if tier == _HIGH else 0.0

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Returns the value of keeping a segment that would be stored now: that of the other policy, or 0 for low
        priority. See `EvictionPolicy`."""
        return self._policy.retention_value_of_new(key, hints, now) if hints.priority >= 0 else 0.0

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Returns True for a segment of high priority, and for every segment while there is one whose time to live has
        passed or whose priority is low; otherwise the other policy decides. See `EvictionPolicy`."""
        self._pass_time(now)
        if hints.priority > 0 or len(self._tiers[_EXPIRED]) or len(self._tiers[_LOW]):
            return True
        return self._policy.admits(key, hints, now)

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, last access record, seconds since then) of the last of `keys` that the other policy
        remembers; see `EvictionPolicy`."""
        return self._policy.last_access(keys, now)

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def __iter__(self) -> Iterator[Segment]:
        return itertools.chain.from_iterable(self._tiers[tier] for tier in _LEAVES_FIRST)

    @property
    def odds(self) -> Odds | None:
        """The model of re-use of the other policy; see `EvictionPolicy`."""
        return self._policy.odds

    def accesses(self, segment: Segment) -> int:
        """Returns the counted accesses that the other policy knows; see `EvictionPolicy`."""
        return self._policy.accesses(segment)

    def recall(self, key: SegmentKey, accesses: int, hints: Hints, now: float) -> None:
        """Tell the other policy of earlier accesses; see `EvictionPolicy`."""
        self._policy.recall(key, accesses, hints, now)

    def save(self) -> bytes:
        """Returns the statistics that the other policy has learned, encoded; see `EvictionPolicy`."""
        return self._policy.save()

    def exchange_among(self, nodes: int) -> None:
        """Set, for the other policy, the number of nodes that merge each other's statistics; see `EvictionPolicy`."""
        self._policy.exchange_among(nodes)

    def merge(self, learned: bytes) -> None:
        """Let the other policy take over half of the difference to another node's statistics; see `EvictionPolicy`."""
        self._policy.merge(learned)

    def restore(self, learned: bytes) -> None:
        """Let the other policy begin with saved statistics; see `EvictionPolicy`."""
        self._policy.restore(learned)

    # -- inside

    def _put(self, segment: Segment, tier: int, now: float) -> None:
        if tier != _NORMAL:
            self._tier[segment] = tier
        self._tiers[tier].insert(segment, now)
        if tier == _HIGH and len(self._tiers[_HIGH]) > self._high_room():
            # The deepest segments of a prompt were touched first, so the prompt keeps its beginning.
            self._leave_tier(self._tiers[_HIGH].victim(now), _NORMAL)

    def _move(self, segment: Segment, now: float) -> int | None:
        """Move the segment to the tier that its hints ask for. Returns the tier in which it is then, or None if it was
        there before."""
        before, tier = self._tier.get(segment, _NORMAL), _tier_of(segment.hints)
        if tier == before:
            return None
        self._tier.pop(segment, None)
        self._tiers[before].remove(segment, now, evicted=False)
        self._put(segment, tier, now)
        self._schedule(segment, now)
        return self._tier.get(segment, _NORMAL)

    def _leave_tier(self, segment: Segment, tier: int) -> None:
        """Move the segment to `tier` without an access: `touched` stays."""
        touched = segment.touched
        self._tiers[self._tier.pop(segment, _NORMAL)].remove(segment, touched, evicted=False)
        self._put(segment, tier, touched)
        # The other policy may have set a later time of access on insertion.
        segment.touched = touched
        self._schedule(segment, touched)

    def _schedule(self, segment: Segment, now: float) -> None:
        """Set the time at which the segment leaves its tier unless it is accessed before."""
        tier = self._tier.get(segment, _NORMAL)
        stay_s = segment.hints.ttl_s
        if tier == _HIGH:
            stay_s = min(stay_s or HIGH_S, HIGH_S)
        if not stay_s or tier == _EXPIRED:
            self._deadlines.cancel(segment)
        else:
            self._deadlines.set(segment, now + stay_s)

    def _pass_time(self, now: float) -> None:
        """Move segments whose time in their tier is over."""
        if not len(self._deadlines):
            return
        for segment in self._deadlines.passed(now):
            # The same sum as the one by which the deadline was set, so that both are rounded alike.
            expired = segment.hints.ttl_s > 0 and segment.touched + segment.hints.ttl_s <= now
            self._leave_tier(segment, _EXPIRED if expired else _NORMAL)

    def check_integrity(self) -> None:
        """Raises AssertionError when tiers are noted for other segments than those in order."""
        for tier in (_LOW, _HIGH, _EXPIRED):
            assert all(self._tier[segment] == tier for segment in self._tiers[tier])
        assert len(self._tier) == len(self) - len(self._policy)


def _tier_of(hints: Hints) -> int:
    return 1 + hints.priority
