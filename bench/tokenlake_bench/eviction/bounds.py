"""What no policy can beat: a cache that never evicts, and one of a given size that knows the future.

The clairvoyant cache is Belady's MIN with bypass on prefix trees. A segment's next use is never before its parent's, so
"furthest next use goes first, of one prompt the deepest, and what is never used again is not stored" keeps a parent as
long as its child. What is held then is a union of prefixes, every held segment of a prompt is found, and MIN's bound,
which knows no prefixes, is reached: no order of eviction finds more.

    Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966

So the cache need not know its segments, only how many of those next used by each later request it holds: of what a
request touches, `count` segments wait for request `later`; when the capacity is exceeded, those go whose request is
latest. A request finds all that waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tokenlake_bench.baselines import Accesses, HitCount

__all__ = ["Bounds", "bounds_of"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The future of a workload, read once, for any number of capacities."""

    accesses: Accesses
    waiting: list[list[tuple[int, int]]]
    """Of what each request touches, by the next request that uses it: (that request, segments)."""

    def infinite(self) -> HitCount:
        """One cache for all that never evicts."""
        return self._count(sum(count for later in self.waiting for _, count in later))

    def clairvoyant(self, segments: int) -> HitCount:
        """One cache of `segments` that knows what comes."""
        held = [0] * len(self.waiting)
        """By the request that uses them next."""
        total = hits = 0
        latest: list[int] = []
        """Minus the requests that something waits for, and some that nothing waits for any more."""
        for index, later in enumerate(self.waiting):
            hits += held[index]
            total -= held[index]
            held[index] = 0
            for request, count in later:
                if not held[request]:
                    heappush(latest, -request)
                held[request] += count
                total += count
            while total > segments:
                request = -latest[0]
                excess = min(held[request], total - segments)
                held[request] -= excess
                total -= excess
                if not held[request]:
                    heappop(latest)
        return self._count(hits)

    def _count(self, segments: int) -> HitCount:
        return HitCount(segments * self.accesses.segment_tokens, self.accesses.prompt_tokens)


def bounds_of(accesses: Accesses) -> Bounds:
    """Reads the chains once."""
    prompts = accesses.prompts
    lengths = [len(prompt.chain) for prompt in prompts]
    segments = np.fromiter((segment for prompt in prompts for segment in prompt.chain), np.int64, sum(lengths))
    request = np.repeat(np.arange(len(prompts)), lengths)
    # The uses of one segment beside each other, in order of time.
    order = np.argsort(segments, kind="stable")
    again = np.diff(segments[order]) == 0
    first, second = request[order][:-1][again], request[order][1:][again]
    pairs, counts = np.unique(first * len(prompts) + second, return_counts=True)
    waiting: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        waiting[pair // len(prompts)].append((pair % len(prompts), count))
    return Bounds(accesses, waiting)
