"""Nodes that answer, compared: clocks, versions, settings, secrets, members, and the paths between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenlake.config import RuleSettings
from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.doctor.layouts import check_layouts
from tokenlake_operator.nodes import Node
from tokenlake_operator.words import per_second, span
from tokenlake_proto.v1 import admin_pb2 as pb

SKEW_S = 1.0
"""Seconds of difference between two clocks from which on it is reported. Larger differences make certificates look
expired and mix up the times in logs."""
LEAST_RATE = 50e6
"""Bytes per second below which a path is reported: computing a segment is about as fast as fetching it then."""
LEAST_MEASURED_S = 0.2
TRIP_SHARE = 0.5
"""Share of `match_deadline_ms` that a round trip may take: a match needs two."""
AGREE = (
    "match_deadline_ms",
    "suspect_ms",
    "region_size",
    "query_engine",
    *(name for name in RuleSettings.__struct_fields__ if name not in ("max_sessions", "location")),
)
"""Names of settings that may differ between nodes. A difference is reported, because in a pool of equal nodes it is
usually a mistake."""
MUST_AGREE = ("cluster", "etcd", "unencrypted_beyond_loopback")


def compare(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The first node is compared with each other one, and all layouts with each other."""
    first = nodes[0]
    for other in nodes[1:]:
        where = f"{first.name} - {other.name}"
        yield from _clocks(first, other, where)
        yield from _members(first, other)
        yield from _members(other, first)
        yield from _settings(first, other, where)
        yield from _secrets(first, other, where)
        if first.status.version != other.status.version:
            problem = f"versions {first.status.version} and {other.status.version}"
            yield Finding("warning", "versions", where, problem, "upgrade the older one")
    for node in nodes:
        for source, paths in node.paths.items():
            for path in paths:
                yield from _path(node, source, path)
    yield from check_layouts(nodes)
    yield from _locations(first)


def _clocks(first: Node, other: Node, where: str) -> Iterator[Finding]:
    skew = other.clock_offset_s - first.clock_offset_s
    if abs(skew) > SKEW_S + first.uncertainty_s + other.uncertainty_s:
        ahead, behind = (other, first) if skew > 0 else (first, other)
        problem = f"the clock of {ahead.name} is {span(abs(skew))} ahead of that of {behind.name}"
        cure = "synchronise both clocks (chrony, systemd-timesyncd; `timedatectl` says whether they are)"
        yield Finding("error", "clock-skew", where, problem, cure)


def _members(one: Node, other: Node) -> Iterator[Finding]:
    names = {member.node for member in other.cluster.members}
    if one.name not in names:
        yield Finding(
            "error",
            "members-differ",
            f"{one.name} - {other.name}",
            f"{one.name} has {other.name} as a member, and {other.name} has only {', '.join(sorted(names))}",
            f"add {one.name} to 'peers' of {other.name} and restart it; with etcd, set the same 'etcd' on both",
        )


def _settings(first: Node, other: Node, where: str) -> Iterator[Finding]:
    for names, check in ((MUST_AGREE, "settings-must-agree"), (AGREE, "settings-differ")):
        different = [
            name
            for name in names
            if name in first.settings
            and name in other.settings
            and first.settings[name].value != other.settings[name].value
        ]
        if different:
            listed = ", ".join(
                f"{name} = {first.settings[name].value or 'nothing'} and {other.settings[name].value or 'nothing'}"
                for name in different
            )
            severity = "error" if check == "settings-must-agree" else "warning"
            cure = "set one value on all nodes, and restart the daemons one at a time"
            yield Finding("error" if severity == "error" else "warning", check, where, listed, cure)


def _secrets(first: Node, other: Node, where: str) -> Iterator[Finding]:
    mine, theirs = _digests(first, "tenants"), _digests(other, "tenants")
    for tenant in sorted({*mine, *theirs}):
        if mine.get(tenant) == theirs.get(tenant):
            continue
        lacking = [node.name for node, known in ((first, mine), (other, theirs)) if tenant not in known]
        problem = f"{lacking[0]} has no tenant '{tenant}'" if lacking else f"other secrets of tenant '{tenant}'"
        cure = "give all nodes the same [[tenants]] with the same secrets: other secrets make other keys"
        yield Finding("error", "tenant-secrets", where, problem, cure)
    if first.settings and other.settings and not first.settings["certificate"].value:
        known = [set(_digests(each, "cluster_secret").values()) for each in (first, other)]
        if known[0] != known[1] and not known[0] & known[1]:
            problem = "they have no 'cluster_secret' in common"
            yield Finding("error", "cluster-secret", where, problem, "set the same 'cluster_secret' on all nodes")


def _locations(node: Node) -> Iterator[Finding]:
    """Locations of which the nodes can make no use: only some of the members have one, they differ in the number of
    their labels, or no two members are in one domain."""
    locations = {
        each.node: each.location
        for each in node.cluster.members
        if each.usable or each.location or each.node == node.name
    }
    labelled = {name: location for name, location in locations.items() if location}
    if len(locations) < 2 or not labelled:
        return
    problem = cure = ""
    if len(labelled) < len(locations):
        problem = f"no location: {', '.join(sorted(locations.keys() - labelled.keys()))}; the other members have one"
        cure = "set 'location' on all nodes: nodes without one count as far from all others"
    elif len({location.count("/") for location in labelled.values()}) > 1:
        problem = f"locations of different lengths: {', '.join(sorted(set(labelled.values())))}"
        cure = "give 'location' the same number of labels on all nodes"
    elif len({location.split("/")[0] for location in labelled.values()}) == len(labelled):
        problem = "each member is in a domain of its own, so that no node is nearer than another"
        cure = (
            "give nodes with fast links between them the same first label in 'location'; without such nodes, unset it"
        )
    if problem:
        yield Finding("warning", "locations", node.name, problem, cure)


def _digests(node: Node, setting: str) -> dict[str, str]:
    found = node.settings.get(setting)
    return dict(found.digests) if found is not None else {}


def _path(node: Node, source: str, path: pb.Path) -> Iterator[Finding]:
    where = f"{source} -> {node.name}"
    if path.problem:
        yield Finding(
            "error",
            "path-closed",
            where,
            f"segments do not pass from {path.address or 'it'}: {path.problem}",
            f"let the firewall pass TCP from {node.name} to that address ('listen', 'bulk_listen' of {source})",
        )
        return
    deadline = node.settings.get("match_deadline_ms")
    limit_s = TRIP_SHARE * float(deadline.value) / 1e3 if deadline is not None else 0.0
    if limit_s and path.round_trip_s > limit_s:
        waits = deadline.value if deadline is not None else ""
        problem = f"a round trip takes {span(path.round_trip_s)}, and matches wait for {waits} ms"
        cure = "use nodes of one data centre; else set 'match_deadline_ms' to four round trips on all nodes"
        yield Finding("warning", "path-far", where, problem, cure)
    rate = path.bytes / path.seconds if path.seconds else 0.0
    if path.seconds >= LEAST_MEASURED_S and rate < LEAST_RATE:
        problem = f"{path.address} delivers {per_second(rate)}"
        cure = (
            "look for other traffic, and for a wrong interface or MTU; use a faster network for 'listen' or "
            "'bulk_listen'"
        )
        yield Finding("warning", "path-slow", where, problem, cure)
