"""Daemons with certificates, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.robustness.live import PATIENT
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.ports import reserve_port


def authority(directory: Path, cluster: str = "tokenlake") -> Path:
    """Make a CA in a new directory, and return the directory."""
    init_ca(directory, cluster)
    return directory


def files(ca: Path, node: str, trusted: Path | None = None) -> dict[str, str]:
    """The settings of `node` with a certificate of the CA in `ca`, which is made if there is none yet. `trusted`: the
    file of other CAs that the node trusts."""
    certificate, key = ca / f"{node}.pem", ca / f"{node}-key.pem"
    if not certificate.exists():
        issue(ca, node)
    return {"certificate": str(certificate), "key": str(key), "ca": str(trusted or ca / "ca.pem")}


def encrypted(
    count: int,
    memory: str = "4MiB",
    region_size: str = "1MiB",
    via: Mapping[tuple[str, str], int] | None = None,
    **settings: str,
) -> Cluster:
    """A cluster as `tests.robustness.live.daemons` makes it, not started yet, whose nodes have certificates."""
    cluster = Cluster(count, memory, region_size, via, **{"match_deadline_ms": "2000", **settings})
    cluster.deadlines = PATIENT
    ca = authority(cluster.directory / "ca")
    for node in cluster.nodes:
        node.settings |= files(ca, node.name)
    return cluster


def nodes(cluster: Cluster, settings: dict[str, dict[str, str]], hub: str = "") -> list[Node]:
    """Start nodes of these names with these settings that are each other's peers; with a `hub`, it alone is a peer of
    the others."""
    addresses = {name: f"127.0.0.1:{reserve_port()}" for name in settings}
    made = []
    for name, own in settings.items():
        known = [other for other in settings if hub in ("", name, other)]
        common = {"memory": "4MiB", "region-size": "1MiB", "match-deadline-ms": "2000", "listen": addresses[name]}
        common["peers"] = ",".join(f"{other}={addresses[other]}" for other in known)
        made.append(Node(name, cluster.directory, common | own))
        made[-1].start()
    cluster.nodes += made
    return made
