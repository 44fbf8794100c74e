"""The learned re-use index: what was used again how soon says what is worth keeping now (`hazard.py`).

::

    queues      one per class, by last use: [oldest ... youngest]; the coldest is the oldest of some class
    batches     what was used at one moment in one class ages together: a queue of batches for each age but the last
    ghosts      records of segments that are gone (`remembering.py`)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from tokenlake.hints import NO_HINTS, AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.store.eviction.hazard import ACCESSES, AGES, EDGES, UNLABELLED, Hazards
from tokenlake.store.eviction.remembering import Record, Remembering
from tokenlake.store.segment import Segment

__all__ = ["LearnedReuse"]

LEARN_EVERY = 50
"""Moments at which something was used, from one making of the tables to the next."""
MOMENT_S = 0.1
"""What is used within so long is used at one moment: a prompt's segments are, though they arrive one by one."""
LATE_S = 0.25
"""So much later than due a batch may come of age: most of the work is to look which do."""


class _Batch:
    """Records of one class last used at one moment."""

    __slots__ = ("age", "at", "cls", "members", "size")

    def __init__(self, cls: int, at: float) -> None:
        self.cls = cls
        self.at = at
        self.age = 0
        """Bucket."""
        self.size = 0
        """How many joined."""
        self.members = 0
        """How many of them are in it still."""

    def weight(self) -> float:
        """Of a member, in the statistics: what one prompt used at once is not many experiences but hardly more than
        one."""
        return float(self.size**-0.5)


_Record = Record[_Batch]


class _Queue:
    """Segments of one class, and what the first of them is worth."""

    __slots__ = ("accesses", "head", "order", "retention_value")

    def __init__(self, accesses: int) -> None:
        self.accesses = accesses
        """Bucket."""
        self.order: OrderedDict[Segment, _Record] = OrderedDict()
        self.head: Segment | None = None
        """None: to be looked at."""
        self.retention_value = 0.0


