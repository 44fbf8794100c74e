"""Replays prompts on the daemons' stores, eviction policies and placement, without messages, bytes or simulated time.

The study compares policies on millions of accesses, which would take hours with whole nodes (`NodeCore`); it uses the
same store, ring and placement. Prompts are served one at a time, with the steps of a node in their order: found
segments are pinned while the rest is computed; each missing segment takes a slot at its owner, which evicts another
segment or refuses; new segments are published, deepest first; then the found segments are unpinned and touched, deepest
first. Segments behind the first missing one that a node has are computed again, and touched as well.

Dirty copies, cached copies and delays are left out: a new segment is at its owner at once, and every node knows the
number of free slots of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from tokenlake.core.access import access_after, with_access
from tokenlake.core.learned import SEND_S
from tokenlake.errors import ConfigurationError
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Counters
from tokenlake.placement import Vacancy, choose_owner, default_run_length, lean_of, runs
from tokenlake.ring import Ring
from tokenlake.store import Budgets, EvictionPolicy, Kind, Segment, SegmentStore
from tokenlake.store.region import GENERATION_BYTES
from tokenlake_bench.baselines import Accesses, Prompt

__all__ = ["NodeStores", "slots_per_node"]

_TENANT = TenantId("study")
_SLOT_BYTES = 64
_PAGE = 4096


class NodeStores:
    """`nodes` stores with an even share of `capacity_tokens`. Segments are those of `accesses`, by their ids."""

    def __init__(
        self, accesses: Accesses, nodes: int, capacity_tokens: int, policy: Callable[[], EvictionPolicy]
    ) -> None:
        slots = slots_per_node(accesses, nodes, capacity_tokens)
        self._stores = [_store(slots, policy) for _ in range(nodes)]
        self._parents = _parents(accesses)
        self._keys = [_key(segment) for segment in range(len(self._parents))]
        self._ids = {key: segment for segment, key in enumerate(self._keys)}
        self._held: list[Segment | None] = [None] * len(self._keys)
        """By id, the segment as the store of its node has it; None where no node has it."""
        self._node: list[int] = [0] * len(self._keys)
        """By id, the node that holds the segment, or held it last."""
        self._names = [NodeId(f"node-{node}") for node in range(nodes)]
        self._previous_owner: list[NodeId | None] = [None] * len(self._keys)
        """By id, the node that had the segment last, or refused it, as a directory node reports it to a writer."""
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._shared_at, self._rounds = 0.0, 0
        self._ring = Ring(dict.fromkeys(self._names, slots), default_run_length(nodes))
        self._candidates = self._ring.candidates(b"".join(self._keys))

    def serve(self, prompt: Prompt, hints: Hints) -> int:
        """Serve one prompt. Returns the length of its longest prefix that was found, in segments."""
        now, chain, held = prompt.at_s, prompt.chain, self._held
        self._share_learned(now)
        hits = next((depth for depth, segment in enumerate(chain) if held[segment] is None), len(chain))
        hints = with_access(hints, self._access(chain, hits, now))
        found = self._by_node(chain[:hits])
        for node, segments in found.items():
            self._stores[node].pin(*segments)
        created = self._store_new(chain, hits, hints, now)
        for node, segments in self._by_node(chain[hits:]).items():
            self._stores[node].touch([segment for segment in segments if not segment.pins], now, hints)
        for node, segment in reversed(created):
            self._stores[node].publish(segment, b"", now)
            self._stores[node].unpin(segment)
        for node, segments in found.items():
            self._stores[node].unpin(*segments)
            self._stores[node].touch(segments, now, hints)
        return hits

    def _access(self, chain: tuple[int, ...], hits: int, now: float) -> AccessRecord:
        """The access record of this request, as a match gets it: from the node with the deepest known segment, or from
        a policy that remembers that segment."""
        for index in range(len(chain) - 1, -1, -1):
            segment = self._held[chain[index]]
            if segment is not None:
                return access_after([(index, segment.hints.access, now - segment.touched)], len(chain), hits)
            remembered = self._remembered(chain[index], now)
            if remembered:
                return access_after([(index, access, age_s) for _, access, age_s in remembered], len(chain), hits)
        return access_after([], len(chain), hits)

    def _remembered(self, segment: int, now: float) -> list[tuple[int, AccessRecord, float]]:
        """Access records of an evicted segment that the policies of its candidates remember."""
        asked = [self._stores[self._numbers[name]] for name in dict.fromkeys(self._candidates[segment])]
        told = [store.last_access(_TENANT, [self._keys[segment]], now) for store in asked]
        return [each for each in told if each is not None]

    def _share_learned(self, now: float) -> None:
        """Each store sends what its policy learned to one other store, in rotation, as daemons do."""
        if len(self._stores) == 1 or now < self._shared_at + SEND_S:
            return
        self._shared_at = now
        self._rounds += 1
        for number, store in enumerate(self._stores):
            other = (number + 1 + self._rounds % (len(self._stores) - 1)) % len(self._stores)
            self._stores[other].merge_learned(store.learned())

    def held(self) -> int:
        """Number of segments that some node holds."""
        return sum(segment is not None for segment in self._held)

    def copies(self) -> int:
        """Number of segments in the stores of all nodes, copies counted separately."""
        return sum(len(store.index(_TENANT)) for store in self._stores)

    def orphans(self) -> int:
        """Number of held segments whose parent is not held: no prompt finds them until the parent is stored again."""
        return sum(
            parent >= 0 and self._held[parent] is None
            for segment, parent in zip(self._held, self._parents, strict=True)
            if segment is not None
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when this object's maps differ from the stores. Slow; for tests."""
        for store in self._stores:
            store.check_integrity()
        here = {(node, id(segment)) for node, store in enumerate(self._stores) for segment in store.segments()}
        assert here == {
            (node, id(segment)) for node, segment in zip(self._node, self._held, strict=True) if segment is not None
        }

    def _store_new(self, chain: tuple[int, ...], hits: int, hints: Hints, now: float) -> list[tuple[int, Segment]]:
        """Reserve slots for the missing segments, in prompt order: (node, segment), each pinned once."""
        missing = [depth for depth in range(hits, len(chain)) if self._held[chain[depth]] is None]
        # Computed once per prompt, as a writer asks the other nodes for vacancies once for all its new segments.
        vacancies = self._vacancies(now) if missing else {}
        created: list[tuple[int, Segment]] = []
        for sequence in runs(missing, self._ring.run_length):
            owner = self._owner(chain[missing[sequence.start]], vacancies)
            for index in sequence:
                depth = missing[index]
                made = self._reserve(owner, chain[depth], depth, hints, now)
                if made is not None:
                    created.append((owner, made))
        return created

    def _vacancies(self, now: float) -> dict[NodeId, Vacancy]:
        if len(self._stores) == 1:
            return {}
        return {name: self._stores[number].vacancy(now) for name, number in self._numbers.items()}

    def _owner(self, segment: int, vacancies: dict[NodeId, Vacancy]) -> int:
        if not vacancies:
            return 0
        candidates = [(name, vacancies[name]) for name in self._candidates[segment]]
        return self._numbers[choose_owner(candidates, lean_of(self._keys[segment]), self._previous_owner[segment])]

    def _reserve(self, node: int, number: int, depth: int, hints: Hints, now: float) -> Segment | None:
        store = self._stores[node]
        made = store.reserve(_TENANT, _SLOT_BYTES, self._keys[number], Kind.PRIMARY, depth, now, hints)
        store.reissued.clear()
        for gone in store.evicted:
            self._held[self._ids[gone.key]] = None
            self._previous_owner[self._ids[gone.key]] = self._names[node]
        store.evicted.clear()
        if not isinstance(made, Segment):
            self._previous_owner[number] = self._names[node]
            return None
        self._held[number] = made
        self._node[number] = node
        return made

    def _by_node(self, numbers: Iterable[int]) -> dict[int, list[Segment]]:
        """The held segments by node, in the same order."""
        grouped: dict[int, list[Segment]] = {}
        for number in numbers:
            segment = self._held[number]
            if segment is not None:
                grouped.setdefault(self._node[number], []).append(segment)
        return grouped


