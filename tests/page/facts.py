"""States of large clusters with long and hostile names, as the page gets them."""

from __future__ import annotations

import gzip
from typing import Any

import msgspec

from tokenlake.core.report.explain import RecentRequest
from tokenlake.identity import TenantId
from tokenlake.wire.funnel import Funnel, Missed
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.control.messages import activity_message
from tokenlake_server.page import build
from tokenlake_server.page.document import PageDocument, PageEvent, PageHistory
from tokenlake_server.page.history import MAX_SAMPLES

HOSTILE = '<img src=x onerror="window.hacked=1">\'\u202e\u0000</script><script>window.hacked=1</script>${7*7}{{7*7}}'
"""A name that a page must show as it is."""


def facts(nodes: int, tenants: int, name: str = "", at: float = 100.0, grown: int = 0) -> build.Facts:
    """`name`: part of each name. `grown`: bytes by which counters have grown."""
    status = pb.GetStatusResponse(
        node=f"n0{name}",
        cluster=f"cluster{name}",
        version="0.1.0",
        uptime_s=at,
        memory_bytes=tenants << 20,
        clock_s=1.8e9 + at,
        engines=3,
        processes=6,
        membership=pb.Membership(known=True, epoch=7),
        pools=[
            pb.SlotPool(
                tenant=f"t{number}{name}", slot_bytes=1 << 16, slots=16, free_slots=number % 16, segments={"primary": 3}
            )
            for number in range(tenants)
        ],
        tenants=[
            pb.TenantCounters(tenant=f"t{number}{name}", counters={build.READ: grown, build.WRITTEN: 2 * grown})
            for number in range(tenants)
        ],
        peers=[
            pb.Peer(
                node=f"n{number}{name}",
                state="connected" if number % 10 else "unreachable",
                reason="" if number % 10 else f"no answer{name}",
                for_s=5.0,
            )
            for number in range(1, nodes)
        ],
        disks=[pb.Disk(path=f"/disk{name}", serving=True, capacity_bytes=1 << 40, used_bytes=1 << 39, segments=9)],
        refused=[
            pb.RefusedEngine(tenant=f"t1{name}", pid=7, reason="token", problem=f"bad token{name}", cure=f"cure{name}")
        ],
    )
    members = [
        pb.Member(
            node=f"n{number}{name}",
            weight=1 << 34,
            draining=number == 3,
            usable=True,
            free_share=number % 10 / 10,
            sent_bytes_per_s=1e6 * number,
            location=f"rack-{number // 8}{name}"[:300],
        )
        for number in range(nodes)
    ]
    cluster = pb.GetClusterResponse(cluster="cluster", epoch=7, members=members)
    recent = [
        RecentRequest(
            TenantId(f"t{number % 5}{name}"),
            f"r{number}{name}",
            5.0,
            bytes([number % 20]) * 32,
            900,
            300,
            100,
            0.01,
            0.02,
        )
        for number in range(1024)
    ]
    sent = {f"n{number}{name}": grown for number in range(1, min(nodes, 65))}
    quotas = {f"t{number}{name}": 1 << 20 for number in range(tenants)}
    return build.Facts(at, status, cluster, recent, sent, dict(sent), quotas)


def funnel(name: str = "") -> Funnel:
    """The explanation of a request."""
    missed = tuple(Missed("evicted", 10, f"memory was full{name}, at n1{name} 5 s ago") for _ in range(20))
    return Funnel(f"r{name}", "n0", 5.0, 16, 900, 200, ((f"n1{name}", 100),), 100, 300, 0, missed, 100)


def document(nodes: int, tenants: int, name: str = "", tenant: str = "", **given: Any) -> PageDocument:
    """The JSON of the page of such a cluster."""
    before, now = facts(nodes, tenants, name), facts(nodes, tenants, name, at=105.0, grown=1000)
    activity = activity_message(now.recent, build.MAX_PREFIXES)
    del activity.calls[build.MAX_CALLS :]
    rates = [1234.5] * (MAX_SAMPLES - 1)
    ends = [1.8e9 + 5.0 * number for number in range(MAX_SAMPLES - 1)]
    history = PageHistory(end_s=ends, supplied=rates, engine_had=rates, missed=rates, sent=rates, received=rates)
    events = [
        PageEvent(at_s=1.8e9 - number, until_s=1.8e9 - number, what="peer", severity="warning", text=f"'n1{name}' went")
        for number in range(build.MAX_EVENTS)
    ]
    funnels = [funnel(name)] * len(activity.calls)
    made = build.document(now, before, tenant, history, events, activity, funnels)
    return msgspec.structs.replace(made, **given)


def compressed(made: PageDocument) -> bytes:
    """The body of the answer."""
    return gzip.compress(msgspec.json.encode(made), 5, mtime=0)
