"""What routers know of caches: everything, or only what they sent where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenlake_bench.baselines import Lru

__all__ = ["OwnRecord", "TrackedCaches"]


class TrackedCaches:
    """LRU caches of many instances, and which of them hold a segment, or will once they computed what they were sent.
    A `Knowledge` that is always right.

    An id's parents may be held or not: like the engines' own, a cache finds the contiguous prefix only.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._caches = [Lru(capacity) for capacity in capacities]
        self._promised: list[Counter[int]] = [Counter() for _ in capacities]
        """Per instance, how many of the prompts that it has still to compute have a segment."""
        self._owners: dict[int, int] = {}
        """Bit set of the instances that hold a segment or were promised it; no entry without a bit."""

    def match(self, chain: tuple[int, ...], instance: int) -> int:
        """Segments of the longest prefix at one instance; does not touch."""
        return self._caches[instance].match(chain)

    def touch(self, chain: tuple[int, ...], instance: int) -> None:
        """Hold all of it there, its first segment as the most recent."""
        self._note_owner(chain, instance)
        self._drop(self._caches[instance].touch(chain), instance)

    def promise(self, chain: tuple[int, ...], instance: int) -> None:
        """The instance is going to compute what it does not hold of it."""
        self._promised[instance].update(chain)
        self._note_owner(chain, instance)

    def keep(self, chain: tuple[int, ...], instance: int) -> None:
        """It has: what was promised is touched."""
        promised = self._promised[instance]
        promised.subtract(chain)
        for segment in chain:
            if not promised[segment]:
                del promised[segment]
        self.touch(chain, instance)

    def resize(self, instance: int, capacity: int) -> None:
        """Segments that one instance has room for from now on."""
        self._drop(self._caches[instance].resize(capacity), instance)

    def copies_per_segment(self) -> float:
        """Mean over the segments that are held; 0 when none is."""
        held = sum(len(cache) for cache in self._caches)
        return held / len(self._owners) if self._owners else 0.0

    def depths(self, chain: tuple[int, ...]) -> list[int]:
        """See `Knowledge`."""
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
        """See `Knowledge`."""
        return [len(cache) for cache in self._caches]

    def coldest(self, instance: int) -> Iterator[int]:
        """See `Knowledge`."""
        return iter(self._caches[instance])

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """The caches themselves tell."""

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
    """What was sent where, as if it were cached from then on; evictions go unseen. At most `remembered` segments per
    instance, least recently sent forgotten first."""

    def __init__(self, instances: int, remembered: int) -> None:
        super().__init__([remembered] * instances)

    def sent(self, chain: tuple[int, ...], instance: int) -> None:
        """See `Knowledge`."""
        self.touch(chain, instance)


def _note(depths: list[int], instances: int, depth: int) -> None:
    """Sets the depth of each instance whose bit is set."""
    while instances:
        bit = instances & -instances
        depths[bit.bit_length() - 1] = depth
        instances ^= bit
