"""Makes the JSON of the page from the messages of the control plane. Every list has a limit, and every name too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenlake.core.report.explain import RecentRequest
from tokenlake.memory.region import PAGE
from tokenlake.wire.funnel import Funnel
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.page.document import (
    NodeState,
    PageCall,
    PageDisk,
    PageDocument,
    PageEvent,
    PageExplanation,
    PageHistory,
    PageLink,
    PageMiss,
    PageNode,
    PagePrefix,
    PageProblem,
    PageTenant,
    PageTokensCount,
)

MAX_NODES, MAX_TENANTS, MAX_PREFIXES, MAX_CALLS, MAX_EVENTS, MAX_PROBLEMS = 256, 100, 12, 8, 64, 32
MAX_TEXT = 256
"""Limit of the characters of a name or a text; the rest is cut off."""
RATES_S = 10.0
"""Seconds between two states of which rates are made, at most."""
READ, WRITTEN = "tokenlake_read_bytes_total", "tokenlake_written_bytes_total"


class Facts(NamedTuple):
    """The state of the node at one moment, for all tenants."""

    at: float
    """Seconds of the monotonic clock."""
    status: pb.GetStatusResponse
    cluster: pb.GetClusterResponse
    recent: Sequence[RecentRequest]
    sent: Mapping[str, int]
    received: Mapping[str, int]
    """Bytes of segments by other node, since the start."""
    quotas: Mapping[str, int]
    """Memory that each tenant of the settings may have at most."""


def short(text: str) -> str:
    """The text, cut off at the limit."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def document(
    facts: Facts,
    before: Facts | None,
    tenant: str,
    history: PageHistory,
    events: list[PageEvent],
    activity: pb.GetActivityResponse,
    funnels: Sequence[Funnel | None],
) -> PageDocument:
    """The JSON of the page. `before`: a state of at most `RATES_S` before, for rates. `tenant`: the only one that
    `facts.status` and `activity` show; empty for all. `funnels`: of each slow call of `activity`."""
    status = facts.status
    seconds = facts.at - before.at if before is not None else 1.0
    used = sum(map(_used, status.pools))
    nodes = sorted(
        _nodes(facts, used),
        key=lambda each: (each.state != "this node", each.state == "connected", _natural(each.name)),
    )
    tenants = sorted(_tenants(facts, before, seconds, tenant), key=lambda each: (-_fullness(each), each.name))
    counters = status.counters
    return PageDocument(
        node=short(status.node),
        cluster=short(status.cluster),
        version=status.version,
        made_s=round(status.clock_s, 2),
        uptime_s=round(status.uptime_s, 1),
        tenant=short(tenant),
        epoch=status.membership.epoch,
        memory_bytes=status.memory_bytes,
        used_bytes=used,
        spare_bytes=status.spare_bytes,
        segments=sum(sum(pool.segments.values()) for pool in status.pools),
        engines=status.engines,
        processes=status.processes,
        tokens=PageTokensCount(
            asked=counters["tokenlake_asked_tokens_total"],
            supplied=counters["tokenlake_supplied_tokens_total"],
            engine_had=counters["tokenlake_engine_had_tokens_total"],
            missed=counters["tokenlake_missed_tokens_total"],
            saved_prefill_s=counters["tokenlake_saved_prefill_milliseconds_total"] / 1e3,
        ),
        history=history,
        problems=list(_problems(status))[:MAX_PROBLEMS],
        nodes=nodes[:MAX_NODES],
        nodes_left_out=max(0, len(nodes) - MAX_NODES),
        tenants=tenants[:MAX_TENANTS],
        tenants_left_out=max(0, len(tenants) - MAX_TENANTS),
        disks=[_disk(each) for each in status.disks],
        links=_links(facts, before, seconds),
        prefixes=[_prefix(each) for each in activity.prefixes],
        requests=activity.requests,
        alone=activity.alone,
        calls=[_call(*each) for each in zip(activity.calls, funnels, strict=True)],
        events=events,
    )


def _natural(name: str) -> list[str | int]:
    """A key that sorts n2 before n10."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", name))]


def _used(pool: pb.SlotPool) -> int:
    return (pool.slots - pool.free_slots) * pool.slot_bytes


def _nodes(facts: Facts, used: int) -> Iterator[PageNode]:
    """`used`: bytes of this node's memory that hold segments."""
    own = facts.status.node
    peers = {each.node: each for each in facts.status.peers}
    for member in facts.cluster.members:
        peer = peers.get(member.node)
        here = member.node == own
        connected = here or (peer is not None and peer.state in ("connected", "other ring"))
        reason, for_s = ("", facts.status.uptime_s) if peer is None else (peer.reason, peer.for_s)
        share = used / max(1, facts.status.memory_bytes) if here else 1 - member.free_share
        yield PageNode(
            name=short(member.node),
            state=_state(member, peer, here),
            reason=short(reason),
            for_s=round(for_s, 1),
            location=short(member.location),
            memory_bytes=facts.status.memory_bytes if here else member.weight if member.weight >= PAGE else None,
            used_share=round(share, 4) if connected else None,
            sent_bytes_per_s=round(member.sent_bytes_per_s, 1) if connected else None,
        )


