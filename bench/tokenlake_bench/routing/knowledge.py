"""Routers' knowledge of the instances' caches: their exact content, or a record of the requests sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenlake_bench.baselines import Lru


class TrackedCaches:
    """LRU caches of all instances, and an index of the instances that hold each segment or are about to compute it. As
    knowledge of a router it is exact; chains and lengths are in segments.

    A segment's parents may be evicted before it: like the engines' own caches, a cache finds the contiguous prefix
    only.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._caches = [Lru(capacity) for capacity in capacities]
        self._promised: list[Counter[int]] = [Counter() for _ in capacities]
        """By instance, per segment the number of prompts with this segment that are sent to the instance and not
        computed yet."""
        self._owners: dict[int, int] = {}
        """By segment, a bit set of the instances that hold the segment or will compute it; segments without such an
        instance have no entry."""

    def match(self, chain: tuple[int, ...], instance: int) -> int:
        """Length in segments of the longest prefix of `chain` in the cache of one instance; does not count as an
        access."""
        return self._caches[instance].match(chain)

    def touch(self, chain: tuple[int, ...], instance: int) -> None:
        """Add or access all segments of a prompt at the instance; the first segment becomes the most recently used."""
        self._note_owner(chain, instance)
        self._drop(self._caches[instance].touch(chain), instance)

    def promise(self, chain: tuple[int, ...], instance: int) -> None:
        """Record that the instance is about to compute those segments of the prompt that it does not hold."""
        self._promised[instance].update(chain)
        self._note_owner(chain, instance)

    def keep(self, chain: tuple[int, ...], instance: int) -> None:
        """Record that the instance computed a prompt that was announced by `promise`; its first segment becomes the
        most recently used."""
        promised = self._promised[instance]
        promised.subtract(chain)
        for segment in chain:
            if not promised[segment]:
                del promised[segment]
        self.touch(chain, instance)

    def withdraw(self, segments: Sequence[int], instance: int) -> None:
        """Undo `promise` for segments that the instance neither computes nor has in its GPU cache any more."""
        promised, cache = self._promised[instance], self._caches[instance]
        promised.subtract(segments)
        gone = [segment for segment in segments if not promised[segment]]
        for segment in gone:
            del promised[segment]
        self._drop((segment for segment in gone if segment not in cache), instance)

    def resize(self, instance: int, capacity: int) -> None:
        """Set the number of segments that the cache of one instance may hold."""
        self._drop(self._caches[instance].resize(capacity), instance)

    def copies_per_segment(self) -> float:
        """Mean number of copies of the segments that some cache holds; 0 without any."""
        held = sum(len(cache) for cache in self._caches)
        distinct = len(set().union(*self._caches))
        return held / distinct if distinct else 0.0

    def depths(self, chain: tuple[int, ...]) -> list[int]:
        """Length of the longest prefix of `chain` at each instance, as far as the router knows."""
        depths = [0] * len(self._caches)
        still = (1 << len(self._caches)) - 1
        for depth, segment in enumerate(chain):
            here = self._owners.get(segment, 0)
            if depth:
                _note(depths, still & ~here, depth)
            still &= here
            if not still:
                return depths
        _note(depths, still, len(chain))
        return depths

    def sizes(self) -> list[int]:
        """Number of segments held by each instance, as far as the router knows."""
        return [len(cache) for cache in self._caches]

    def coldest(self, instance: int) -> Iterator[int]:
        """Segments of an instance in the order in which they will be evicted, as far as the router knows."""
        return iter(self._caches[instance])

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """The router sent a prompt to the instance. Does nothing here, because this knowledge follows the caches
        themselves."""

    def _note_owner(self, chain: Iterable[int], instance: int) -> None:
        bit = 1 << instance
        for segment in chain:
            self._owners[segment] = self._owners.get(segment, 0) | bit

    def _drop(self, segments: Iterable[int], instance: int) -> None:
        bit, promised = 1 << instance, self._promised[instance]
        for segment in segments:
            if segment in promised:
                continue
            left = self._owners[segment] & ~bit
            if left:
                self._owners[segment] = left
            else:
                del self._owners[segment]


class OwnRecord(TrackedCaches):
    """A router's own record of the prompts that it sent: their segments count as cached at the instance from then on,
    as the router does not see evictions. It keeps at most `remembered` segments per instance and forgets the least
    recently sent first."""

    def __init__(self, instances: int, remembered: int) -> None:
        super().__init__([remembered] * instances)

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        self.touch(chain, instance)


def _note(depths: list[int], instances: int, depth: int) -> None:
    """Set `depths[i]` to `depth` for each instance i whose bit is set in the bit set `instances`."""
    while instances:
        bit = instances & -instances
        depths[bit.bit_length() - 1] = depth
        instances ^= bit
