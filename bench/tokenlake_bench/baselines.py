"""Token hit rates of caches arranged in other ways over the same memory as the pool: private caches per node, and one
global cache.

Requests are served one at a time in order. Only full segments are kept; a hit is the longest contiguous prefix that one
cache holds; then the whole prompt is touched, deepest segment first, and segments beyond the capacity are evicted,
least recently touched first. The hit rate is hit tokens / all prompt tokens, those beyond the last full segment
included. Segments are identified by a digest of all tokens up to their end, which does not depend on the pool's keys.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tokenlake.errors import ConfigurationError
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_bench.workload import Request


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the compared caches see it. `chain` has one id per full segment of the prompt, in order; equal ids
    mean equal tokens up to the segment's end. Other fields are as in `Request` and in `Turn`; `output_tokens` is the
    length of the answer, 0 where the trace does not have it."""

    tokens: int
    chain: tuple[int, ...]
    at_s: float = 0.0
    output_tokens: int = 0
    conversation: int = 0
    follows: int | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accesses:
    """The prompts of a workload, with one id per full segment in place of the tokens. Ids count from 0 in the order in
    which segments first occur."""

    segment_tokens: int
    prompts: list[Prompt]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together, those behind the last full segments included."""
        return sum(prompt.tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class HitCount:
    """Number of prompt tokens that a cache found, and number of all prompt tokens. `busiest`: the tokens that the node
    with the most work computes / the mean of all nodes."""

    hit_tokens: int
    prompt_tokens: int
    busiest: float = field(default=1.0, compare=False)

    @property
    def rate(self) -> float:
        """Hit rate: share of the prompts' tokens that were found, 0 to 1; 0 without prompts."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Baselines:
    """Hits of four arrangements of caches. `ideal` never evicts. The others have the same total capacity; private
    caches split it evenly among the nodes."""

    ideal: HitCount
    private: HitCount
    private_routed: HitCount
    global_lru: HitCount


