"""The control plane: what a scheduler asks the pool before each iteration, and the plans that it gets."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from tokenlake.attention import AttentionShape
from tokenlake.errors import Refused, Unreachable
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Plans, PrefixTree, Rates, Request, cache_load, gen_plans, grow
from tokenlake_client.lease import Lease
from tokenlake_client.pool import Pool

__all__ = ["ControlPlane"]

KNOWN_KEYS = 1 << 16
"""Segments whose node the local view remembers: the newest."""
KNOWN_REQUESTS = 256
"""Requests that the local view is about: the newest."""


class ControlPlane:
    """For one scheduler, in one thread, over a pool that stays the caller's.

    What `get_prefix_tree` found stays leased, so that the plans made of it can be carried out, until it is asked again,
    or `release` is called.
    """

    def __init__(self, pool: Pool, instances: Mapping[str, NodeId], shape: AttentionShape, rates: Rates | None = None):
        """`instances`: the engine instances that batches may run on, and the node of each. `shape`: of the model's
        attention. `rates`: measured inputs, shared with whoever measures; all defaults unless given."""
        self.instances = MappingProxyType(dict(instances))
        self.rates = rates or Rates()
        self.model = Model.of(pool.layout, shape)
        self.leases: tuple[Lease | None, ...] = ()
        """Of the last tree's requests, one each; None where nothing was found or the daemon did not answer. They stay
        this object's: use them until the next `get_prefix_tree`."""
        self._pool = pool
        self._known: OrderedDict[SegmentKey, NodeId] = OrderedDict()
        self._recent: deque[Request] = deque(maxlen=KNOWN_REQUESTS)

    def get_prefix_tree(self, requests: Iterable[Request] | None = None) -> PrefixTree:
        """What the pool has of the prefixes of `requests`, and on which nodes: all asked in one parallel round, of at
        most the match's deadline. What does not answer is a miss.

        Without `requests`: the newest requests that were asked about, and where their segments were then. Asks nobody,
        leases nothing, may be wrong.
        """
        size = self._pool.layout.segment_tokens
        if requests is None:
            return grow(tuple(self._recent), {key: (node,) for key, node in self._known.items()}, size)
        asked = tuple(requests)
        self.release()
        holders: dict[SegmentKey, tuple[NodeId, ...]] = {}
        self.leases = tuple(self._match(asked))
        for lease in self.leases:
            if lease is not None:
                for key, node in zip(lease.keys, _nodes(lease), strict=False):
                    holders[key] = (node,)
                    self._known[key] = node
                    self._known.move_to_end(key)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)
        self._recent.extend(asked)
        return grow(asked, holders, size)

    def get_cache_load(self, requests: Sequence[int], tree: PrefixTree) -> dict[NodeId, float]:
        """The worst-case share of each node's time that the pool itself needs for `requests`, indices into the tree's
        (`tokenlake.planner.cache_load`). Pure."""
        return cache_load(requests, tree, self.instances, self.model.layers, self.rates)

    def gen_plans(
        self,
        batches: Sequence[Sequence[int]],
        dops: Sequence[int],
        tree: PrefixTree,
        idle: Iterable[str] | None = None,
    ) -> Plans:
        """Instances and ways for each batch (`tokenlake.planner.gen_plans`, which says what is raised). `idle`: those
        of the instances that may be given a batch, all unless given. Pure."""
        chosen = self.instances if idle is None else {name: self.instances[name] for name in idle}
        return gen_plans(batches, dops, tree, chosen, self.model, self.rates)

    def _match(self, requests: Sequence[Request]) -> list[Lease | None]:
        size = self._pool.layout.segment_tokens
        found: list[Lease | None] = [None] * len(requests)
        pending = []
        try:
            for index, request in enumerate(requests):
                keys = request.keys[: max(0, request.tokens - 1) // size]
                if keys:
                    with contextlib.suppress(Refused):
                        pending.append((index, self._pool.begin_match(keys, planned=True)))
            for index, match in pending:
                # What a daemon refuses, mostly for its size or for their number, is a miss.
                with contextlib.suppress(Refused):
                    found[index] = match.wait()
        except Unreachable:
            # Nobody to ask: a scheduler goes on with what it heard so far.
            for index, match in pending:
                if found[index] is None:
                    match.cancel()
        return found

    def release(self) -> None:
        """Give all leases back. Idempotent."""
        for lease in self.leases:
            if lease is not None:
                lease.release()
        self.leases = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _nodes(lease: Lease) -> list[NodeId]:
    if not lease.hits:
        return []
    try:
        return [NodeId(node) for node in lease.nodes()]
    except Unreachable:
        return []
