"""`tokenlake status`: the cluster at a glance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import click

from tokenlake_operator.doctor.base import FOUND, Finding, print_findings
from tokenlake_operator.doctor.cluster import compare
from tokenlake_operator.doctor.running import check_node
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.plain import plain
from tokenlake_operator.reaching import Target, operates
from tokenlake_operator.words import amount, share, span
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.tables import print_rows

ASKED = "tokenlake_asked_tokens_total"
TOKENS = {
    "supplied": "tokenlake_supplied_tokens_total",
    "engine had": "tokenlake_engine_had_tokens_total",
    "missed": "tokenlake_missed_tokens_total",
}
"""By the name of a column, the counter of a part of the asked tokens."""
SAVED = "tokenlake_saved_prefill_milliseconds_total"


@click.command()
@operates
def status(target: Target, as_json: bool) -> None:
    """Show the nodes of the cluster, their memory, the tokens that they supplied, and problems with their cures.

    Other nodes are asked too, where they can be reached from here: over their control sockets on this machine, or with
    a certificate at their setting `control`. Exit status 0: no error was found, 1: see the problems.
    """
    with reach_all(target) as (nodes, silent):
        first = nodes[0]
        findings = [each for node in nodes for each in check_node(node)] + list(compare(nodes))
        if as_json:
            answer = {
                "cluster": plain(first.cluster),
                "nodes": {node.name: plain(node.status) for node in nodes},
                "not_asked": silent,
                "findings": [each.plain() for each in findings],
            }
            click.echo(json.dumps(answer))
        else:
            _print(nodes, findings, silent)
    if any(each.severity == "error" for each in findings):
        raise click.exceptions.Exit(FOUND)


def _print(nodes: Sequence[Node], findings: Iterable[Finding], silent: Mapping[str, str]) -> None:
    cluster = nodes[0].cluster
    title = f"cluster {cluster.cluster}: {len(cluster.members)} nodes, epoch {cluster.epoch}"
    print_rows(COLUMNS, _rows(nodes, cluster.members), title)
    if any(node.status.disks for node in nodes):
        print_rows(DISK_COLUMNS, _disk_rows(nodes), "disks")
    if any(node.status.kv_events for node in nodes):
        print_rows(STREAM_COLUMNS, _stream_rows(nodes), "KV events for routers")
    print_findings(findings)
    for name, reason in silent.items():
        click.echo(f"{name} was not asked: {reason}")


COLUMNS = (
    "node",
    "state",
    "location",
    "memory",
    "used",
    "unusable",
    "segments",
    "asked tokens",
    *TOKENS,
    "prefill saved",
    "engines",
    "processes",
    "up",
    "version",
)

DISK_COLUMNS = ("node", "path", "state", "size", "used", "segments")
STREAM_COLUMNS = ("node", "tenant", "model", "block tokens", "segments published", "routers connected")


def _stream_rows(nodes: Iterable[Node]) -> Iterable[tuple[str, ...]]:
    for node in nodes:
        for each in node.status.kv_events:
            counts = f"{each.block_tokens}", f"{each.segments:,}", f"{each.readers}"
            yield node.name, each.tenant, each.model, *counts


def _disk_rows(nodes: Iterable[Node]) -> Iterable[tuple[str, ...]]:
    for node in nodes:
        for disk in node.status.disks:
            state = "serving" if disk.serving else "set aside" if disk.problem else "opening"
            state += f", {disk.lost_segments:,} lost" if disk.lost_segments else ""
            used = share(disk.used_bytes, disk.capacity_bytes) if disk.serving else ""
            size = amount(disk.capacity_bytes) if disk.serving else ""
            yield node.name, disk.path, state, size, used, f"{disk.segments:,}" if disk.serving else ""


def _rows(nodes: Iterable[Node], members: Iterable[pb.Member]) -> Iterable[tuple[str, ...]]:
    asked = {node.name: node.status for node in nodes}
    own = next(iter(asked), "")
    for member in members:
        state = "draining" if member.draining else "up" if member.usable or member.node == own else "not connected"
        found = asked.get(member.node)
        if found is None:
            used = f"{100 * (1 - member.free_share):.0f} %" if member.usable else ""
            yield member.node, state, member.location, "", used, *[""] * (len(COLUMNS) - 5)
            continue
        tokens = found.counters[ASKED]
        segments = sum(sum(pool.segments.values()) for pool in found.pools)
        yield (
            member.node,
            state,
            member.location,
            amount(found.memory_bytes),
            share(memory_used(found), found.memory_bytes),
            share(found.unusable_bytes, found.memory_bytes),
            f"{segments:,}",
            f"{tokens:,}",
            *(share(found.counters[name], tokens) for name in TOKENS.values()),
            span(found.counters[SAVED] / 1e3) if found.counters[SAVED] else "",
            str(found.engines),
            str(found.processes),
            span(found.uptime_s),
            found.version,
        )


def memory_used(found: pb.GetStatusResponse) -> int:
    """Bytes of slots that hold a segment, or that a process may still access."""
    return sum((pool.slots - pool.free_slots) * pool.slot_bytes for pool in found.pools)
