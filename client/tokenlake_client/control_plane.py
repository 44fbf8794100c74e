"""The control plane of a scheduler: where prefixes are cached, and the plans of the next batches."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from tokenlake.attention import AttentionShape
from tokenlake.errors import Refused, Unreachable
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Plans, PrefixTree, Rates, Request, Router, cache_load, gen_plans, grow
from tokenlake_client.lease import Lease
from tokenlake_client.pool import Pool

__all__ = ["ControlPlane"]

KNOWN_KEYS = 1 << 16
"""Limit of the segments whose node is remembered for `get_prefix_tree` without requests; the oldest are forgotten."""
KNOWN_REQUESTS = 256
"""Limit of the requests that are remembered for `get_prefix_tree` without requests; the oldest are forgotten."""


class ControlPlane:
    """Finds the cached prefixes of requests and plans batches with them. For one scheduler, in one thread. The caller
    keeps the ownership of the pool.

    The segments that `get_prefix_tree` found stay leased until its next call with requests, or `release`, so that the
    plans that use them can be carried out.
    """

    def __init__(self, pool: Pool, instances: Mapping[str, NodeId], shape: AttentionShape, rates: Rates | None = None):
        """`instances`: the engine instances that batches may run on, and the node of each. `shape`: that of the model's
        attention. `rates`: the planner's measured inputs, an object that the caller may go on updating (default: no
        measurements)."""
        self.instances = MappingProxyType(dict(instances))
        self.rates = rates or Rates()
        self.model = Model.of(pool.layout, shape)
        self.router = Router(instances, pool.layout.segment_tokens, self.model.segment_bytes, self.rates)
        """The requests under way. The caller tells it of each request that is sent, its first token and its end; a
        router that sends single requests asks it for their instances."""
        self.leases: tuple[Lease | None, ...] = ()
        """The leases of the last prefix tree, one for each of its requests; None where no segment was found or the
        daemon did not answer. This object owns them, and they are valid until the next `get_prefix_tree` with
        requests."""
        self._pool = pool
        self._known: OrderedDict[SegmentKey, NodeId] = OrderedDict()
        self._recent: deque[Request] = deque(maxlen=KNOWN_REQUESTS)

    def get_prefix_tree(self, requests: Iterable[Request] | None = None) -> PrefixTree:
        """The cached prefixes of `requests` and the nodes that have them, matched in one parallel round within the
        pool's match deadline. A match without an answer is a miss.

        Without `requests`: the tree of the newest requests of earlier calls, with the nodes that had their segments
        then. This sends no message and leases nothing; the segments may have moved since.
        """
        size = self._pool.layout.segment_tokens
        if requests is None:
            return grow(tuple(self._recent), {key: (node,) for key, node in self._known.items()}, size)
        asked = tuple(requests)
        self.release()
        owners: dict[SegmentKey, tuple[NodeId, ...]] = {}
        self.leases = tuple(self._match(asked))
        for lease in self.leases:
            if lease is not None:
                for key, node in zip(lease.keys, _nodes(lease), strict=False):
                    owners[key] = (node,)
                    self._known[key] = node
                    self._known.move_to_end(key)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)
        self._recent.extend(asked)
        return grow(asked, owners, size)

    def get_cache_load(self, requests: Sequence[int], tree: PrefixTree) -> dict[NodeId, float]:
        """The worst-case share of each node's time that attention over cached segments takes for `requests`, which are
        indices into the requests of `tree` (`tokenlake.planner.cache_load`). Sends nothing and changes nothing."""
        return cache_load(requests, tree, self.instances, self.model.layers, self.rates)

    def gen_plans(
        self,
        batches: Sequence[Sequence[int]],
        dops: Sequence[int],
        tree: PrefixTree,
        idle: Iterable[str] | None = None,
    ) -> Plans:
        """The plan of each batch: its instances, and how each cached sequence is used. Arguments and errors as of
        `tokenlake.planner.gen_plans`. `idle`: the instances that may get a batch (default: all). Sends nothing and
        changes nothing."""
        chosen = self.instances if idle is None else {name: self.instances[name] for name in idle}
        return gen_plans(batches, dops, tree, chosen, self.model, self.rates, self.router)

    def _match(self, requests: Sequence[Request]) -> list[Lease | None]:
        size = self._pool.layout.segment_tokens
        found: list[Lease | None] = [None] * len(requests)
        pending = []
        try:
            for index, request in enumerate(requests):
                keys = request.keys[: max(0, request.tokens - 1) // size]
                if keys:
                    with contextlib.suppress(Refused):
                        pending.append((index, self._pool.begin_match(keys)))
            for index, match in pending:
                # The daemon refused the match of one request, mostly because of its size or of the number of matches:
                # it counts as a miss.
                with contextlib.suppress(Refused):
                    found[index] = match.wait()
        except Unreachable:
            # The daemon is gone: the scheduler goes on with the answers that arrived.
            for index, match in pending:
                if found[index] is None:
                    match.cancel()
        return found

    def release(self) -> None:
        """Release the leases of the last prefix tree. Idempotent."""
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