def slots_per_node(accesses: Accesses, nodes: int, capacity_tokens: int) -> int:
    """Number of segments in an even share of the capacity. Raises ConfigurationError where none fits."""
    if nodes < 1:
        raise ConfigurationError("nodes", nodes, "at least 1")
    slots = capacity_tokens // nodes // accesses.segment_tokens
    if slots < 1:
        smallest = nodes * accesses.segment_tokens
        raise ConfigurationError("capacity_tokens", capacity_tokens, f"at least {smallest}, one segment per node")
    return slots


def _store(slots: int, policy: Callable[[], EvictionPolicy]) -> SegmentStore:
    header_bytes = -(-slots * GENERATION_BYTES // _PAGE) * _PAGE
    return SegmentStore([0], header_bytes + slots * _SLOT_BYTES, Budgets(), Counters(), policy)


def _key(segment: int) -> SegmentKey:
    return SegmentKey(hashlib.blake2b(segment.to_bytes(8, "little"), digest_size=32).digest())


def _parents(accesses: Accesses) -> list[int]:
    """For each segment id, the id of the segment before it, the same in every prompt; -1 for a first segment."""
    parents: dict[int, int] = {}
    for prompt in accesses.prompts:
        # Backwards until a segment whose parent is known: the parents of all segments before it are known, too.
        for depth in range(len(prompt.chain) - 1, -1, -1):
            if prompt.chain[depth] in parents:
                break
            parents[prompt.chain[depth]] = prompt.chain[depth - 1] if depth else -1
    return [parents[segment] for segment in range(len(parents))]
