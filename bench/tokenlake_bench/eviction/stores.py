"""Replays prompts on the daemons' stores and eviction policies, without messages, bytes or simulated time.

The study compares policies on millions of accesses, which whole nodes (`NodeCore`) would take hours for; it shares the
store with them. Prompts are served one at a time, each at the node that `least_cost` names, in the order of its steps:

1. The longest prefix is found of which this node has a copy, or some node the primary copy; the copies are pinned.
2. Segments that lie at other nodes are copied into slots of this node (cached copies). Without a slot the prefix ends.
3. Each missing segment takes a slot of this node, which evicts or refuses. New segments are published, deepest first.
4. The segments that were found are unpinned and touched, here and at their owners, deepest first. Segments after the
   first missing one that were held are computed again, and touched as well.

The model leaves out segments being written and delays. The queue of prompts at each node is empty whenever the time of
the trace advances: a prompt waits for the prompts of the same moment only. These queues spread the prompts over the
nodes even if all prompts of the trace begin with the same segment: without queues the owner of that segment would have
the least cost for each of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from tokenlake.config.rules import RuleSettings
from tokenlake.core.cluster.learned import SEND_S
from tokenlake.core.engines.access import access_after, with_access
from tokenlake.errors import ConfigurationError
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Budgets, EvictionPolicy, Kind, Segment, SegmentStore
from tokenlake.metrics import Counters
from tokenlake_bench.baselines import Accesses, Prompt

_TENANT = TenantId("study")
_SLOT_BYTES = 64
_BUDGETS = Budgets(cached=RuleSettings().cached_share)
"""The shares of a store's slots that cached copies and segments being written may take, with a daemon's defaults."""
READ_COST = 1.0
"""Cost of reading a token from another node, as a multiple of the cost of computing it."""


def least_cost(
    queued: Sequence[float], uncached: Sequence[float], elsewhere: Sequence[float], rng: random.Random
) -> int:
    """Number of the node where a prompt would start soonest. Per node, in tokens: `queued`, the work of earlier prompts
    that the node has not computed yet; `uncached`, the part of this prompt that it would compute; `elsewhere`, the part
    that it would read from other nodes. `rng` draws among equal nodes."""
    costs = [wait + compute + READ_COST * read for wait, compute, read in zip(queued, uncached, elsewhere, strict=True)]
    least = min(costs)
    return rng.choice([node for node, cost in enumerate(costs) if cost == least])


class NodeStores:
    """The stores of `nodes` simulated nodes, each with an even share of `capacity_tokens`, for the segments of the
    prompts in `accesses`."""

    def __init__(
        self,
        accesses: Accesses,
        nodes: int,
        capacity_tokens: int,
        policy: Callable[[], EvictionPolicy],
        seed: int = 0,
    ) -> None:
        slots = slots_per_node(accesses, nodes, capacity_tokens)
        self._stores = [_store(slots, policy) for _ in range(nodes)]
        for store in self._stores:
            store.models.exchange_among(nodes)
        self._segment_tokens = accesses.segment_tokens
        self._parents = _parents(accesses)
        self._keys = [_key(segment) for segment in range(len(self._parents))]
        self._ids = {key: segment for segment, key in enumerate(self._keys)}
        self._held: list[Segment | None] = [None] * len(self._keys)
        """By segment id, the primary copy, at whichever node it is; None where no node has one."""
        self._node: list[int] = [0] * len(self._keys)
        """By segment id, the number of the node that has the primary copy, or had it last."""
        self._rng = random.Random(seed)
        self._queued = [0.0] * nodes
        """By node, the work in computed tokens of the prompts that arrived at the trace time `_at_s`."""
        self._at_s = 0.0
        self._shared_at, self._rounds = 0.0, 0

    def serve(self, prompt: Prompt, hints: Hints) -> int:
        """Serve one prompt at the node of least cost. Returns the number of segments of the longest prefix that was
        found in the pool."""
        now, chain = prompt.at_s, prompt.chain
        self._share_learned(now)
        node = self._computed_at(chain, now)
        store = self._stores[node]
        copies = [self._copy(node, segment) for segment in chain]
        hits = next((depth for depth, copy in enumerate(copies) if copy is None), len(chain))
        hints = with_access(hints, self._access(chain, copies, hits, now))
        pinned = [copy for copy in copies[:hits] if copy is not None]
        store.pin(*pinned)
        hits, fetched = self._fetch(node, chain, hits, hints, now)
        created = self._store_new(node, chain, hits, hints, now)
        # Segments behind the hits are touched only if they still have a copy: the new segments may have displaced some.
        again = [segment for segment in chain[hits:] if (copy := self._copy(node, segment)) and not copy.pins]
        self._touch(node, again, now, hints)
        for segment in reversed(created):
            store.publish(segment, b"", now)
        store.unpin(*created, *fetched, *pinned)
        self._touch(node, chain[:hits], now, hints)
        return hits

    def _computed_at(self, chain: tuple[int, ...], now: float) -> int:
        """Number of the node that computes a prompt: the one of least cost. The queues contain the other prompts of the
        same moment; without them all prompts that share a first segment would be computed at one node."""
        if len(self._stores) == 1:
            return 0
        if now > self._at_s:
            self._at_s, self._queued = now, [0.0] * len(self._stores)
        tokens, keys = self._segment_tokens, [self._keys[segment] for segment in chain]
        uncached, elsewhere = [], []
        for store in self._stores:
            index = store.index(_TENANT)
            found = read = 0
            for segment, key in zip(chain, keys, strict=True):
                if key not in index:
                    if self._held[segment] is None:
                        break
                    read += 1
                found += 1
            uncached.append((len(chain) - found) * tokens)
            elsewhere.append(read * tokens)
        node = least_cost(self._queued, uncached, elsewhere, self._rng)
        self._queued[node] += uncached[node] + READ_COST * elsewhere[node]
        return node

    def _copy(self, node: int, segment: int) -> Segment | None:
        """The copy of a segment that node `node` reads: its own, else the primary copy of another node; None if there
        is none."""
        return self._stores[node].get(_TENANT, self._keys[segment]) or self._held[segment]

    def _fetch(
        self, node: int, chain: tuple[int, ...], hits: int, hints: Hints, now: float
    ) -> tuple[int, list[Segment]]:
        """Copy to the node those segments of `chain[:hits]` that only other nodes have. Returns the length in segments
        of the prefix that the node has then, and the new copies, each pinned once."""
        store = self._stores[node]
        fetched: list[Segment] = []
        for depth, segment in enumerate(chain[:hits]):
            if store.get(_TENANT, self._keys[segment]) is None:
                made = self._reserve(node, segment, Kind.CACHED, depth, hints, now)
                if made is None:
                    return depth, fetched
                store.publish(made, b"", now)
                fetched.append(made)
        return hits, fetched

    def _touch(self, node: int, segments: Sequence[int], now: float, hints: Hints) -> None:
        """Record an access at `now` of these segments, given by id in prompt order, by a request that node `node`
        serves: the node's own copies are accessed, and for each segment whose primary copy is at another node, that
        copy too."""
        own = (self._stores[node].get(_TENANT, self._keys[segment]) for segment in segments)
        by_node: dict[int, list[Segment]] = {node: [copy for copy in own if copy is not None]}
        for segment in segments:
            primary = self._held[segment]
            if primary is not None and self._node[segment] != node:
                by_node.setdefault(self._node[segment], []).append(primary)
        for owner, copies in by_node.items():
            self._stores[owner].touch(copies, now, hints)

    def _access(self, chain: tuple[int, ...], copies: Sequence[Segment | None], hits: int, now: float) -> AccessRecord:
        """The access record of this request, as a match gets it: derived from the record of the deepest segment of the
        prompt that has a copy, or that the policy of some node remembers."""
        for index in range(len(chain) - 1, -1, -1):
            copy = copies[index]
            if copy is not None:
                return access_after([(index, copy.hints.access, now - copy.touched)], len(chain), hits)
            remembered = self._remembered(chain[index], now)
            if remembered:
                return access_after([(index, *each) for each in remembered], len(chain), hits)
        return access_after([], len(chain), hits)

    def _remembered(self, segment: int, now: float) -> list[tuple[AccessRecord, float]]:
        """Returns the last access of an evicted segment, for each node whose eviction policy remembers it: (access
        record, seconds since the access)."""
        told = (store.last_access(_TENANT, [self._keys[segment]], now) for store in self._stores)
        return [each[1:] for each in told if each is not None]

    def _share_learned(self, now: float) -> None:
        """Let each store send the statistics that its eviction policy learned to one other store, in rotation, as
        daemons do."""
        if len(self._stores) == 1 or now < self._shared_at + SEND_S:
            return
        self._shared_at = now
        self._rounds += 1
        for number, store in enumerate(self._stores):
            other = (number + 1 + self._rounds % (len(self._stores) - 1)) % len(self._stores)
            self._stores[other].models.merge(store.models.save())

    def held(self) -> int:
        """Number of segments that have a primary copy at some node."""
        return sum(segment is not None for segment in self._held)

    def copies(self) -> int:
        """Number of copies of segments over all nodes, cached copies included."""
        return sum(len(store.index(_TENANT)) for store in self._stores)

    def orphans(self) -> int:
        """Number of segments with a primary copy whose parent (the segment before them in the prompt) has none: no
        prompt finds them until the parent is stored again."""
        return sum(
            parent >= 0 and self._held[parent] is None
            for segment, parent in zip(self._held, self._parents, strict=True)
            if segment is not None
        )

    def check_integrity(self) -> None:
        """Check that the maps of this object agree with the stores. Raises AssertionError when they differ. Slow; for
        tests."""
        for store in self._stores:
            store.check_integrity()
        here = {
            (node, id(segment))
            for node, store in enumerate(self._stores)
            for segment in store.segments()
            if segment.kind is Kind.PRIMARY
        }
        assert here == {
            (node, id(segment)) for node, segment in zip(self._node, self._held, strict=True) if segment is not None
        }

    def _store_new(self, node: int, chain: tuple[int, ...], hits: int, hints: Hints, now: float) -> list[Segment]:
        """Reserve slots at the node, in prompt order, for the segments behind the first `hits` of which the node has no
        copy; segments that the policy refuses are left out. Returns the new segments, each pinned once for the
        caller."""
        created: list[Segment] = []
        for depth in range(hits, len(chain)):
            if self._copy(node, chain[depth]) is None:
                made = self._reserve(node, chain[depth], Kind.PRIMARY, depth, hints, now)
                if made is not None:
                    self._held[chain[depth]] = made
                    self._node[chain[depth]] = node
                    created.append(made)
        return created

    def _reserve(self, node: int, segment: int, kind: Kind, depth: int, hints: Hints, now: float) -> Segment | None:
        store = self._stores[node]
        before = self._parents[segment]
        parent = self._keys[before] if before >= 0 else None
        made = store.reserve(_TENANT, _SLOT_BYTES, self._keys[segment], kind, depth, now, hints, parent)
        for gone in store.take_gone():
            if gone.kind is Kind.PRIMARY:
                self._held[self._ids[gone.key]] = None
        return made if isinstance(made, Segment) else None


def slots_per_node(accesses: Accesses, nodes: int, capacity_tokens: int) -> int:
    """Number of segments that fit into one node's even share of `capacity_tokens`. Raises ConfigurationError if none
    fits."""
    if nodes < 1:
        raise ConfigurationError("nodes", nodes, "at least 1")
    slots = capacity_tokens // nodes // accesses.segment_tokens
    if slots < 1:
        smallest = nodes * accesses.segment_tokens
        raise ConfigurationError("capacity_tokens", capacity_tokens, f"at least {smallest}, one segment per node")
    return slots


def _store(slots: int, policy: Callable[[], EvictionPolicy]) -> SegmentStore:
    return SegmentStore(1, slots * _SLOT_BYTES, _BUDGETS, Counters(), policy)


def _key(segment: int) -> SegmentKey:
    return SegmentKey(hashlib.blake2b(segment.to_bytes(8, "little"), digest_size=32).digest())


def _parents(accesses: Accesses) -> list[int]:
    """By segment id, the parent: the segment before it in every prompt that contains it; -1 for the first segment of a
    prompt."""
    parents: dict[int, int] = {}
    for prompt in accesses.prompts:
        # The walk from the end of the prompt stops at the first segment with a known parent, because all segments
        # before that one have been seen too.
        for depth in range(len(prompt.chain) - 1, -1, -1):
            if prompt.chain[depth] in parents:
                break
            parents[prompt.chain[depth]] = prompt.chain[depth - 1] if depth else -1
    return [parents[segment] for segment in range(len(parents))]
