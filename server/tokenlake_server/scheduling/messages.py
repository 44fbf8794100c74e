"""Protobuf messages from and to the types of the planner. A `ValueError` names the fault of a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tokenlake.config import Tenant
from tokenlake.errors import LayoutRefused, LimitReached
from tokenlake.hints import Hints
from tokenlake.identity import Fingerprint, NodeId, SegmentKey
from tokenlake.keys import KEY_BYTES, Prefix, Salt, root_key
from tokenlake.opaque_layout import AnyLayout, OpaqueLayout
from tokenlake.planner import Model, Plans, PrefixTree, Rates, Request, Way, grow
from tokenlake.planner.fits import Fit
from tokenlake.planner.router import Prefill, Start
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.messages import MAX_KEYS, check_name, keys_of

MAX_PROMPTS = 256
"""Limit of the prompts of one message."""
MAX_TOKENS = 1 << 18
"""Limit of the tokens of all prompts of one message, where the daemon computes their keys."""
MAX_PRODUCT = 1 << 20
"""Limit of the sequences of a tree times the instances of a plan, where nodes have locations: the distance of each pair
is calculated."""
_WAYS = {
    Way.LOCAL: pb.WAY_LOCAL,
    Way.FETCH: pb.WAY_FETCH,
    Way.SHIP: pb.WAY_SHIP,
    Way.RECOMPUTE: pb.WAY_RECOMPUTE,
}


def request_of(prompt: pb.Prompt, segment_tokens: int, tenant: Tenant, layouts: Mapping[bytes, AnyLayout]) -> Request:
    """A prompt with its keys, which are computed where it has tokens. `layouts`: those of the tenant, by fingerprint.
    Raises ValueError, `LayoutRefused`, `LimitReached`."""
    check_name("request", prompt.name)
    tokens = prompt.tokens
    if prompt.token_ids:
        layout = layouts.get(prompt.fingerprint)
        if layout is None:
            raise LayoutRefused("no engine of this tenant has connected with a layout of this fingerprint")
        if isinstance(layout, OpaqueLayout):
            raise LayoutRefused("the layout is opaque: its keys follow from hashes of its engine and not from tokens")
        if layout.segment_tokens != segment_tokens:
            raise ValueError(f"segments of {segment_tokens} tokens; those of the layout have {layout.segment_tokens}")
        if len(prompt.token_ids) % 4:
            raise ValueError(f"token_ids take {len(prompt.token_ids)} bytes, which is no multiple of 4")
        ids = np.frombuffer(prompt.token_ids, "<u4")
        if len(ids) > MAX_TOKENS:
            raise LimitReached(f"a prompt of {len(ids)} tokens; the limit is {MAX_TOKENS}")
        adapter = prompt.adapter if prompt.HasField("adapter") else None
        ours = prompt.salt if prompt.HasField("salt") else None
        salt: Salt = (ours, prompt.request_salt) if prompt.HasField("request_salt") else ours
        root = root_key(tenant.secret, Fingerprint(prompt.fingerprint), adapter, salt)
        prefix = Prefix(root, segment_tokens)
        prefix.extend(ids)
        keys: Sequence[SegmentKey] = prefix.keys
        tokens = tokens or len(ids)
    else:
        keys = keys_of(prompt.keys)
    answer = prompt.answer_tokens if prompt.HasField("answer_tokens") else None
    return Request(name=prompt.name, keys=tuple(keys), tokens=tokens, answer_tokens=answer)


def check_size(prompts: Sequence[pb.Prompt], segment_tokens: int) -> None:
    """Raises `LimitReached` for more prompts, segments or tokens than one message may have, ValueError for a size
    of segments that no layout may have."""
    if not 1 <= segment_tokens <= 1 << 20:
        raise ValueError(f"segment_tokens is {segment_tokens}; expected 1 to {1 << 20}")
    if len(prompts) > MAX_PROMPTS:
        raise LimitReached(f"{len(prompts)} prompts; the limit of a message is {MAX_PROMPTS}")
    tokens = sum(len(each.token_ids) // 4 for each in prompts)
    if tokens > MAX_TOKENS:
        raise LimitReached(f"prompts of {tokens} tokens; the limit of a message is {MAX_TOKENS}")
    keys = sum(len(each.keys) // KEY_BYTES + len(each.token_ids) // 4 // segment_tokens for each in prompts)
    if keys > MAX_KEYS:
        raise LimitReached(f"prompts of {keys} segments; the limit of a message is {MAX_KEYS}")


def check_work(tree: PrefixTree, instances: int) -> None:
    """Raises `LimitReached` for a plan among instances with locations that would take longer than a second."""
    if len(tree.sequences) * instances > MAX_PRODUCT:
        raise LimitReached(
            f"{len(tree.sequences)} sequences and {instances} instances of nodes with locations; the limit of their "
            f"product is {MAX_PRODUCT}: plan fewer prompts, or name fewer instances in 'idle', in one call"
        )


def tree_message(tree: PrefixTree) -> pb.PrefixTree:
    """A tree as a message."""
    return pb.PrefixTree(
        prompts=[
            pb.Prompt(
                name=each.name, keys=join_keys(list(each.keys)), tokens=each.tokens, answer_tokens=each.answer_tokens
            )
            for each in tree.requests
        ],
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
        hit_tokens=tree.hit_tokens,
    )


def tree_of(message: pb.PrefixTree, tenant: Tenant) -> PrefixTree:
    """The tree of a message: grown again from its requests and owners, so that no message makes a tree whose parts
    contradict each other. Raises ValueError, `LimitReached`."""
    check_size(message.prompts, message.segment_tokens)
    requests = [request_of(each, message.segment_tokens, tenant, {}) for each in message.prompts]
    owners: dict[SegmentKey, tuple[NodeId, ...]] = {}
    disk_s: dict[SegmentKey, float] = {}
    for sequence in message.sequences:
        keys = keys_of(sequence.keys)
        owners |= dict.fromkeys(keys, tuple(map(NodeId, sequence.nodes)))
        if sequence.disk_s:
            disk_s |= dict.fromkeys(keys, _finite("disk_s", sequence.disk_s) / max(1, len(keys)))
    tree = grow(requests, owners, message.segment_tokens, disk_s)
    if len(tree.sequences) != len(message.sequences):
        raise ValueError(f"a tree of {len(message.sequences)} sequences; its requests make {len(tree.sequences)}")
    return tree


def model_of(fleet: pb.Fleet) -> Model:
    """The sizes of the model that a fleet runs. Raises ValueError."""
    for name in ("layers", "segment_bytes", "segment_tokens", "query_bytes"):
        if not 1 <= getattr(fleet, name) <= 1 << 40:
            raise ValueError(f"field '{name}' of the fleet is {getattr(fleet, name)}; expected 1 to {1 << 40}")
    return Model(fleet.layers, fleet.segment_bytes, fleet.query_bytes)


def rates_of(message: pb.Rates) -> Rates:
    """The planner's measured inputs. Raises ValueError."""
    rates = Rates()
    _give(rates.copy, message, "copy")
    _give(rates.prefill, message, "prefill")
    _give(rates.decode, message, "decode")
    if message.answer_tokens:
        rates.answer_tokens.add(_finite("answer_tokens", message.answer_tokens))
    if len(message.peers) > MAX_PROMPTS * 4:
        raise LimitReached(f"rates of {len(message.peers)} peers; the limit is {MAX_PROMPTS * 4}")
    for name, each in message.peers.items():
        peer = rates.peer(NodeId(name))
        _give(peer.fetch, each, "fetch")
        _give(peer.queries, each, "queries")
        if each.open_s:
            peer.open_s.add(_finite("open_s", each.open_s))
    return rates