def _state(member: pb.Member, peer: pb.Peer | None, here: bool) -> NodeState:
    if member.draining:
        return "draining"
    if here:
        return "this node"
    state: Any = "unreachable" if peer is None else peer.state
    return state  # type: ignore[no-any-return]


def _fullness(tenant: PageTenant) -> float:
    return tenant.used_bytes / max(1, tenant.quota_bytes)


def _tenants(facts: Facts, earlier: Facts | None, seconds: float, only: str) -> Iterator[PageTenant]:
    used: dict[str, int] = {}
    segments: dict[str, int] = {}
    for pool in facts.status.pools:
        used[pool.tenant] = used.get(pool.tenant, 0) + _used(pool)
        segments[pool.tenant] = segments.get(pool.tenant, 0) + sum(pool.segments.values())
    counted = {each.tenant: each.counters for each in facts.status.tenants}
    known = {each.tenant: each.counters for each in earlier.status.tenants} if earlier is not None else {}

    def rate(name: str, counter: str) -> float | None:
        if earlier is None:
            return None
        now, before = counted.get(name), known.get(name)
        grown = (0 if now is None else now.get(counter, 0)) - (0 if before is None else before.get(counter, 0))
        return round(grown / seconds, 1)

    for name in dict.fromkeys([*facts.quotas, *used]):
        if only in ("", name):
            yield PageTenant(
                name=short(name),
                used_bytes=used.get(name, 0),
                quota_bytes=facts.quotas.get(name, facts.status.memory_bytes),
                segments=segments.get(name, 0),
                read_bytes_per_s=rate(name, READ),
                written_bytes_per_s=rate(name, WRITTEN),
            )


def _disk(disk: pb.Disk) -> PageDisk:
    return PageDisk(
        path=short(disk.path),
        state="serving" if disk.serving else "set aside" if disk.problem else "opening",
        problem=short(disk.problem),
        capacity_bytes=disk.capacity_bytes,
        used_bytes=disk.used_bytes,
        segments=disk.segments,
        lost_segments=disk.lost_segments,
    )


def _links(facts: Facts, earlier: Facts | None, seconds: float) -> list[PageLink]:
    def rate(now: Mapping[str, int], before: Mapping[str, int] | None, node: str) -> float | None:
        return None if before is None else round((now.get(node, 0) - before.get(node, 0)) / seconds, 1)

    links = [
        PageLink(
            node=short(node),
            sent_bytes=facts.sent.get(node, 0),
            received_bytes=facts.received.get(node, 0),
            sent_bytes_per_s=rate(facts.sent, None if earlier is None else earlier.sent, node),
            received_bytes_per_s=rate(facts.received, None if earlier is None else earlier.received, node),
        )
        for node in dict.fromkeys([*facts.sent, *facts.received])
    ]
    return sorted(links, key=lambda each: (-each.sent_bytes - each.received_bytes, each.node))


def _prefix(prefix: pb.HotPrefix) -> PagePrefix:
    return PagePrefix(
        key=prefix.key.hex(),
        tenant=short(prefix.tenant),
        requests=prefix.requests,
        asked_tokens=prefix.asked_tokens,
        supplied_tokens=prefix.supplied_tokens,
        engine_had_tokens=prefix.engine_had_tokens,
        newest=short(prefix.newest),
    )


def _call(call: pb.SlowCall, funnel: Funnel | None) -> PageCall:
    return PageCall(
        call="match" if call.call == "match" else "fetch",
        seconds=call.seconds,
        age_s=round(call.age_s, 1),
        tenant=short(call.tenant),
        request=short(call.request),
        explanation=None if funnel is None else _explanation(funnel),
    )


def _explanation(funnel: Funnel) -> PageExplanation:
    return PageExplanation(
        ideal=funnel.ideal,
        here=funnel.here,
        elsewhere={short(place): tokens for place, tokens in funnel.elsewhere[:MAX_CALLS]},
        fetched=funnel.fetched,
        supplied=funnel.supplied,
        engine_had=funnel.engine_had,
        held=funnel.held,
        missed=[
            PageMiss(reason=each.reason, tokens=each.tokens, detail=short(each.detail))
            for each in funnel.missed[:MAX_CALLS]
        ],
    )


def _problems(status: pb.GetStatusResponse) -> Iterable[PageProblem]:
    membership = status.membership
    if not membership.known or membership.problem:
        alone = "" if membership.known else "this node serves its engines alone: "
        yield PageProblem(what=short(f"{alone}{membership.problem or 'it is no member yet'}"), cure="")
    for peer in status.peers:
        if peer.state != "connected":
            yield PageProblem(what=short(f"node '{peer.node}' is {peer.state}: {peer.reason}"), cure="")
    for disk in status.disks:
        if disk.problem:
            yield PageProblem(what=short(f"disk {disk.path}: {disk.problem}"), cure="")
    for engine in status.refused:
        tenant = f" of tenant '{engine.tenant}'" if engine.tenant else ""
        text = f"an engine{tenant} (process {engine.pid}, uid {engine.uid}) goes without the pool: {engine.problem}"
        yield PageProblem(what=short(text), cure=short(engine.cure))
    for stream in status.kv_events:
        if stream.problem:
            text = f"KV events of tenant '{stream.tenant}', model {stream.model}: {stream.problem}"
            yield PageProblem(what=short(text), cure=short(stream.cure))