class Lru:
    """An LRU cache of at most `capacity` segments, which are named by ids."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        """Segment ids in the order in which they would be evicted. Do not touch the cache during the iteration."""
        return iter(self._held)

    def __contains__(self, segment: int) -> bool:
        return segment in self._held

    def match(self, chain: tuple[int, ...]) -> int:
        """Length in segments of the longest prefix of `chain` that the cache holds; does not count as an access."""
        for depth, segment in enumerate(chain):
            if segment not in self._held:
                return depth
        return len(chain)

    def touch(self, chain: tuple[int, ...]) -> list[int]:
        """Add or access all segments of a prompt; its first segment becomes the most recently used. Returns the ids
        that were evicted."""
        held = self._held
        for segment in reversed(chain):
            held[segment] = None
            held.move_to_end(segment)
        return self._shrink()

    def resize(self, capacity: int) -> list[int]:
        """Change the capacity to a number of segments, at least 0. Returns the ids that were evicted."""
        self._capacity = capacity
        return self._shrink()

    def _shrink(self) -> list[int]:
        return [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._capacity)]


def intern_segments(requests: Iterable[Request], segment_tokens: int) -> Accesses:
    """The requests of a workload with an id per full segment. Reads `requests` once and holds the tokens of one request
    at a time."""
    if segment_tokens < 1:
        raise ConfigurationError("segment_tokens", segment_tokens, "at least 1")
    identity = PayloadIdentity(0, "", b"")
    ids: dict[bytes, int] = {}
    prompts: list[Prompt] = []
    for request in requests:
        digests = identity.digests(request.tokens, segment_tokens)
        chain = tuple(ids.setdefault(digest, len(ids)) for digest in digests)
        answer = len(request.output_tokens)
        prompts.append(Prompt(len(request.tokens), chain, request.at_s, answer, request.conversation))
    return Accesses(segment_tokens, prompts)


def infinite_cache(accesses: Accesses) -> HitCount:
    """Hits of one cache for all requests that never evicts."""
    segments = sum(len(prompt.chain) for prompt in accesses.prompts)
    return _round_robin(accesses, [Lru(segments)])


def global_lru(accesses: Accesses, capacity_tokens: int) -> HitCount:
    """Hits of one LRU cache for all requests, with the whole capacity."""
    return _round_robin(accesses, _caches(accesses, 1, capacity_tokens))


def private_round_robin(accesses: Accesses, nodes: int, capacity_tokens: int) -> HitCount:
    """Hits of private LRU caches, one per node with an even share of `capacity_tokens`; request i goes to node i modulo
    `nodes`."""
    return _round_robin(accesses, _caches(accesses, nodes, capacity_tokens))


def private_routed(accesses: Accesses, nodes: int, capacity_tokens: int, seed: int) -> HitCount:
    """Hits of private LRU caches, one per node with an even share of the capacity, where each request goes to the node
    that holds its longest prefix; `seed` draws among equal nodes.

    Nodes that have served nothing are preferred: otherwise a first segment that all requests share would send all of
    them to one node, and the other nodes' memory would stay empty.
    """
    caches = _caches(accesses, nodes, capacity_tokens)
    rng = random.Random(seed)
    all_nodes = (1 << nodes) - 1
    unused = all_nodes
    owners: dict[int, int] = {}
    hit_segments, computed = 0, [0] * nodes
    for prompt in accesses.prompts:
        best, depth = (unused, 0) if unused else _longest(prompt.chain, owners, all_nodes)
        hit_segments += depth
        chosen = rng.choice([node for node in range(nodes) if best >> node & 1])
        computed[chosen] += prompt.tokens - depth * accesses.segment_tokens
        bit = 1 << chosen
        unused &= ~bit
        for segment in prompt.chain:
            owners[segment] = owners.get(segment, 0) | bit
        for segment in caches[chosen].touch(prompt.chain):
            owners[segment] &= ~bit
    return replace(_count(accesses, hit_segments), busiest=max(computed) * nodes / max(1, sum(computed)))


def baselines(accesses: Accesses, *, nodes: int, capacity_tokens: int, seed: int) -> Baselines:
    """Hit counts of all four arrangements of caches for one workload. Raises ConfigurationError for an argument out of
    range."""
    return Baselines(
        ideal=infinite_cache(accesses),
        private=private_round_robin(accesses, nodes, capacity_tokens),
        private_routed=private_routed(accesses, nodes, capacity_tokens, seed),
        global_lru=global_lru(accesses, capacity_tokens),
    )


def _longest(chain: tuple[int, ...], owners: dict[int, int], all_nodes: int) -> tuple[int, int]:
    """(bit set of the nodes that hold the longest prefix of `chain` among all nodes, length of that prefix in
    segments)."""
    best = all_nodes
    for depth, segment in enumerate(chain):
        deeper = best & owners.get(segment, 0)
        if not deeper:
            return best, depth
        best = deeper
    return best, len(chain)


def _caches(accesses: Accesses, nodes: int, capacity_tokens: int) -> list[Lru]:
    if nodes < 1:
        raise ConfigurationError("nodes", nodes, "at least 1")
    segments = capacity_tokens // nodes // accesses.segment_tokens
    if segments < 1:
        smallest = nodes * accesses.segment_tokens
        raise ConfigurationError("capacity_tokens", capacity_tokens, f"at least {smallest}, one segment per node")
    return [Lru(segments) for _ in range(nodes)]


def _round_robin(accesses: Accesses, caches: list[Lru]) -> HitCount:
    hit_segments = 0
    for index, prompt in enumerate(accesses.prompts):
        cache = caches[index % len(caches)]
        hit_segments += cache.match(prompt.chain)
        cache.touch(prompt.chain)
    return _count(accesses, hit_segments)


def _count(accesses: Accesses, hit_segments: int) -> HitCount:
    return HitCount(hit_segments * accesses.segment_tokens, accesses.prompt_tokens)