def _give(fit: Fit, message: pb.Rates | pb.PeerRates, field: str) -> None:
    given: pb.Fit = getattr(message, field)
    if given.coefficients:
        fit.give([_finite(field, each) for each in given.coefficients], known=given.known)


def _finite(field: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"'{field}' is {value}; expected a number of at least 0")
    return value


def plans_message(plans: Plans) -> pb.GenPlansResponse:
    """Plans as a message."""
    return pb.GenPlansResponse(
        plans=[
            pb.Plan(
                node=query.node,
                instances=group,
                decisions=[
                    pb.Decision(
                        sequence=each.sequence,
                        way=_WAYS[each.way],
                        owner=each.owner or "",
                        requests=each.requests,
                    )
                    for each in query.decisions
                ],
                seconds=query.seconds,
                new_segments=[
                    pb.NewSegments(request=request, first=first, count=count)
                    for request, first, count in transfer.segments
                ],
            )
            for query, transfer, group in zip(plans.query_plans, plans.transfer_plans, plans.groups, strict=True)
        ]
    )


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


def start_of(message: pb.Start) -> Start:
    """The start of a message."""
    prefill = Prefill(max(1, message.new_tokens), message.prefix_tokens)
    return Start(message.instance, message.cost, prefill, message.moved_tokens, message.repeated_tokens)


def hints_of(message: pb.HintRequest) -> Hints:
    """The hints of a message. Raises ValueError."""
    return Hints(
        outlook=int(message.outlook),
        category=message.category,
        stop_reason=message.stop_reason,
        priority=message.priority,
        ttl_s=message.ttl_s,
        pin_s=message.pin_s,
    )


def prefetched_message(codes: bytes | bytearray) -> pb.PrefetchResponse:
    """The outcome of a prefetch; `codes`: one per segment of the prompt."""
    here, missing = codes.count(Code.LOCAL), codes.count(Code.MISSING)
    refused = sum(Code(code).refused and code != Code.BAD_CHECKSUM for code in codes)
    return pb.PrefetchResponse(
        here=here,
        missing=missing,
        refused=refused,
        lost=len(codes) - here - missing - refused,
        prefix=len(codes) - len(bytes(codes).lstrip(bytes([Code.LOCAL]))),
    )


def distinct(requests: Iterable[Request], segment_tokens: int) -> list[SegmentKey]:
    """The keys that the cached prefixes of the requests may contain, each once."""
    found: dict[SegmentKey, None] = {}
    for each in requests:
        found |= dict.fromkeys(each.keys[: max(0, each.tokens - 1) // segment_tokens])
    return list(found)
