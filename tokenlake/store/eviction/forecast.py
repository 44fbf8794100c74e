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
from collections import deque
from collections.abc import Iterator, Sequence

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.base import SAME_ACCESS_S
from tokenlake.store.eviction.odds import AGES, EDGES, Features, Odds
from tokenlake.store.eviction.remembering import Record, Remembering
from tokenlake.store.segment import Segment

__all__ = ["Forecast"]

LEARN_EVERY = 8
"""Moments at which something was used, from one learning to the next."""

LEARN_AT = 1024
"""Rows to learn from that wait for no such moment: in a quiet hour there is none, and runs come of age all the same."""


_depth = operator.attrgetter("depth")


class _Run:
    """Segments of one use of one prompt with equal features."""

    __slots__ = (
        "_order",
        "age",
        "at",
        "features",
        "here",
        "joined",
        "number",
        "prompt",
        "retention_value",
        "turn",
        "unused",
        "used"
    )  # fmt: skip

    def __init__(self, features: Features, retention_value: list[float], at: float, number: int) -> None:
        self.features = features
        self.retention_value = retention_value
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


_Record = Record[_Run]


class Forecast(Remembering[_Run]):
    """Its groups are runs."""

    def __init__(self) -> None:
        super().__init__()
        self._odds = Odds()
        self._heap: list[tuple[float, float, int, int, _Run]] = []
        self._live = 0
        """Runs with segments here."""
        self._ages: list[deque[_Run]] = [deque() for _ in range(AGES - 1)]
        self._young: dict[Features, _Run] = {}
        """Made a moment ago: the segments of one use come one by one."""
        self._young_since = 0.0
        self._runs = 0
        self._ripe = float("inf")
        """When the next run comes of age."""

    # -- what goes

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._advance(now)
        self._drop_void()
        if not self._heap:
            raise KeyError("no segment")
        return self._heap[0][-1].deepest()

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: uses per second."""
        self._advance(now)
        run = self._record(segment).group
        assert run is not None
        return run.retention_value[run.age]

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return self._odds.retention_value(self._odds.features(self._accesses_of_new(key), hints))[0]

    def remembers(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """See `EvictionPolicy`."""
        for index in range(len(keys) - 1, -1, -1):
            ghost = self._ghosts.get(keys[index])
            if ghost is not None:
                return index, ghost.access, max(0.0, now - ghost.counted)
        return None

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
        run = record.group
        if not again or run is None:
            self._leave_group(record)
            run = self._join_group(record, segment.hints)
        if not run.here:
            self._live += 1
            self._push(run)
        run.enter(segment, record)
        self._size += 1

    def _leave(self, segment: Segment) -> _Record:
        """Out of order; it ages on in its run."""
        record = self._record(segment)
        run = record.group
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
        heapq.heappush(self._heap, (run.retention_value[run.age], run.at, run.number, run.turn, run))
        if len(self._heap) > 4 * self._live + 256:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].turn]
            heapq.heapify(self._heap)

    def _used_again(self, record: _Record) -> None:
        run = record.group
        assert run is not None
        run.used += 1
        self._leave_group(record)
        if not run.unused and run.age < AGES - 1:
            self._odds.add(run.features, run.age, 1.0, run.says())

    def _used_something(self) -> None:
        if self._moments % LEARN_EVERY == 0:
            self._odds.learn()

    def _leave_group(self, record: _Record) -> None:
        if record.group is not None:
            record.group.unused -= 1
            record.group = None

    def _join_group(self, record: _Record, hints: Hints) -> _Run:
        features = self._odds.features(record.accesses, hints)
        run = self._young.get(features)
        if run is None:
            self._runs += 1
            run = self._young[features] = _Run(features, self._odds.retention_value(features), self._now, self._runs)
            self._ages[0].append(run)
            self._ripe = min(self._ripe, self._now + EDGES[1])
        run.unused += 1
        run.joined += 1
        access = hints.access
        run.prompt = max(run.prompt, access.segments - access.known if record.accesses == 1 else access.known)
        record.group = run
        return run

    # -- time

    def _time_passed(self, now: float) -> None:
        if now - self._young_since >= SAME_ACCESS_S:
            self._young.clear()
            self._young_since = now
        if now >= self._ripe:
            self._age(now)

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
        for run in live:
            assert len(run.here) <= run.unused
            assert all(record.group is run for record in run.here.values())
        assert all(record.group is not None for record in self._ghosts.values())