class LearnedReuse(Remembering[_Batch]):
    """The default."""

    def __init__(self) -> None:
        super().__init__()
        self._hazards = Hazards()
        self._queues: list[_Queue] = []
        self._ages: list[deque[_Batch]] = [deque() for _ in range(AGES - 1)]
        self._young: list[_Batch | None] = []
        """By class the newest batch."""
        self._ripe = float("inf")
        """When the next batch comes of age."""
        self._hints, self._label = NO_HINTS, UNLABELLED
        self._grow()

    # -- what goes

    def coldest(self, now: float) -> Segment:
        """See `EvictionPolicy`."""
        self._advance(now)
        coldest: _Queue | None = None
        for queue in self._queues:
            if not queue.order:
                continue
            if queue.head is None:
                self._look_at(queue)
            # Of equals those used less: a child is in the class of its parent, where it is older, or in one before.
            if coldest is None or (queue.retention_value, queue.accesses) < (coldest.retention_value, coldest.accesses):
                coldest = queue
        if coldest is None or coldest.head is None:
            raise KeyError("no segment")
        return coldest.head

    def retention_value(self, segment: Segment, now: float) -> float:
        """See `EvictionPolicy`: uses per second."""
        self._advance(now)
        return self._retention_value_of(self._record(segment))

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """See `EvictionPolicy`."""
        return self._hazards.retention_value[self._class_of(self._accesses_of_new(key), hints)][0]

    def remembers(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Not how it was used."""
        return None

    def __iter__(self) -> Iterator[Segment]:
        for queue in sorted((queue for queue in self._queues if queue.order), key=self._first_value):
            yield from queue.order

    def save(self) -> bytes:
        """See `EvictionPolicy`."""
        return self._hazards.save()

    def absorb(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        self._hazards.absorb(learned)
        self._grow()
        self._look_anew()

    def restore(self, learned: bytes) -> None:
        """See `EvictionPolicy`."""
        if learned:
            self._hazards.restore(learned)
            self._grow()

    # -- inside

    def _class_of(self, accesses: int, hints: Hints) -> int:
        if hints is not self._hints:
            # Mostly that of the segment before: both are of one prompt.
            self._hints, self._label = hints, self._hazards.label(hints)
            self._grow()
        return self._hazards.class_of(accesses, self._label)

    def _grow(self) -> None:
        """There are new labels."""
        while len(self._queues) < len(self._hazards.retention_value):
            self._queues.append(_Queue(len(self._queues) % ACCESSES))
            self._young.append(None)

    def _enter(self, segment: Segment, record: _Record, again: bool = False) -> None:
        """To the young end of its class. `again`: as old as it is, if the class is still the same."""
        segment.touched = self._now
        cls = self._class_of(record.accesses, segment.hints)
        if not again or record.group is None or record.group.cls != cls:
            self._leave_group(record)
            self._join_group(record, segment.hints)
        queue = self._queues[cls]
        if not queue.order:
            queue.head = None
        queue.order[segment] = record
        self._size += 1

    def _leave(self, segment: Segment) -> _Record:
        """Out of its queue; it ages on in its batch."""
        record = self._record(segment)
        assert record.group is not None
        queue = self._queues[record.group.cls]
        del queue.order[segment]
        if queue.head is segment:
            queue.head = None
        self._size -= 1
        return record

    def _used_again(self, record: _Record) -> None:
        batch = record.group
        assert batch is not None
        weight = batch.weight()
        self._hazards.used[batch.cls][batch.age] += weight
        self._hazards.ended[batch.cls][batch.age] += weight
        self._leave_group(record)

    def _used_something(self) -> None:
        if self._moments % LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        self._hazards.learn()
        self._look_anew()

    def _look_anew(self) -> None:
        """Tables are others than before."""
        for queue in self._queues:
            queue.head = None

    def _leave_group(self, record: _Record) -> None:
        if record.group is not None:
            record.group.members -= 1
            record.group = None

    def _join_group(self, record: _Record, hints: Hints) -> _Batch:
        cls = self._class_of(record.accesses, hints)
        batch = self._young[cls]
        if batch is None or self._now >= batch.at + MOMENT_S:
            batch = self._young[cls] = _Batch(cls, self._now)
            self._ages[0].append(batch)
            self._ripe = min(self._ripe, self._now + EDGES[1])
        batch.size += 1
        batch.members += 1
        record.group = batch
        return batch

    def _look_at(self, queue: _Queue) -> None:
        queue.head, record = next(iter(queue.order.items()))
        queue.retention_value = self._retention_value_of(record)

    def _first_value(self, queue: _Queue) -> float:
        return self._retention_value_of(next(iter(queue.order.values())))

    def _retention_value_of(self, record: _Record) -> float:
        assert record.group is not None
        return self._hazards.retention_value[record.group.cls][record.group.age]

    # -- time

    def _time_passed(self, now: float) -> None:
        if now >= self._ripe:
            self._age(now)

    def _age(self, now: float) -> None:
        """Batches that are old enough go on to the next age."""
        self._ripe = float("inf")
        for age in range(AGES - 1):
            batches, edge = self._ages[age], EDGES[age + 1]
            while batches and batches[0].at + edge <= now:
                batch = batches.popleft()
                if batch.members:
                    self._hazards.ended[batch.cls][age] += batch.members * batch.weight()
                    batch.age = age + 1
                    if batch.age < AGES - 1:
                        self._ages[batch.age].append(batch)
                    self._queues[batch.cls].head = None
            if batches:
                self._ripe = min(self._ripe, batches[0].at + edge)
        self._ripe = max(self._ripe, now + LATE_S)

    def check_integrity(self) -> None:
        """AssertionError when sizes, batches or bounds do not add up."""
        assert self._size == sum(len(queue.order) for queue in self._queues)
        super().check_integrity()
        records = [record for queue in self._queues for record in queue.order.values()]
        records += self._ghosts.values()
        members: dict[_Batch, int] = {}
        for record in records:
            assert record.group is not None
            members[record.group] = members.get(record.group, 0) + 1
        batches = [batch for queue in self._ages for batch in queue]
        # Those that are set aside are in a batch too.
        assert all(count <= batch.members for batch, count in members.items())
        assert len(batches) == len(dict.fromkeys(batches))
        assert all(batch.age == AGES - 1 or batch in batches for batch in members)
