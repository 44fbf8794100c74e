"""Messages of the service `Scheduling` from and to the types of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenlake.identity import NodeId
from tokenlake.planner import Decision, Model, Plans, PrefixTree, QueryPlan, Rates, Request, TransferPlan, Way
from tokenlake.planner.fits import Fit
from tokenlake.planner.router import Prefill, Start
from tokenlake.planner.tree import SegmentSequence
from tokenlake.wire.slots import join_keys, split_keys
from tokenlake_proto.v1 import scheduling_pb2 as pb

_WAYS = {
    pb.WAY_LOCAL: Way.LOCAL,
    pb.WAY_FETCH: Way.FETCH,
    pb.WAY_SHIP: Way.SHIP,
    pb.WAY_RECOMPUTE: Way.RECOMPUTE,
}


def prompt_message(request: Request) -> pb.Prompt:
    """A request as a message."""
    return pb.Prompt(
        name=request.name,
        keys=join_keys(list(request.keys)),
        tokens=request.tokens,
        answer_tokens=request.answer_tokens,
    )


def fleet_message(name: str, instances: Mapping[str, NodeId], model: Model, segment_tokens: int) -> pb.Fleet:
    """A fleet as a message."""
    return pb.Fleet(
        name=name,
        instances=dict(instances),
        layers=model.layers,
        segment_bytes=model.segment_bytes,
        segment_tokens=segment_tokens,
        query_bytes=model.query_bytes,
    )


def tree_of(message: pb.PrefixTree, requests: Sequence[Request]) -> PrefixTree:
    """The tree that a daemon found for `requests`."""
    sequences = [
        SegmentSequence(
            each.parent,
            tuple(split_keys(each.keys)),
            tuple(map(NodeId, each.nodes)),
            tuple(each.requests),
            each.disk_s,
        )
        for each in message.sequences
    ]
    return PrefixTree(requests, message.segment_tokens, sequences)


def tree_message(tree: PrefixTree) -> pb.PrefixTree:
    """A tree as a message."""
    return pb.PrefixTree(
        prompts=[prompt_message(each) for each in tree.requests],
        segment_tokens=tree.segment_tokens,
        sequences=[
            pb.Sequence(
                parent=each.parent,
                keys=join_keys(list(each.keys)),
                nodes=each.owners,
                requests=each.requests,
                disk_s=each.disk_s,
            )
            for each in tree.sequences
        ],
    )


def rates_message(rates: Rates) -> pb.Rates:
    """The measured inputs of the planner as a message."""
    return pb.Rates(
        copy=_fit(rates.copy),
        prefill=_fit(rates.prefill),
        decode=_fit(rates.decode),
        answer_tokens=rates.answer_tokens.value,
        peers={
            node: pb.PeerRates(fetch=_fit(each.fetch), queries=_fit(each.queries), open_s=each.open_s.value)
            for node, each in rates.peers().items()
        },
    )


def _fit(fit: Fit) -> pb.Fit:
    return pb.Fit(coefficients=fit.coefficients, known=fit.known)


def plans_of(plans: Sequence[pb.Plan]) -> Plans:
    """The plans of a message."""
    return Plans(
        tuple(
            QueryPlan(
                NodeId(plan.node),
                tuple(
                    Decision(
                        each.sequence,
                        _WAYS[each.way],
                        NodeId(each.owner) if each.owner else None,
                        tuple(each.requests),
                    )
                    for each in plan.decisions
                ),
                plan.seconds,
            )
            for plan in plans
        ),
        tuple(
            TransferPlan(NodeId(plan.node), tuple((each.request, each.first, each.count) for each in plan.new_segments))
            for plan in plans
        ),
        tuple(tuple(plan.instances) for plan in plans),
    )


def start_of(message: pb.Start) -> Start:
    """The start of a message."""
    prefill = Prefill(message.new_tokens, message.prefix_tokens)
    return Start(message.instance, message.cost, prefill, message.moved_tokens, message.repeated_tokens)


def start_message(start: Start) -> pb.Start:
    """A start as a message."""
    return pb.Start(
        instance=start.instance,
        cost=start.cost,
        new_tokens=start.prefill.new,
        prefix_tokens=start.prefill.prefix,
        moved_tokens=start.moved,
        repeated_tokens=start.repeated,
    )
