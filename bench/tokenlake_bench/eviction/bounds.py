"""Bounds on any policy: a cache that never evicts, and a cache of a given size that knows the future.

The clairvoyant cache is Belady's MIN with bypass on prefix trees. It evicts the segment with the furthest next use
first, among segments of one prompt the deepest first, and does not store segments that are never used again. A
segment's next use is never before its parent's, so a parent stays at least as long as its child. Therefore the cache
always holds a union of prefixes, every held segment of a prompt is found, and the cache reaches MIN's bound, which
ignores prefixes: no order of eviction finds more.

    Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966

The computation needs no single segments, only the number of held segments per request that uses them next: after a
request, some of its segments stay held for the later request that uses them next, for which they wait; when the
capacity is exceeded, segments that wait for the latest request are evicted. A request finds all segments that wait for
it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tokenlake_bench.baselines import Accesses, HitCount


@dataclass(frozen=True, slots=True)
class Bounds:
    """The next uses of all segments of a workload, from which the bounds for any capacity are computed."""

    accesses: Accesses
    waiting: list[list[tuple[int, int]]]
    """Per request, the later requests that use its segments next: (number of the later request, number of segments that
    it is the next to use)."""

    def infinite(self) -> HitCount:
        """The hit tokens of a cache that serves all requests and never evicts."""
        return self._count(self.hits(sys.maxsize))

    def clairvoyant(self, segments: int) -> HitCount:
        """The hit tokens of a cache of `segments` segments that serves all requests and knows the future ones."""
        return self._count(self.hits(segments))

    def hits(self, segments: int) -> list[int]:
        """By request, the number of segments that the clairvoyant cache of `segments` segments finds."""
        held = [0] * len(self.waiting)
        """By request, the number of held segments for which this request is the next to use them."""
        found: list[int] = []
        total = 0
        latest: list[int] = []
        """A heap of negated numbers of future requests, so that the latest request comes first. It may contain requests
        for which no segment is held any more."""
        for index, later in enumerate(self.waiting):
            found.append(held[index])
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
        return found

    def _count(self, found: list[int]) -> HitCount:
        return HitCount(sum(found) * self.accesses.segment_tokens, self.accesses.prompt_tokens)


def bounds_of(accesses: Accesses) -> Bounds:
    """The bounds of a workload. They follow from the request that next uses each segment of each request, which is
    found here."""
    prompts = accesses.prompts
    lengths = [len(prompt.chain) for prompt in prompts]
    segments = np.fromiter((segment for prompt in prompts for segment in prompt.chain), np.int64, sum(lengths))
    request = np.repeat(np.arange(len(prompts)), lengths)
    # Uses of segments are sorted by segment, then by time.
    order = np.argsort(segments, kind="stable")
    again = np.diff(segments[order]) == 0
    first, second = request[order][:-1][again], request[order][1:][again]
    pairs, counts = np.unique(first * len(prompts) + second, return_counts=True)
    waiting: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        waiting[pair // len(prompts)].append((pair % len(prompts), count))
    return Bounds(accesses, waiting)
