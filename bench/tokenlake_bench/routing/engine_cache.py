"""The GPU cache of one engine instance: the blocks of the requests under way, and behind them a prefix cache, which
keeps the segments of finished requests until their blocks are needed (as in vLLM).

::

    |== segments that requests under way share ==|== rest of prompts, answers ==|== prefix cache (LRU) ==|
     `- found by later requests ----------------------------------------------------------------------'
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tokenlake_bench.routing.instance import Job


class CacheChange(NamedTuple):
    """Segments that entered an engine's cache, and segments that were evicted from it."""

    added: list[int]
    evicted: list[int]


def further_segments(job: Job, segments: int, segment_tokens: int) -> int:
    """Number of segments that a request takes beside the `segments` full ones of its prompt: for the end of its prompt
    and its answer."""
    return -(-(job.prompt + job.output) // segment_tokens) - segments


class EngineCache:
    """The GPU cache of one instance, of `capacity` segments. Segments are named by ids.

    A request finds the segments of a request that began before it at the same instance, even while these are being
    computed: its own tokens are computed later. Segments of requests under way are never evicted; requests that
    together need more than the capacity leave no prefix cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._users: dict[int, int] = {}
        """Number of requests under way that have each segment."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The segments that no request under way has, the next victim first."""
        self._requests: dict[int, tuple[tuple[int, ...], int]] = {}
        """By number of each request under way: its segments, and the number of further segments that it takes."""
        self._further = 0
        """Sum of these further segments."""

    def __contains__(self, segment: int) -> bool:
        return segment in self._users or segment in self._idle

    def match(self, chain: tuple[int, ...]) -> int:
        """Length in segments of the longest prefix of `chain` in the cache; does not count as an access."""
        for depth, segment in enumerate(chain):
            if segment not in self:
                return depth
        return len(chain)

    def begin(self, number: int, chain: tuple[int, ...], further: int) -> CacheChange:
        """Let a request take its segments `chain` and `further` ones: the end of its prompt, and its answer."""
        added: list[int] = []
        for segment in chain:
            if segment in self._idle:
                del self._idle[segment]
            elif segment not in self._users:
                added.append(segment)
            self._users[segment] = self._users.get(segment, 0) + 1
        self._requests[number] = chain, further
        self._further += further
        return CacheChange(added, self._shrink())

    def end(self, number: int) -> CacheChange:
        """End a request: its segments stay as prefix cache, of which its first segment is evicted last."""
        chain, further = self._requests.pop(number)
        self._further -= further
        for segment in reversed(chain):
            self._users[segment] -= 1
            if not self._users[segment]:
                del self._users[segment]
                self._idle[segment] = None
        return CacheChange([], self._shrink())

    def clear(self) -> CacheChange:
        """Evict what no request under way has."""
        evicted = list(self._idle)
        self._idle.clear()
        return CacheChange([], evicted)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts differ from those of the requests under way."""
        users: dict[int, int] = {}
        for chain, _ in self._requests.values():
            for segment in chain:
                users[segment] = users.get(segment, 0) + 1
        assert users == self._users
        assert not users.keys() & self._idle.keys()
        assert self._further == sum(further for _, further in self._requests.values())
        assert not self._idle or len(users) + len(self._idle) + self._further <= self._capacity

    def _shrink(self) -> list[int]:
        room = max(0, self._capacity - len(self._users) - self._further)
        return [self._idle.popitem(last=False)[0] for _ in range(len(self._idle) - room)]
