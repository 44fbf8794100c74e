"""Forecast of re-use: what a request used together comes again together, or not; how soon is foretold from how the
request came about (`odds.py`): how much of its prompt was found, which turn of a conversation it is, how long ago the
last one was, how often the segments were used.

::

    run         the segments of one use of one prompt with equal features; they age together
    heap        runs that hold segments here, by what they are worth at their age; within one the deepest goes first
    ghosts      records of segments that are gone, in order of their going
"""

from __future__ import annotations

import heapq
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator

from tokenlake.advice import NO_USE, Advice, Use
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_USE_S
from tokenlake.store.eviction.odds import AGES, EDGES, Features, Odds
from tokenlake.store.segment import Segment

__all__ = ["Forecast"]

GHOST_S = 900.0
"""How long a segment is remembered after it went."""
LEAST_GHOSTS, GHOSTS_EACH = 1 << 14, 4
"""At most so many are remembered, or so many for each segment in order if that is more."""
LEARN_EVERY = 8
"""Moments at which something was used, from one learning to the next."""

LEARN_AT = 1024
"""Rows to learn from that wait for no such moment: in a quiet hour there is none, and runs come of age all the same."""


_depth = operator.attrgetter("depth")


class _Run:
    """Segments of one use of one prompt with equal features."""

    __slots__ = (
        "_order", "age", "at", "features", "here", "joined", "number", "prompt", "turn", "unused", "used", "worth"
    )  # fmt: skip

    def __init__(self, features: Features, worth: list[float], at: float, number: int) -> None:
        self.features = features
        self.worth = worth
        """By age, as foretold when it was made."""
        self.at = at
        self.number = number
        """Runs are numbered as they come."""
        self.age = 0
        """Bucket."""
        self.unused = 0
        """Segments not used again yet, here or gone."""
        self.used = 0
        """Of them those used again at this age."""
        self.joined = 0
        """Segments that ever were in it."""
        self.prompt = 0
        """Segments of the prompt that are as new as these, on all nodes."""
        self.here: dict[Segment, _Record] = {}
        self._order: list[Segment] | None = None
        """Those that are here by depth, and some that left; None: to be made anew."""
        self.turn = 0
        """Entries of the heap with another one are void."""

    def says(self) -> float:
        """Of how many segments it tells at its age what became of them: those of the prompt that lie elsewhere have the
        same future, and nodes that see a part each shall learn as fast as one that sees all."""
        return (self.used + self.unused) * max(1.0, self.prompt / self.joined)

    def enter(self, segment: Segment, record: _Record) -> None:
        """It is here."""
        self.here[segment] = record
        self._order = None

    def deepest(self) -> Segment:
        """Of those that are here; there are some. What lies behind a gap was touched before what fills the gap came, so
        that the order in which they came says nothing."""
        if self._order is None:
            self._order = sorted(self.here, key=_depth, reverse=True)
            self._order.reverse()
        while self._order[-1] not in self.here:
            self._order.pop()
        return self._order[-1]


class _Record:
    """What is known of a segment: in order, set aside, or gone."""

    __slots__ = ("counted", "gone", "run", "use", "uses")

    def __init__(self, now: float) -> None:
        self.uses = 0
        self.counted = now - SAME_USE_S
        """When its last use was."""
        self.gone = 0.0
        """When it was evicted or refused."""
        self.use: Use = NO_USE
        """Of what is gone: how it was used last."""
        self.run: _Run | None = None


