"""The pool behind a router that plans: `tokenlake.planner.Router` on what a router sees of simulated nodes.

::

    arrives -> lookup ----------> nodes that the directory names -> Router.where -> instance
               (a socket and a link, either way)

The router knows the requests that it sent, and the tokens of the answers that pass through it. Of the pool it knows the
owners that its lookup names. It does not know cached copies of segments that another node owns, nor the instances'
queues and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.planner import Request, Router
from tokenlake_bench.simulation.arrivals import Arrival, keys_of
from tokenlake_bench.simulation.cluster import Send
from tokenlake_bench.simulation.engine import SOCKET_S, TENANT
from tokenlake_bench.simulation.pooled import PooledRun


class PlannedRoute:
    """A route of one `PooledRun` that plans. It sends each request to an instance after a
    lookup of the request's segments."""

    def __init__(self, run: PooledRun) -> None:
        """Replaces the callbacks `first_token` and `answered` of `run`, from which it learns of answers."""
        options = run.simulation.options
        self._run = run
        self._seed = options.seed
        self._cluster = run.simulation.cluster
        self._nodes = [NodeId(node.name) for node in self._cluster.nodes]
        self._indices = {node: index for index, node in enumerate(self._nodes)}
        instances = {str(node): node for node in self._nodes}
        layout = self._cluster.size.layout
        self.router = Router(instances, options.segment_tokens, layout.segment_bytes, seed=options.seed)
        self._one_way_s = SOCKET_S + options.link.latency_s
        run.first_token = self._first_token
        run.answered = self._answered

    def __call__(self, number: int, arrival: Arrival, send: Send) -> None:
        """Begin the lookup of the segments of a request that arrives; the request is sent when the lookup has ended."""
        keys = keys_of(arrival.chain, self._seed)
        request = Request(
            name=_name(arrival),
            keys=tuple(SegmentKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)),
            tokens=arrival.tokens,
        )
        self._cluster.clock.after(self._one_way_s, self._look_up, arrival, request, send)

    def _look_up(self, arrival: Arrival, request: Request, send: Send) -> None:
        owners = self._owners(request.keys)
        self._cluster.clock.after(self._one_way_s, self._send, request, owners, send)

    def _send(self, request: Request, owners: dict[SegmentKey, list[NodeId]], send: Send) -> None:
        start = self.router.where(request, owners)
        self.router.sent(request, start)
        send(self._indices[NodeId(start.instance)])

    def _owners(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, list[NodeId]]:
        """By key, the nodes that own the segment at this moment, for the keys up to the first one that no node owns."""
        indices = [node.store.index(TenantId(TENANT)) for node in self._cluster.nodes]
        owners: dict[SegmentKey, list[NodeId]] = {}
        for key in keys:
            for node, index in zip(self._nodes, indices, strict=True):
                segment = index.get(key)
                if segment is not None and segment.owned:
                    owners.setdefault(key, []).append(node)
        return owners

    def _first_token(self, arrival: Arrival) -> None:
        self._cluster.clock.after(self._one_way_s, self.router.first_token, _name(arrival))

    def _answered(self, arrival: Arrival) -> None:
        self._cluster.clock.after(self._one_way_s, self._finished, arrival)

    def _finished(self, arrival: Arrival) -> None:
        self.router.finished(_name(arrival))
        self.router.rates.answer_tokens.add(float(max(1, arrival.output_tokens)))


def _name(arrival: Arrival) -> str:
    """Name by which the planner knows a request while it is under way; no two requests are the same object."""
    return str(id(arrival))
