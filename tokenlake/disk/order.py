"""The order in which segments leave a slab: by the retention values of the learned policy of memory, in groups.

Segments that were accessed at about the same time, with equal features (the inputs of the model of re-use), form a
group: the model values them alike at every age. The group of least value gives a segment up first, and of one group the
segment that left memory first, which is the deepest of its prompt.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Callable

from tokenlake.disk.index import NO_NEIGHBOUR, Index
from tokenlake.memory.eviction.odds import EDGES, Features, Odds
from tokenlake.memory.eviction.records import GHOST_S

TOGETHER_S = 10.0
"""Seconds within which accesses fall into one group."""


class _Group:
    __slots__ = ("age", "at", "entry", "head", "name", "number", "size", "tail", "used")

    def __init__(self, number: int, name: tuple[int, Features], at: float) -> None:
        self.number = number
        self.name = name
        self.at = at
        """Time in seconds of the accesses."""
        self.age = 0
        self.head = self.tail = NO_NEIGHBOUR
        self.size = 0
        self.used = 0
        """Number of entries that left within the present bucket of age because they were accessed again."""
        self.entry = 0
        """Number of the group's valid entry in the heap."""


class Order:
    """The entries of one slab that may leave it."""

    def __init__(self, index: Index, odds: Callable[[], Odds]) -> None:
        """`odds`: returns the model of re-use that memory learns for segments of this tenant and size."""
        self._index = index
        self._odds = odds
        self._groups: dict[int, _Group] = {}
        self._names: dict[tuple[int, Features], _Group] = {}
        self._heap: list[tuple[float, int, int]] = []
        """(retention value, number of the group, number of the heap entry): the group to evict from next is first."""
        self._aging: list[tuple[float, int]] = []
        """(time in seconds, number of the group): when each group reaches its next bucket of age."""
        self._made = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def enter(self, entry: int, features: Features, at: float, now: float) -> None:
        """Add an entry whose segment was accessed last at `at`. `features`: those of that access."""
        name = (int(at / TOGETHER_S), features)
        group = self._names.get(name)
        if group is None:
            group = self._make(name, at, now)
        index = self._index
        index.groups[entry] = group.number
        index.previous[entry], index.next[entry] = group.tail, NO_NEIGHBOUR
        if group.tail == NO_NEIGHBOUR:
            group.head = entry
        else:
            index.next[group.tail] = entry
        group.tail = entry
        group.size += 1
        self._size += 1

    def leave(self, entry: int, used: bool = False) -> None:
        """Take an entry out of the order. `used`: its segment is accessed again."""
        index = self._index
        group = self._groups[index.groups[entry]]
        group.used += used
        before, behind = index.previous[entry], index.next[entry]
        if before == NO_NEIGHBOUR:
            group.head = behind
        else:
            index.next[before] = behind
        if behind == NO_NEIGHBOUR:
            group.tail = before
        else:
            index.previous[behind] = before
        index.groups[entry] = 0
        group.size -= 1
        self._size -= 1
        if not group.size:
            self._learn(group)
            del self._groups[group.number], self._names[group.name]

    def accessed_at(self, entry: int) -> float:
        """Returns the time of the last access of an entry in order, as its group has it."""
        return self._groups[self._index.groups[entry]].at

    def victim(self, now: float) -> tuple[int, float] | None:
        """Returns (the entry that leaves next, its retention value now); None when there is none."""
        self._age(now)
        heap = self._heap
        while heap:
            value, number, valid = heap[0]
            group = self._groups.get(number)
            if group is not None and group.entry == valid:
                return group.head, value
            heapq.heappop(heap)
        return None

    def _make(self, name: tuple[int, Features], at: float, now: float) -> _Group:
        self._made += 1
        group = _Group(self._made, name, at)
        self._groups[group.number] = self._names[name] = group
        group.age = max(0, bisect_right(EDGES, now - at) - 1)
        self._push(group)
        return group

    def _push(self, group: _Group) -> None:
        group.entry += 1
        value = self._odds().retention_value(group.name[1])[group.age]
        heapq.heappush(self._heap, (value, group.number, group.entry))
        if group.age + 1 < len(EDGES):
            heapq.heappush(self._aging, (group.at + EDGES[group.age + 1], group.number))
            if len(self._aging) > 4 * len(self._groups) + 256:
                self._aging = [(at, number) for at, number in self._aging if number in self._groups]
                heapq.heapify(self._aging)
        if len(self._heap) > 4 * len(self._groups) + 256:
            alive = ((value, number, at) for value, number, at in self._heap if number in self._groups)
            self._heap = [each for each in alive if self._groups[each[1]].entry == each[2]]
            heapq.heapify(self._heap)

    def _age(self, now: float) -> None:
        while self._aging and self._aging[0][0] <= now:
            number = heapq.heappop(self._aging)[1]
            group = self._groups.get(number)
            if group is not None:
                self._learn(group)
                group.age = max(group.age, bisect_right(EDGES, now - group.at) - 1)
                self._push(group)

    def _learn(self, group: _Group) -> None:
        """Let the model learn how many of the group were accessed again in its present bucket of age, if memory has
        forgotten them by then."""
        used, group.used = group.used, 0
        if used + group.size and group.age + 1 < len(EDGES) and EDGES[group.age] >= GHOST_S:
            members = used + group.size
            self._odds().add(group.name[1], group.age, used / members, members)

    def check_integrity(self) -> None:
        """Raises AssertionError when the links of a group or the sizes do not add up."""
        index: Index = self._index
        counted = 0
        for number, group in self._groups.items():
            members: array[int] = array("I")
            at, before = group.head, NO_NEIGHBOUR
            while at != NO_NEIGHBOUR:
                assert index.groups[at] == number
                assert index.previous[at] == before
                members.append(at)
                before, at = at, index.next[at]
            assert group.tail == before
            assert len(members) == group.size > 0
            assert self._names[group.name] is group
            counted += group.size
        assert counted == self._size
        assert len(self._names) == len(self._groups)
        live = [number for _, number, entry in self._heap if (g := self._groups.get(number)) and g.entry == entry]
        assert sorted(live) == sorted(self._groups)
