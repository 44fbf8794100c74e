"""The control plane of a scheduler: where prefixes are cached, and the plans of the next batches."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tokenlake.attention import AttentionShape
from tokenlake.errors import LimitReached, Unreachable
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.planner import Model, Plans, PrefixTree, Rates, Request, cache_load, gen_plans, grow
from tokenlake_client.control.client import Control
from tokenlake_client.control.fleet import FleetRouter
from tokenlake_client.control.messages import plans_of, prompt_message, rates_message, tree_message, tree_of
from tokenlake_proto.v1 import scheduling_pb2 as pb

KNOWN_KEYS = 1 << 16
"""Limit of the segments whose nodes are remembered for `get_prefix_tree` without requests; the oldest are forgotten."""
KNOWN_REQUESTS = 256
"""Limit of the requests that are remembered for `get_prefix_tree` without requests; the oldest are forgotten."""
PROMPTS_AT_ONCE = 256
"""The daemon's limit of the requests of one call."""


class _Place(NamedTuple):
    """Where a segment is."""

    owners: tuple[NodeId, ...]
    disk_s: float
    """Its part of the expected seconds of a read from its owner's disk; 0: it is in memory."""


class ControlPlane:
    """Finds the cached prefixes of requests and plans batches with them. For one scheduler, in one thread. The caller
    keeps the ownership of the control.

    Nothing is leased: segments may be evicted before a plan that uses them is carried out. An engine then computes
    them. Where the daemon cannot be reached, prefixes are misses, and plans are made in this process.
    """

    def __init__(
        self,
        control: Control,
        layout: Layout,
        instances: Mapping[str, NodeId],
        shape: AttentionShape,
        rates: Rates | None = None,
        fleet: str = "default",
    ) -> None:
        """`layout`: that of the engines. `instances`: the engine instances that batches may run on, and the node of
        each. `shape`: that of the model's attention. `rates`: the planner's measured inputs, an object that the caller
        may go on updating (default: no measurements). `fleet`: name by which the daemon keeps the requests under
        way."""
        self.rates = rates or Rates()
        self.model = Model.of(layout, shape)
        self.router = FleetRouter(control, instances, self.model, layout.segment_tokens, fleet)
        """The requests under way. The caller tells it of each request that is sent, its first token and its end; a
        router that sends single requests asks it for their instances."""
        self._control = control
        self._segment_tokens = layout.segment_tokens
        self._known: OrderedDict[SegmentKey, _Place] = OrderedDict()
        self._recent: deque[Request] = deque(maxlen=KNOWN_REQUESTS)

    @property
    def instances(self) -> Mapping[str, NodeId]:
        """The node of each instance."""
        return self.router.instances

    def get_prefix_tree(self, requests: Iterable[Request] | None = None) -> PrefixTree:
        """The cached prefixes of `requests`, the nodes that have them, and the time that reads from disks take. A node
        without an answer, and a request that the daemon refuses because of its size, are misses.

        Without `requests`: the tree of the newest requests of earlier calls, with the nodes that had their segments
        then. This sends no message; the segments may have moved since.
        """
        size = self._segment_tokens
        if requests is None:
            keys = {key for each in self._recent for key in each.keys}
            return _grow(self._recent, {key: self._known[key] for key in keys & self._known.keys()}, size)
        asked = tuple(requests)
        found: dict[SegmentKey, _Place] = {}
        for at in range(0, len(asked), PROMPTS_AT_ONCE):
            found |= self._find(asked[at : at + PROMPTS_AT_ONCE])
        for key, place in found.items():
            self._known[key] = place
            self._known.move_to_end(key)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)
        self._recent.extend(asked)
        return _grow(asked, found, size)

    def _find(self, requests: Sequence[Request]) -> dict[SegmentKey, _Place]:
        """Where the segments of the cached prefixes are."""
        prompts = [prompt_message(each) for each in requests]
        message = pb.GetPrefixTreeRequest(prompts=prompts, segment_tokens=self._segment_tokens)
        try:
            tree = tree_of(self._control.prefix_tree(message).tree, requests)
            disk_s = tree.disk_s()
            return {key: _Place(nodes, disk_s.get(key, 0.0)) for key, nodes in tree.owners().items()}
        except Unreachable:
            return {}
        except LimitReached:
            # The message was too large: the requests are halved until those that fit are found.
            if len(requests) == 1:
                return {}
            half = len(requests) // 2
            return self._find(requests[:half]) | self._find(requests[half:])

    def get_cache_load(self, requests: Sequence[int], tree: PrefixTree) -> dict[NodeId, float]:
        """The worst-case share of each node's time that attention over cached segments takes for `requests`, which are
        indices into the requests of `tree` (`tokenlake.planner.cache_load`)."""
        message = pb.GetCacheLoadRequest(
            fleet=self.router.message(), tree=tree_message(tree), requests=requests, rates=rates_message(self.rates)
        )
        try:
            return {NodeId(node): share for node, share in self._control.cache_load(message).items()}
        except Unreachable:
            return cache_load(requests, tree, self.instances, self.model.layers, self.rates)

    def gen_plans(
        self,
        batches: Sequence[Sequence[int]],
        dops: Sequence[int],
        tree: PrefixTree,
        idle: Iterable[str] | None = None,
    ) -> Plans:
        """The plan of each batch: its instances, and how each cached sequence is used. Arguments as of
        `tokenlake.planner.gen_plans`. `idle`: the instances that may get a batch (default: all). Raises `Refused` for
        arguments that are not valid."""
        chosen = self.instances if idle is None else {name: self.instances[name] for name in idle}
        message = pb.GenPlansRequest(
            fleet=self.router.message(),
            tree=tree_message(tree),
            batches=[pb.Batch(requests=batch, dop=dop) for batch, dop in zip(batches, dops, strict=True)],
            idle=list(chosen),
            rates=rates_message(self.rates),
        )
        try:
            return plans_of(self._control.plans(message))
        except Unreachable:
            return gen_plans(batches, dops, tree, chosen, self.model, self.rates)


def _grow(requests: Iterable[Request], found: Mapping[SegmentKey, _Place], segment_tokens: int) -> PrefixTree:
    owners = {key: place.owners for key, place in found.items()}
    disk_s = {key: place.disk_s for key, place in found.items() if place.disk_s}
    return grow(tuple(requests), owners, segment_tokens, disk_s)
