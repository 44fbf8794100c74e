"""The state of one node that answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.nodes import Node
from tokenlake_operator.words import amount, span
from tokenlake_proto.v1 import admin_pb2 as pb

UNUSABLE_SHARE = 0.05
"""Share of the memory that holds no segment from which on it is a warning."""
REFUSED_SHARE = 0.01
"""Share of the segments that engines wanted to store from which on refusals are a warning."""
TRUST = (
    "ask first whether both nodes belong to this cluster, because a CA in 'ca' lets all nodes in that it signs. "
    "If they do, give both certificates of one CA, or put the CAs of all nodes into 'ca' of each"
)
_CURES = (
    ("cluster secret", "peer-secret", "set the same 'cluster_secret' on all nodes"),
    ("belongs to the cluster", "peer-cluster", "correct the address, or set the same 'cluster' on all nodes"),
    ("two daemons are called", "peer-name-twice", "give each node a name of its own"),
    ("calls itself", "peer-name", "give the node the name under which 'peers' lists that address"),
    ("not a member", "peer-not-member", "set the same 'peers' on all nodes; with etcd, let both nodes reach it"),
    ("expired", "peer-certificate-expired", "renew the certificate that is named; synchronise the clocks"),
    ("not valid yet", "peer-certificate-early", "synchronise the clocks of both machines"),
    ("another node was dialled", "peer-certificate-name", "correct the address of that node in 'peers'"),
    ("certificate is for", "peer-certificate-name", "give that node a certificate for its name and this cluster"),
    ("signed by a ca", "peer-certificate-ca", TRUST),
    ("unknown ca", "peer-certificate-ca", TRUST),
    ("plain", "peer-encryption", "set 'certificate', 'key' and 'ca' on all nodes, or on none"),
    ("without tls", "peer-encryption", "set 'certificate', 'key' and 'ca' on all nodes, or on none"),
    ("version", "peer-version", "install versions of TokenLake with a common protocol on all nodes"),
)
"""(text in the reason of a refusal, in small letters; name of the check; cure). The first that matches counts."""


def check_node(node: Node) -> Iterator[Finding]:
    """Yield findings about the membership of the node, its connections with peers, its disks, engines that go without
    it, streams of KV events, and counters that should be 0."""
    status = node.status
    yield from _membership(node.name, status)
    for peer in status.peers:
        yield from _peer(node.name, peer)
    for disk in status.disks:
        yield from _disk(node.name, disk)
    yield from _memory(node.name, status)
    yield from check_refused(node.name, status.refused)
    for stream in status.kv_events:
        if stream.problem:
            where = f"{node.name}, kv_events of '{stream.model}' for tenant '{stream.tenant}'"
            yield Finding("error", "kv-events-unseen", where, f"routers see nothing: {stream.problem}", stream.cure)
    yield from _counters(node.name, status)


def check_refused(name: str, refused: Iterable[pb.RefusedEngine]) -> Iterator[Finding]:
    """Yield a finding for each reason for which processes of engines go without the pool. `name`: of the node.
    `refused`: the processes, those that were refused last at the end. An engine that declines serves a model or a
    configuration that the pool cannot serve, which is no fault of either: a warning."""
    by_reason: dict[str, list[pb.RefusedEngine]] = {}
    for each in refused:
        by_reason.setdefault(each.reason, []).append(each)
    for reason, engines in by_reason.items():
        newest = engines[-1]
        process = f"process {newest.pid} of uid {newest.uid}"
        where = process if len(engines) == 1 else f"{len(engines)} processes, the last one {process}"
        yield Finding(
            "warning" if reason == "declined" else "error",
            f"engine-{reason}",
            f"{name}, {where}",
            f"without the pool for {span(newest.for_s)}: {newest.problem}",
            newest.cure,
        )


def check_changed(node: Node, expected: dict[str, str], file: str) -> Iterator[Finding]:
    """Yield a finding where the daemon runs with other settings than its file gives now. `expected`: by name, the value
    that the file and the environment give now, as `tokenlake config show` prints it. `file`: its name."""
    running = {name: each.value for name, each in node.settings.items()}
    changed = [name for name, value in expected.items() if name in running and running[name] != value]
    if changed:
        listed = ", ".join(
            f"{name} = {expected[name]} (the daemon has {running[name] or 'nothing'})" for name in changed
        )
        yield Finding(
            "warning",
            "settings-changed",
            f"{node.name}, {file}",
            f"the daemon runs with other settings: {listed}",
            "restart the daemon; or correct --config, if this is not its file",
        )


def _membership(name: str, status: pb.GetStatusResponse) -> Iterator[Finding]:
    state, cluster = status.membership, status.cluster
    kept_out = [peer for peer in state.unproven if peer.state != "connected"]
    for peer in kept_out:
        lasted = f"{peer.state} for {span(peer.for_s)}: {peer.reason}"
        if state.known:
            problem = f"'{peer.node}' asks to join and stays out: {lasted}"
            asked = f"'{peer.node}' belongs to the cluster '{cluster}'. If not, stop it, and give etcd another password"
        else:
            problem = f"it serves its engines alone, because no member has proven it; '{peer.node}': {lasted}"
            asked = f"this node belongs to the cluster '{cluster}' of its etcd. If not, correct 'cluster' or 'etcd'"
        cure = f"ask first whether {asked}. If it does: {cure_of(peer)}"
        yield Finding("warning" if state.known else "error", "not-admitted", f"{name} - {peer.node}", problem, cure)
    if (state.problem or not state.known) and (state.known or not kept_out):
        cure = "start etcd, or let this node reach it; the node goes on by itself"
        if "no member runs" in state.problem:
            cure = "start a member, or remove the members that are gone for good (`tokenlake remove NAME`)"
        elif "no member of the ring has proven it" in state.problem:
            cure = (
                "let the members reach this node at that address: correct 'advertise' or 'listen', or let the firewall "
                "pass the port; `tokenlake status` of a member has the reason"
            )
        yield Finding(
            "error",
            "membership",
            name,
            f"{'its members cannot be read' if state.known else 'it serves its engines alone'}: {state.problem}",
            cure,
        )
    if state.absent:
        yield Finding(
            "warning",
            "members-absent",
            ", ".join(state.absent),
            "their daemons are not registered: each of their keys has one directory node in place of two",
            "start these daemons, or `tokenlake remove NAME` for a node that is gone for good",
        )


def _peer(name: str, peer: pb.Peer) -> Iterator[Finding]:
    if peer.state != "connected":
        check, cure = _check(peer)
        problem = f"{peer.state} for {span(peer.for_s)}: {peer.reason}"
        yield Finding("error", check, f"{name} - {peer.node}", problem, cure)


def cure_of(peer: pb.Peer) -> str:
    """What lets a node connect with a peer that is not connected."""
    return _check(peer)[1]


def _check(peer: pb.Peer) -> tuple[str, str]:
    """The name of the check that finds why a peer is not connected, and the cure."""
    if peer.state == "other ring":
        return (
            "other-ring",
            "set the same 'peers' with the same sizes on all nodes, and restart the daemons one at a time",
        )
    if peer.state == "refused":
        text = peer.reason.lower()
        found = ((check, cure) for part, check, cure in _CURES if part in text)
        return next(found, ("peer-refused", "do as the reason says"))
    if "it has not connected to this node" in peer.reason:
        cure = f"list this node in 'peers' of '{peer.node}', at an address that it reaches, and start that daemon"
        return "peer-one-sided", cure
    cure = f"start the daemon of '{peer.node}', correct its address, or let the firewall pass its port"
    return "peer-unreachable", cure


def _disk(name: str, disk: pb.Disk) -> Iterator[Finding]:
    where = f"{name}, {disk.path}"
    if not disk.serving and disk.problem:
        cure = (
            "look at `dmesg` and `smartctl -a` for errors, at `iostat -x 1` for slow answers; mount a missing path; "
            "give missing keys in 'disk_keys'; the daemon checks the device by itself and uses it again"
        )
        yield Finding("error", "disk-set-aside", where, f"the device is set aside: {disk.problem}", cure)
    elif disk.problem:
        cure = "free space of its file system, or give a lower size in 'disk'"
        yield Finding("warning", "disk-full", where, disk.problem, cure)
    if disk.lost_segments:
        problem = f"{disk.lost_segments:,} segments were lost when the device was opened: their files were damaged"
        cure = "look at `dmesg` and `smartctl -a` for errors"
        yield Finding("warning", "disk-lost", where, problem, cure)


def _memory(name: str, status: pb.GetStatusResponse) -> Iterator[Finding]:
    unusable = status.unusable_bytes / max(1, status.memory_bytes)
    if unusable > UNUSABLE_SHARE:
        sizes = ", ".join(amount(size) for size in sorted({pool.slot_bytes for pool in status.pools}))
        yield Finding(
            "warning",
            "memory-unusable",
            name,
            f"{100 * unusable:.0f} % of its memory can hold no segment: those of its engines take {sizes}",
            "give a 'memory' that is a multiple of that, or much more than that; without 'region_size', if that is set",
        )


def _counters(name: str, status: pb.GetStatusResponse) -> Iterator[Finding]:
    counters = status.counters
    confirmed = counters["tokenlake_confirmed_segments_total"]
    if confirmed:
        yield Finding(
            "error",
            "corrupt-memory",
            name,
            f"{confirmed} copies in its memory had wrong bytes",
            "test the memory of the machine (`memtest86`), and look for an engine that writes after commit",
        )
    refused, stored = counters["tokenlake_refused_segments_total"], counters["tokenlake_stored_segments_total"]
    if refused > REFUSED_SHARE * (refused + stored) and refused >= 100:
        yield Finding(
            "warning",
            "stores-refused",
            name,
            f"{refused} segments got no slot, beside {stored} that were stored",
            "give more 'memory'; or a larger 'dirty_share' or quota, where the log of the engine names that code",
        )
    unanswered = counters["tokenlake_unanswered_fetches_total"]
    if unanswered >= 10 and unanswered > REFUSED_SHARE * counters["tokenlake_received_segments_total"]:
        yield Finding(
            "warning",
            "fetches-unanswered",
            name,
            f"{unanswered} transfers from other nodes brought no bytes in time",
            "look at the paths that are reported as slow or closed, and at the limits and the log of the other nodes",
        )