class Forecast:
    """Evicts what earns the fewest uses for the time that it will be held; a newcomer that would earn fewer than that
    stays out."""

    def __init__(self) -> None:
        self._odds = Odds()
        self._heap: list[tuple[float, float, int, int, _Run]] = []
        self._live = 0
        """Runs with segments here."""
        self._ages: list[deque[_Run]] = [deque() for _ in range(AGES - 1)]
        self._young: dict[Features, _Run] = {}
        """Made a moment ago: the segments of one use come one by one."""
        self._young_since = 0.0
        self._ghosts: OrderedDict[SegmentKey, _Record] = OrderedDict()
        self._size = 0
        self._now = 0.0
        self._moment = 0.0
        """When something was used last."""
        self._moments = 0
        self._runs = 0
        self._ripe = float("inf")
        """When the next run comes of age."""

    # -- segments

    def insert(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if isinstance(segment.record, _Record):
            self._enter(segment, segment.record, again=True)
            return
        ghost = self._ghosts.pop(segment.key, None)
        record = segment.record = _Record(now) if ghost is None else ghost
        self._count_use(record, now)
        self._enter(segment, record)

    def touch(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        record = self._leave(segment)
        if now - record.counted >= SAME_USE_S:
            self._count_use(record, now)
        self._enter(segment, record)

    def advised(self, segment: Segment, now: float) -> None:
        """See `EvictionPolicy`; whoever speaks of it had it in use until now."""
        self._advance(now)
        self._enter(segment, self._leave(segment))

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        # It ages on: whether it is used again while it is away, and after how long, is to be learned in any case.
        record = self._leave(segment)
        if evicted:
            self._remember(segment.key, record, segment.advice, now)

    # -- what goes

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._advance(now)
        self._drop_void()
        if not self._heap:
            raise KeyError("no segment")
        return self._heap[0][-1].deepest()

    def worth(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: uses per second."""
        self._advance(now)
        run = _record(segment).run
        assert run is not None
        return run.worth[run.age]

    def worth_of_new(self, key: SegmentKey, advice: Advice, now: float) -> float:
        """See `EvictionPolicy`."""
        ghost = self._ghosts.get(key)
        uses = ghost.uses + 1 if ghost is not None else 1
        return self._odds.worth(self._odds.features(uses, advice))[0]

    def admits(self, key: SegmentKey, advice: Advice, now: float) -> bool:
        """See `EvictionPolicy`."""
        now = self._advance(now)
        if not self._size or self.worth_of_new(key, advice, now) >= self.worth(self.coldest(now), now):
            return True
        ghost = self._ghosts.pop(key, None)
        record = _Record(now) if ghost is None else ghost
        if now - record.counted >= SAME_USE_S:
            self._count_use(record, now)
        self._leave_run(record)
        self._join_run(record, advice)
        self._remember(key, record, advice, now)
        return False

    def remembers(self, key: SegmentKey, now: float) -> tuple[Use, float] | None:
        """See `EvictionPolicy`."""
        ghost = self._ghosts.get(key)
        return None if ghost is None else (ghost.use, max(0.0, now - ghost.counted))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Segment]:
        # From the root of the heap downwards, the least of those in sight first: who looks looks at the first few.
        in_sight = [(entry, 0) for entry in self._heap[:1]]
        while in_sight:
            (*_, turn, run), at = heapq.heappop(in_sight)
            if turn == run.turn:
                yield from sorted(run.here, key=_depth, reverse=True)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(self._heap):
                    heapq.heappush(in_sight, (self._heap[child], child))

    def save(self) -> bytes:
        """See `EvictionPolicy`."""
        return self._odds.save()

    def absorb(self, learned: bytes) -> None:
        """See `EvictionPolicy`; for runs to come."""
        self._odds.absorb(learned)

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        if learned:
            self._odds.restore(learned)

    # -- inside

    def _enter(self, segment: Segment, record: _Record, again: bool = False) -> None:
        """Into a run of this moment. `again`: into the one that it was in."""
        segment.touched = self._now
        run = record.run
        if not again or run is None:
            self._leave_run(record)
            run = self._join_run(record, segment.advice)
        if not run.here:
            self._live += 1
            self._push(run)
        run.enter(segment, record)
        self._size += 1

    def _leave(self, segment: Segment) -> _Record:
        """Out of order; it ages on in its run."""
        record = _record(segment)
        run = record.run
        assert run is not None
        del run.here[segment]
        if not run.here:
            self._live -= 1
            run.turn += 1
        self._size -= 1
        return record

    def _drop_void(self) -> None:
        """So that the first entry of the heap is the coldest run with segments here."""
        while self._heap and self._heap[0][3] != self._heap[0][4].turn:
            heapq.heappop(self._heap)

    def _push(self, run: _Run) -> None:
        run.turn += 1
        # Of equals the older goes first, and of one request the deeper, which came first.
        heapq.heappush(self._heap, (run.worth[run.age], run.at, run.number, run.turn, run))
        if len(self._heap) > 4 * self._live + 256:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].turn]
            heapq.heapify(self._heap)

    def _count_use(self, record: _Record, now: float) -> None:
        """A use of it, which is a re-use if it ages in some run; not any more."""
        run = record.run
        if run is not None:
            run.used += 1
            self._leave_run(record)
            if not run.unused and run.age < AGES - 1:
                self._odds.add(run.features, run.age, 1.0, run.says())
        record.uses += 1
        record.counted = now
        if now > self._moment:
            self._moment = now
            self._moments += 1
            if self._moments % LEARN_EVERY == 0:
                self._odds.learn()

    def _leave_run(self, record: _Record) -> None:
        if record.run is not None:
            record.run.unused -= 1
            record.run = None

    def _join_run(self, record: _Record, advice: Advice) -> _Run:
        features = self._odds.features(record.uses, advice)
        run = self._young.get(features)
        if run is None:
            self._runs += 1
            run = self._young[features] = _Run(features, self._odds.worth(features), self._now, self._runs)
            self._ages[0].append(run)
            self._ripe = min(self._ripe, self._now + EDGES[1])
        run.unused += 1
        run.joined += 1
        use = advice.use
        run.prompt = max(run.prompt, use.segments - use.known if record.uses == 1 else use.known)
        record.run = run
        return run

    def _remember(self, key: SegmentKey, record: _Record, advice: Advice, now: float) -> None:
        record.gone = now
        record.use = advice.use
        self._ghosts[key] = record
        limit = max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        forgotten = 0
        while self._ghosts and (len(self._ghosts) > limit or (forgotten < 4 and self._oldest_gone(now))):
            _, ghost = self._ghosts.popitem(last=False)
            self._leave_run(ghost)
            forgotten += 1

    def _oldest_gone(self, now: float) -> bool:
        return next(iter(self._ghosts.values())).gone + GHOST_S < now

    # -- time

    def _advance(self, now: float) -> float:
        """Up to `now`, or up to the latest time heard of: what comes back from a pin comes with an earlier one."""
        if now <= self._now:
            return self._now
        self._now = now
        if now - self._young_since >= SAME_USE_S:
            self._young.clear()
            self._young_since = now
        if now >= self._ripe:
            self._age(now)
        return now

    def _age(self, now: float) -> None:
        """Runs that are old enough go on to the next age."""
        self._ripe = float("inf")
        for age in range(AGES - 1):
            runs, edge = self._ages[age], EDGES[age + 1]
            while runs and runs[0].at + edge <= now:
                self._grow_older(runs.popleft(), age + 1)
            if runs:
                self._ripe = min(self._ripe, runs[0].at + edge)
        if self._odds.waiting >= LEARN_AT:
            self._odds.learn()

    def _grow_older(self, run: _Run, age: int) -> None:
        if not run.unused:
            return
        self._odds.add(run.features, age - 1, run.used / (run.used + run.unused), run.says())
        run.age, run.used = age, 0
        if age < AGES - 1:
            self._ages[age].append(run)
        if run.here:
            self._push(run)

    def check_integrity(self) -> None:
        """AssertionError when sizes, runs or bounds do not add up."""
        live = [run for *_, turn, run in self._heap if turn == run.turn and run.here]
        assert len(live) == self._live == len({run.number for run in live})
        assert self._size == sum(len(run.here) for run in live)
        assert len(self._ghosts) <= max(LEAST_GHOSTS, GHOSTS_EACH * self._size)
        for run in live:
            assert len(run.here) <= run.unused
            assert all(record.run is run for record in run.here.values())
        assert all(record.run is not None for record in self._ghosts.values())


def _record(segment: Segment) -> _Record:
    record = segment.record
    assert isinstance(record, _Record)
    return record
